"""Error feedback: what compression kept back of a gradient is added to the next one, so that nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from phalanx.comm.compress.base import Compressor, wide

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from phalanx.comm.bucket import Bucket


class Residuals:
    """What was kept back, flat for each bucket as it is computed with, by parameter name as it is saved."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, ...], torch.Tensor] = {}
        self._by_name: dict[str, torch.Tensor] = {}

    def of(self, bucket: Bucket) -> torch.Tensor:
        """Return the residual of a bucket: memory that the caller may change."""
        flat = self._flat.get(bucket.names)
        return self._repacked(bucket) if flat is None else flat

    def _repacked(self, bucket: Bucket) -> torch.Tensor:
        """Lay residuals out for a bucket that was not seen before: buckets are laid out anew after a first step."""
        flat = torch.zeros_like(wide(bucket.flat))
        moved = set(bucket.names)
        for name, place in places(bucket):
            view = flat[place]
            if name in self._by_name:
                view.copy_(self._by_name[name])
            self._by_name[name] = view
        self._flat = {names: tensor for names, tensor in self._flat.items() if not moved & set(names)}
        self._flat[bucket.names] = flat
        return flat

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy by parameter name, flat, in the order in which the gradient lies in memory."""
        return {name: tensor.clone() for name, tensor in self._by_name.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up saved residuals; they are laid out when their buckets come."""
        self._flat.clear()
        self._by_name = {name: tensor.clone() for name, tensor in state.items()}


class FeedbackCompressor(Compressor):
    """A compressor that remembers what it kept back."""

    keeps_residuals = True

    def __init__(self, *, seed: int = 0, warmup: int = 0) -> None:
        super().__init__(seed=seed, warmup=warmup)
        self.residuals = Residuals()

    def state_dict(self) -> dict[str, Any]:
        """Return the steps and the residuals."""
        return {**super().state_dict(), "residuals": self.residuals.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up steps and residuals."""
        super().load_state_dict(state)
        self.residuals.load_state_dict(state.get("residuals", {}))


class SelectingCompressor(FeedbackCompressor):
    """A compressor that sends a share of the numbers, `ratio` of them, and keeps the others back."""

    def __init__(self, ratio: float, *, seed: int = 0, warmup: int = 0) -> None:
        super().__init__(seed=seed, warmup=warmup)
        self.ratio = ratio


def places(bucket: Bucket) -> Iterator[tuple[str, slice]]:
    """Yield where each parameter's gradient lies in the flat memory."""
    begin = bucket.flat.storage_offset()
    for name, part in zip(bucket.names, bucket.parts, strict=True):
        start = part.storage_offset() - begin
        yield name, slice(start, start + part.numel())


def merged_states(states: Sequence[Mapping[str, Any]], factor: float) -> dict[str, Any]:
    """Return one rank's state made of several ranks': residuals added up and scaled, the rest from the first.

    Only the average of all ranks' residuals is ever applied. With factor = ranks now / ranks then, and each old rank's
    state given to one new rank, it stays what it was.
    """
    merged = dict(states[0])
    total: dict[str, torch.Tensor] = {}
    for state in states:
        for name, tensor in state.get("residuals", {}).items():
            total[name] = total[name] + tensor if name in total else tensor
    if total:
        merged["residuals"] = {name: tensor * factor for name, tensor in total.items()}
    return merged
