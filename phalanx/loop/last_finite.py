"""Copies of a small model's state, from which a loss that is not finite gives the last finite weights back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from phalanx import torch_compat

_MOST_BYTES = 16 << 20
"""Of weights and optimizer states: copying them costs nothing to speak of; larger models have checkpoints."""


class _Copy(NamedTuple):
    step: int
    tensors: list[torch.Tensor]
    values: list[torch.Tensor]


class LastFinite:
    """Two copies of the state, made when losses are read: the newer one may already hold what the next loss shows."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers
        self._copies: list[_Copy] = []
        self._is_small = True

    def keep(self, step: int) -> None:
        """Copy the state after a step, over the older copy."""
        if not self._is_small:
            return
        tensors = self._tensors()
        self._is_small = sum(tensor.nbytes for tensor in tensors) <= _MOST_BYTES
        if not self._is_small:
            self._copies.clear()
            return
        older = self._copies.pop(0) if len(self._copies) > 1 else None
        fits = older is not None and len(older.tensors) == len(tensors) and all(map(_is, older.tensors, tensors))
        with torch.no_grad():
            if older is not None and fits:
                torch_compat.foreach_copy_(older.values, tensors)
                self._copies.append(_Copy(step, tensors, older.values))
            else:
                self._copies.append(_Copy(step, tensors, [tensor.clone() for tensor in tensors]))

    def restore(self) -> int | None:
        """Put back the newest copy whose numbers are all finite; return its step, or None if there is none."""
        for copy in reversed(self._copies):
            if all(bool(torch.isfinite(value).all()) for value in copy.values if value.is_floating_point()):
                with torch.no_grad():
                    for tensor, value in zip(copy.tensors, copy.values, strict=True):
                        tensor.copy_(value)
                self._drop_states()
                return copy.step
        return None

    def _drop_states(self) -> None:
        """Drop what optimizers have made since the copy, and that is not finite."""
        for optimizer in self._optimizers:
            for parameter, state in list(optimizer.state.items()):
                floats = [value for value in state.values() if isinstance(value, torch.Tensor)]
                if not all(bool(torch.isfinite(value).all()) for value in floats):
                    del optimizer.state[parameter]

    def _tensors(self) -> list[torch.Tensor]:
        states = (state for optimizer in self._optimizers for state in optimizer.state.values())
        moments = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return [*(p.data for p in self._model.parameters()), *self._model.buffers(), *moments]


def _is(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
