"""Averaged weights: an exponential moving average (EMA) of the trained weights over the optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from phalanx import torch_compat
from phalanx.errors import UsageError
from phalanx.strategies.base import local
from phalanx.strategies.tensors import drop_gathered


class WeightAverage:
    """The average of a model's trained parameters and floating-point buffers; of this rank's shards where sharded."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self.other: dict[str, torch.Tensor] = {}
        """By name: the average, and while that is in the model (`swap`), the weights that are trained."""
        self.follow()

    def follow(self) -> None:
        """Average what wants gradients now, too: parameters that were unfrozen begin at their value."""
        model, saved_names = self._model, set(self._model.state_dict())
        trained = {
            name: p
            for name, p in model.named_parameters()
            if p.requires_grad or torch_compat.uncompiled_name(name) in self.other
        }
        buffers = {name: b for name, b in model.named_buffers() if name in saved_names and b.is_floating_point()}
        tensors = {**trained, **buffers}
        low = next((f"{name} is {t.dtype}" for name, t in tensors.items() if t.dtype.itemsize < 4), None)
        if low is not None:
            raise UsageError(
                f"ema_decay averages weights in their own precision, which is too low: {low}",
                hint="Keep the model in float32 and set mixed_precision='bf16', or leave ema_decay out.",
            )
        before, names = self.other, [torch_compat.uncompiled_name(name) for name in tensors]
        self.other = {
            name: before.get(name, value.detach().clone()) for name, value in zip(names, tensors.values(), strict=True)
        }
        self._buffers = list(buffers.items())
        self._weights = [local(value.detach()) for value in tensors.values()]
        self._averages = [local(value) for value in self.other.values()]

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the averages of parameters, which are equal on ranks that hold replicas."""
        names = [torch_compat.uncompiled_name(name) for name, _ in self._model.named_parameters()]
        return {name: self.other[name] for name in names if name in self.other}

    def update(self, step: int) -> None:
        """Add the weights after an optimizer step. The first steps weigh more, so that a short run is not its start."""
        self._look_for_buffers()
        decay = min(self._decay, (1 + step) / (10 + step))
        torch_compat.foreach_lerp_(self._averages, self._weights, 1.0 - decay)

    def _look_for_buffers(self) -> None:
        """Find the buffers again where a module has put another tensor in the place of one."""
        if any(self._model.get_buffer(name) is not buffer for name, buffer in self._buffers):
            self.follow()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average and the model's weights, in place."""
        self._look_for_buffers()
        drop_gathered(self._model)  # else weights that were gathered in a forward pass would stay in use
        for weight, there in zip(self._weights, self._averages, strict=True):
            before = weight.clone()
            weight.copy_(there)
            there.copy_(before)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the model for a while."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again at the model's weights."""
        torch_compat.foreach_copy_(self._averages, self._weights)

    @torch.no_grad()
    def load(self, saved: dict[str, torch.Tensor]) -> None:
        """Continue from a saved average; one that was read in place is here already."""
        for name, tensor in self.other.items():
            if saved[name] is not tensor:
                tensor.copy_(saved[name])
