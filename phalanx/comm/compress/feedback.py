"""Error feedback: what compression kept back of a gradient is added to the next one, so that nothing is lost.

An average in two phases, for codes that cannot be added up: each rank sums a share of it and tells the others.

    1. the gradient is cut into one chunk a rank; every rank sends chunk r, encoded, to rank r (all-to-all)
    2. rank r decodes what it got, averages it, and sends the average, encoded again, to all (all-gather)

The bytes are those of a ring all-reduce, divided by what the code saves. All ranks decode the same answers, the rank
that computed one too, so all end with equal bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from phalanx.comm.buckets import Bucket
from phalanx.comm.compress.base import Compressor, wide
from phalanx.comm.exchange import Exchange


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


class Codec(Protocol):
    """Turns rows of numbers into rows of bytes and back."""

    granule: int
    """A row's length is a multiple of this."""

    def encode(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return one row of bytes a row; the numbers of a row beyond its length are filling."""

    def decode(self, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows that were encoded, as far as they survived."""


def average_in_two_phases(
    values: torch.Tensor, exchange: Exchange, codec: Codec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the average of flat `values` over the ranks, what was understood of this rank's, and this chunk's error.

    The error is what the second phase lost of the average, in the shape of `values`, zero outside this rank's chunk.
    """
    rows, lengths = _cut(values, exchange.size, codec.granule)
    message = codec.encode(rows, lengths)
    mean = codec.decode(exchange.all_to_all(message), values.dtype).mean(0, keepdim=True)
    answer = codec.encode(mean, lengths[exchange.rank : exchange.rank + 1])
    answers = codec.decode(exchange.all_gather(answer[0]), values.dtype)
    error = torch.zeros_like(rows)
    error[exchange.rank] = mean[0] - answers[exchange.rank]
    understood = codec.decode(message, values.dtype)
    count = values.numel()
    return answers.flatten()[:count], understood.flatten()[:count], error.flatten()[:count]


def _cut(values: torch.Tensor, ranks: int, granule: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut into one row a rank, the last ones filled up with zeros; return how much of each row is real, too."""
    width = -(-values.numel() // (ranks * granule)) * granule
    rows = torch.nn.functional.pad(values, (0, ranks * width - values.numel())).view(ranks, width)
    starts = torch.arange(ranks, device=values.device) * width
    return rows, (values.numel() - starts).clamp(0, width)
