"""What a training step reads and changes on the host: a step that is recorded once and replayed must do neither."""

from __future__ import annotations

import itertools
import linecache
import random
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from phalanx import torch_compat

_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = frozenset(vars(nn.Module()))
_WAITS = "called a synchronizing CUDA operation"
"""How torch's warning begins where code waits for the device."""
_ABOUT_WAITS = "Synchronization debug mode"
"""How its warning about these warnings begins: they do not tell of all waits. A capture does."""

_MOST_ITEMS = 100
"""Of a list or a dict that are compared."""

State = dict[str, Any]
"""By name: values that can be compared."""


def seen(value: Any, depth: int = 3) -> Any:
    """Return what can be compared of a value: plain values, places of tensors, states of generators, what it holds."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, (nn.Module, type)) or depth == 0:
        return id(value)
    if isinstance(value, Mapping):
        return [(str(key), seen(item, depth - 1)) for key, item in itertools.islice(value.items(), _MOST_ITEMS)] + [
            len(value)
        ]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [seen(item, depth - 1) for item in itertools.islice(value, _MOST_ITEMS)] + [len(value)]
    return {name: seen(item, depth - 1) for name, item in _inside(value).items()}


def _inside(value: Any) -> dict[str, Any]:
    """Return what an object or a function holds: attributes, variables of a closure, arguments of a partial."""
    held = dict(getattr(value, "__dict__", {}))
    cells = getattr(value, "__closure__", None) or ()
    names = value.__code__.co_freevars if cells else ()
    for name, cell in zip(names, cells, strict=True):
        with suppress(ValueError):  # an empty cell
            held[name] = cell.cell_contents
    if isinstance(value, partial):
        held |= {"func": value.func, "args": value.args, "keywords": value.keywords}
    elif isinstance(value, MethodType):
        held["self"] = value.__self__
    return held


def model_state(model: nn.Module, loss_fn: Any = None) -> State:
    """Return what a model's modules and a loss hold on the host, and where their tensors lie."""
    found: State = {}
    if loss_fn is not None and not isinstance(loss_fn, nn.Module):
        found |= {f"loss_fn.{name}": seen(value) for name, value in _inside(loss_fn).items()}
    losses = [("loss_fn", each) for each in loss_fn.modules()] if isinstance(loss_fn, nn.Module) else []
    for path, module in [*model.named_modules(), *losses]:
        prefix = f"{path or type(module).__name__}."
        for name, value in vars(module).items():
            if type(value) in _PLAIN:
                found[prefix + name] = value
            elif name not in _OF_TORCH and name != "forward":  # compiled, or recomputed: made by this package
                found[prefix + name] = seen(value)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = (tensor.data_ptr(), tensor.requires_grad)
    return found


def optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    """Return what an optimizer keeps on the host: its settings, counters, and tensors of one number; not its rates."""
    kind = type(optimizer).__name__
    found = {f"{kind}.{name}": value for name, value in vars(optimizer).items() if type(value) in _PLAIN}
    for number, group in enumerate(optimizer.param_groups):
        settings = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
        found |= {f"{kind}.{name} of group {number}": value for name, value in settings.items() if _is_plain(value)}
    for number, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
                found[f"{kind}'s {name} of parameter {number}"] = value.item()
            elif _is_plain(value):
                found[f"{kind}'s {name} of parameter {number}"] = value
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value))


def random_state() -> State:
    """Return the states of the generators of random numbers on the host."""
    numpy: Any = np.random.get_state()
    own = torch.default_generator.get_state().numpy().tobytes()
    return {"random": random.getstate(), "numpy.random": (numpy[1].tobytes(), numpy[2]), "torch (on the CPU)": own}


def change(before: State, after: State) -> str:
    """Return the first name whose value differs; empty where all are equal."""
    names = (*after, *(name for name in before if name not in after))
    return next((name for name in names if name not in before or after.get(name) != before[name]), "")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def hooked(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return what has hooks of the user, which the host calls in every step; empty where nothing has."""
    for name in _STEP_HOOKS:
        if _users(getattr(optimizer, name, {})):
            return f"a hook on the step of {type(optimizer).__name__}"
    for path, module in model.named_modules():
        if any(_users(getattr(module, name, {})) for name in _HOOKS):
            return f"a hook on the module {path or type(module).__name__}"
    return ""


def _users(hooks: Mapping[Any, Any]) -> bool:
    """Whether some hooks are neither torch's nor of this package."""
    homes = (getattr(hook, "__module__", None) or type(hook).__module__ for hook in hooks.values())
    return any(home.partition(".")[0] not in ("torch", "phalanx") for home in homes)


class HostWatch:
    """Tells whether what a recorded step depends on has changed since: cheap enough to be asked after every step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        modules = list(model.modules())
        tables: list[dict[str, Any]] = [vars(module) for module in modules]
        self._groups = optimizer.param_groups
        self._tables = [_Table(table) for table in [*tables, *self._groups]]
        self._tensors = [
            (held, name, tensor, tensor.data_ptr(), tensor.requires_grad)
            for module in modules
            for held in (torch_compat.own_parameters(module), torch_compat.own_buffers(module))
            for name, tensor in held.items()
            if tensor is not None
        ]
        self._optimizer = optimizer
        self._first = optimizer.param_groups[0]["params"][0]
        self._state = optimizer.state.get(self._first)

    def has_changed(self) -> bool:
        """Whether a setting, a counter, a tensor's memory or what is trained is not what it was."""
        if (
            self._optimizer.param_groups is not self._groups
            or self._optimizer.state.get(self._first) is not self._state
        ):
            return True  # a state was loaded
        if any(table.has_changed() for table in self._tables):
            return True
        for held, name, tensor, place, trained in self._tensors:
            if held.get(name) is not tensor or tensor.data_ptr() != place or tensor.requires_grad is not trained:
                return True
        return False


class _Table:
    """The plain values of a dict, and how long its containers are; not learning rates, which a recording follows."""

    def __init__(self, held: dict[str, Any]) -> None:
        self._held, self._size = held, len(held)
        names = [name for name in held if name not in ("lr", "initial_lr")]
        self._plain = [(name, held[name]) for name in names if _is_plain(held[name])]
        own = [held[name] for name in names if name not in _OF_TORCH and isinstance(held[name], (list, dict, set))]
        self._sizes = [(value, len(value)) for value in own]

    def has_changed(self) -> bool:
        held = self._held
        if len(held) != self._size:
            return True
        for name, value in self._plain:
            now = held.get(name)
            if now is not value and now != value:
                return True
        return any(len(value) != size for value, size in self._sizes)


class HostUse:
    """Watches one step: afterwards `reason` says what of it needs the host; empty where nothing does."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any = None) -> None:
        self._model, self._optimizer, self._loss_fn = model, optimizer, loss_fn
        self.reason = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare what the host holds before and after, and note where code waits for the device."""
        states = model_state(self._model, self._loss_fn), optimizer_state(self._optimizer), random_state()
        with _noted_waits(self._model) as waits:
            yield
        drawn = change(states[2], random_state())
        changed = change(states[0], model_state(self._model, self._loss_fn))
        counted = change(states[1], optimizer_state(self._optimizer))
        hook = hooked(self._model, self._optimizer)
        if hook:
            self.reason = f"{hook} is called in every step"
        elif waits:
            self.reason = f"{waits[0]} waits for the device"
        elif drawn:
            self.reason = f"the model draws random numbers of {drawn}"
        elif changed:
            self.reason = f"the model changes {changed} on the host in a step"
        elif counted:
            fused = "; write fused=True in it" if "fused" in self._optimizer.defaults else ""
            self.reason = f"the optimizer changes {counted} on the host{fused}"


@contextmanager
def _noted_waits(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list that gets the places where code has waited for a CUDA device."""
    places: list[str] = []
    if not any(parameter.is_cuda for parameter in model.parameters()):
        yield places
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in caught:
        if str(each.message).startswith(_WAITS):
            places.append(_place(each.filename, each.lineno))
        elif not str(each.message).startswith(_ABOUT_WAITS):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _place(filename: str, line: int) -> str:
    """Return a line of code in words: where it stands, and its text."""
    text = linecache.getline(filename, line).strip()
    return f"{Path(filename).name}:{line}" + (f" ({text})" if text else "")
