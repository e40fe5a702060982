"""`debug = "nan"`: which module first produced a NaN, an infinity or a spike, on which rank, and from what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from phalanx.errors import NonFiniteLossError
from phalanx.loop.hooks import Callback
from phalanx.loop.step_info import StepInfo
from phalanx.strategies.base import local

if TYPE_CHECKING:
    from phalanx.loop.running_trainer import RunningTrainer
    from phalanx.loop.train_loop import TrainLoop

_SPIKE = 1000.0
"""An output that is larger than the usual one by this factor is reported."""
_USUAL_STEPS = 10
"""The first steps of a module, whose largest output is the usual one."""


class NumberWatch(Callback):
    """Looks at the output of every module, and at the gradient that arrives at it; slow, for it waits for the device.

    Modules run one after another, so the first bad output names the module that produced it. A spike is a warning; a
    value that is not finite ends the run. With a loss scaler (fp16) gradients overflow by design and are not checked.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._usual: dict[str, tuple[int, float]] = {}
        self._spikes: set[str] = set()
        self._step = 0
        self._last_gradient = ""

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Watch the user's model; a module with children is watched after them."""
        self._loop, self._step = cast("TrainLoop", trainer), trainer.step + 1
        self._checks_gradients = trainer.formation.precision.name != "fp16"
        for name, module in trainer.formation.unwrap(trainer.model).named_modules():
            label = f"{name or 'the model'} ({type(module).__name__})"
            self._handles.append(module.register_forward_hook(self._hook(label)))

    def on_step_end(self, trainer: RunningTrainer, info: StepInfo) -> None:
        """Count steps, for the message."""
        self._step, self._last_gradient = info.step + 1, ""

    def on_fit_end(self, trainer: RunningTrainer) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, label: str) -> Any:
        def check(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in _floating(output):
                self._check_output(label, module, inputs, tensor)
                if tensor.requires_grad and self._checks_gradients:
                    tensor.register_hook(lambda gradient: self._check_gradient(label, gradient))  # type: ignore[no-untyped-call]

        return check

    def _check_output(self, label: str, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        largest = float(local(output).detach().abs().max())
        if not torch.isfinite(torch.tensor(largest)):
            self._stop(f"{label} produced {_describe(output)} in the forward pass{self._from(module, inputs)}")
        count, usual = self._usual.get(label, (0, 0.0))
        if self._loop.model.training and label not in self._spikes:
            if count >= _USUAL_STEPS and largest > _SPIKE * usual > 0:
                self._spikes.add(label)
                text = f"{label} produced {largest:.4g}, usually {usual:.4g}{self._from(module, inputs)}"
                self._loop.report.say(f"{self._position}: {text}", "warning")
            self._usual[label] = (count + 1, max(usual, largest) if count < _USUAL_STEPS else usual)

    def _check_gradient(self, label: str, gradient: torch.Tensor) -> None:
        if bool(local(gradient).isfinite().all()):
            self._last_gradient = label
            return
        after = f", finite at {self._last_gradient}" if self._last_gradient else ", the first one to be computed"
        self._stop(
            f"the gradient of the output of {label} is {_describe(gradient)}: it was computed in the backward pass of "
            f"what follows that module{after}"
        )

    def _from(self, module: nn.Module, inputs: Any) -> str:
        """Describe what the module computed from: the inputs, and its weights where they are not finite."""
        parts = [f"input {_describe(tensor)}" for tensor in _floating(inputs)]
        parameters = [
            (name, weight) for name, weight in module.named_parameters(recurse=False) if weight.is_floating_point()
        ]
        parts += [
            f"{name} {_describe(weight)}" for name, weight in parameters if not bool(local(weight).isfinite().all())
        ]
        return f", from {'; '.join(parts)}" if parts else ""

    @property
    def _position(self) -> str:
        return f"step {self._step}, rank {self._loop.formation.rank}"

    def _stop(self, text: str) -> None:
        self.on_fit_end(self._loop)
        raise NonFiniteLossError(
            f"{self._position}: {text}.",
            hint="Where its inputs are finite, the module itself is the cause (a division, a logarithm, an overflow of "
            "its precision); where they are not, the data are. A lower learning_rate, gradient_clipping or "
            "mixed_precision='bf16' instead of fp16 are the usual remedies.",
        )


def _floating(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and local(value).numel():
            yield value
    elif isinstance(value, dict):
        yield from (tensor for item in value.values() for tensor in _floating(item))
    elif isinstance(value, (tuple, list)):
        yield from (tensor for item in value for tensor in _floating(item))


@torch.no_grad()
def _describe(tensor: torch.Tensor) -> str:
    """Return shape, type and statistics: how many values are not finite, and the range of the others."""
    values = local(tensor).detach()
    finite = values[values.isfinite()].float()
    text = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
    if finite.numel():
        low, high, mean = (float(number) for number in (finite.min(), finite.max(), finite.mean()))
        text += f" from {low:.4g} to {high:.4g}, mean {mean:.4g}, std {float(finite.std(correction=0)):.4g}"
    nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
    bad = [f"{count} {name}" for count, name in ((nan, "NaN"), (infinite, "infinite")) if count]
    return f"{text} ({' and '.join(bad)} of {values.numel()} values)" if bad else text
