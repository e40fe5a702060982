"""Values that the user logs: `f.log({"critic": loss})`, `trainer.log`, `step.log`, and `phalanx.log` anywhere.

A tensor stays on its device until the loop reads its losses, so that logging never waits for the GPU. The main rank
records; a value that is `reduce`d over the ranks is a collective, as any other.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from phalanx.errors import UsageError, a_type, nearest
from phalanx.observe.events import LOGGED, MetricsReported, StepDone

Values = Mapping[str, Any] | str
Number = float | torch.Tensor

OWN_CURVES = frozenset({*StepDone.CURVES, "train/epoch_loss"})
"""The curves that a training loop of Phalanx draws by itself."""
_EXAMPLE = 'log({"critic": critic_loss})'
_LONGEST_NAME = 200
VAL = "val/"
"""Begins the names of values that are measured on the validation data."""


def checked(values: Values, value: Any = None, *, reserved: Iterable[str] = ()) -> dict[str, Number]:
    """Return what was given to `log` as numbers and tensors of one number; `reserved`: names that are not free."""
    if isinstance(values, str):
        values = {values: value}
    elif value is not None or not isinstance(values, Mapping):
        description = f"{type(values).__name__} {values!r}"[:80]
        raise UsageError(f"log takes names with numbers, and got {description}", hint=f"Write: {_EXAMPLE}")
    for name in values:
        _check_name(name, reserved)
    return {name: _number(name, value) for name, value in values.items()}


def _check_name(name: Any, reserved: Iterable[str]) -> None:
    if not isinstance(name, str):
        raise UsageError(f"log got the name {name!r}, which is not a text", hint=f"Write: {_EXAMPLE}")
    if name in reserved:
        raise UsageError(
            f"'{name}' is a curve that Phalanx draws by itself",
            hint=f"Choose another name, such as 'my/{name.rpartition('/')[2]}'.",
        )
    if not name.isprintable() or not all(part.strip(" .") for part in name.split("/")):  # "..": trackers make paths
        plain = "/".join(part.strip() for part in name.split("/") if part.strip(" .")) or "critic"
        raise UsageError(
            f"log got the name {name!r}: a slash stands between two words, as in 'gan/critic'",
            hint=f"Write: log({{'{plain}': ...}})",
        )
    if len(name) > _LONGEST_NAME:
        raise UsageError(
            f"log got a name of {len(name)} characters, '{name[:20]}...', and trackers take {_LONGEST_NAME}",
            hint="Choose a shorter name.",
        )


def _number(name: str, value: Any) -> Number:
    """Return a value as a float, or as a tensor on its device that later changes in place do not reach."""
    if isinstance(value, (bool, int, float)):
        return _as_float(name, value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex() and not value.is_meta:
        value = value.detach().to_dense().reshape(())
        return float(value) if value.device.type == "cpu" else value.clone()
    if isinstance(value, (str, bytes)):
        raise UsageError(f"log got '{name}' = {value!r}, which is a text", hint="log takes numbers; print texts.")
    if isinstance(value, torch.Tensor) and (value.is_meta or value.is_complex()):
        kind = "a tensor on the device meta, which has no value" if value.is_meta else f"a tensor of {value.dtype}"
        raise UsageError(f"log got '{name}' = {kind}, and takes a real number", hint=f"Write: {_EXAMPLE}")
    if isinstance(value, torch.Tensor) or (getattr(value, "ndim", None) and value.size != 1):
        raise UsageError(
            f"log got '{name}' = {a_type(value)} of shape {list(value.shape)}, and takes one number",
            hint=f"Log its mean, for example: log({{'{name}': value.mean()}})",
        )
    return _as_float(name, value.item() if getattr(value, "ndim", None) else value)  # NumPy's


def _as_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise UsageError(f"log got '{name}' = a number too large for a float", hint=f"Write: {_EXAMPLE}") from None
    except (TypeError, ValueError):
        kind = type(value).__name__
        raise UsageError(f"log got '{name}' = a {kind}, which is not a number", hint=f"Write: {_EXAMPLE}") from None


def checked_step(step: Any) -> int:
    """Return the step that was given to `log`."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(
            f"log got step = {step!r}, which does not number a step",
            hint="Give a whole number of at least 0, or leave step out: it is the loop's then.",
        )
    return number


_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def reduce_op(op: Any) -> dist.ReduceOp.RedOpType:
    """Return the operation of an all-reduce by its name; a mean is a sum that the caller divides."""
    if not isinstance(op, str) or op not in _OPS:
        raise UsageError(f"reduce: unknown op {op!r}. Allowed: {', '.join(_OPS)}.")
    return _OPS[op]


class Ranks(Protocol):
    """What reduces numbers: a `Formation`."""

    device: torch.device

    def reduce(self, value: float | torch.Tensor, op: str = "mean") -> torch.Tensor:
        """Reduce over the ranks, which all call this."""


def reduced(values: Mapping[str, Number], op: str, ranks: Ranks) -> dict[str, Number]:
    """Return values over all ranks, which call this together: one all-reduce, which the host does not wait for."""
    if not values:
        return {}
    numbers = [torch.as_tensor(value, dtype=torch.float64, device=ranks.device) for value in values.values()]
    return dict(zip(values, ranks.reduce(torch.stack(numbers), op).unbind(), strict=True))


class _Entry(NamedTuple):
    step: int
    name: str
    value: Number


class ValueLog:
    """The values that were logged since they were reported last, on the main rank."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()  # a thread of the user's may add to it while it is read
        self.names: set[str] = set()
        """All names that were logged so far."""

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, step: int, values: Mapping[str, Number]) -> None:
        """Keep the values of a step."""
        self._entries.extend([_Entry(step, name, value) for name, value in values.items()])
        self.names.update(values)

    def keep_complete(self, step: int) -> None:
        """Forget what an error may have left undone: values on a device, and those of steps after this one."""
        whole = [entry for entry in self._entries if entry.step <= step and not _is_on_device(entry.value)]
        self._entries = deque(whole)

    def read(self, steps: int) -> list[tuple[int, dict[str, float]]]:
        """Return the values by step, and forget them; `steps`: how many were taken since the last reading.

        Values of one step are averaged: those of its micro-batches. A name that was logged in every step is reported
        as the loss is: once, as the mean over these steps. One that was logged less often keeps its steps.
        """
        entries = [self._entries.popleft() for _ in range(len(self._entries))]
        points: dict[str, dict[int, list[float]]] = {}
        for entry, value in zip(entries, _on_host([entry.value for entry in entries]), strict=True):
            points.setdefault(entry.name, {}).setdefault(entry.step, []).append(value)
        values_of: dict[int, dict[str, float]] = {}
        for name, by_step in points.items():
            means = {step: sum(values) / len(values) for step, values in by_step.items()}
            first, last = min(means), max(means)
            # One less or more: those of the last step may come after the report, behind `optimizer.step()`.
            if steps > 1 and last - first < len(means) and abs(len(means) - steps) <= 1:
                means = {last: sum(means.values()) / len(means)}
            for step, mean in means.items():
                values_of.setdefault(step, {})[name] = mean
        return sorted(values_of.items())


def _is_on_device(value: Number) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _on_host(values: Sequence[Number]) -> list[float]:
    """Return the values as floats, with one transfer from each device."""
    numbers_on_host = [0.0 if isinstance(value, torch.Tensor) else value for value in values]
    places: dict[torch.device, list[int]] = {}
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            places.setdefault(value.device, []).append(position)
    for chosen in places.values():
        numbers = torch.stack([values[position].double() for position in chosen]).tolist()  # type: ignore[union-attr]
        for position, number in zip(chosen, numbers, strict=True):
            numbers_on_host[position] = number
    return numbers_on_host


def as_events(
    step: int, epoch: int, values: Mapping[str, float], *, ends_epoch: bool = False
) -> Iterator[MetricsReported]:
    """Yield the events of values logged at a step; those under `val/` are as an evaluation's."""
    measured = {name.removeprefix(VAL): value for name, value in values.items() if name.startswith(VAL)}
    others = {name: value for name, value in values.items() if not name.startswith(VAL)}
    if measured:
        yield MetricsReported(step, epoch, "val", measured, ends_epoch)
    if others:
        yield MetricsReported(step, epoch, LOGGED, others)


def never_logged(setting: str, name: str, names: Iterable[str], measured: Iterable[str] = ()) -> str:
    """Return a warning about a metric that a setting names, and that was not logged in the first epoch.

    `measured`: what evaluation measures instead, without `val/`.
    """
    logged_names = sorted(names)
    close = f"{VAL}{name}" if name in measured else nearest(name, logged_names)
    logged = f"logged so far: {', '.join(logged_names)}" if logged_names else "nothing was logged"
    return f"{setting}: '{name}' was not logged in the first epoch; {logged}." + (
        f" Did you mean '{close}'?" if close else ""
    )


class ValueLogger(Protocol):
    """What `phalanx.log` calls: the loop under way."""

    def log(self, values: Values, value: Any = None, *, step: int | None = None, reduce: str | None = None) -> None:
        """Record values."""


_LOOPS: list[weakref.ref[ValueLogger]] = []


def enter_loop(loop: ValueLogger) -> weakref.ref[ValueLogger]:
    """Let `phalanx.log` go to this loop, until it is left or an inner one is entered."""
    entered = weakref.ref(loop)
    _LOOPS.append(entered)
    return entered


def leave_loop(entered: weakref.ref[ValueLogger]) -> None:
    """Let `phalanx.log` go where it went before."""
    if entered in _LOOPS:
        _LOOPS.remove(entered)


def loop_under_way() -> ValueLogger | None:
    """Return the loop that `phalanx.log` goes to, if one is under way."""
    loops = (entered() for entered in reversed(_LOOPS))
    return next((loop for loop in loops if loop is not None), None)
