"""Error feedback, and an average in two phases for encoded values, which cannot be added up.

Error feedback: what compression leaves out of a gradient (the residual) is added to the next one. Two phases:

    1. the gradient is cut into one chunk per rank; every rank sends chunk r, encoded, to rank r (all-to-all)
    2. rank r decodes the chunks, averages them, and sends the average, encoded again, to all (all-gather)

The bytes are those of a ring all-reduce, divided by what the code saves. All ranks decode the same messages, including
their own, so all end with equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from phalanx.comm.compress import Compressor, wide
from phalanx.comm.exchange import Bucket, Exchange


class Residuals:
    """The residuals: flat for each bucket to compute with, by parameter name to save."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, ...], torch.Tensor] = {}
        self._by_name: dict[str, torch.Tensor] = {}

    def of(self, bucket: Bucket) -> torch.Tensor:
        """Return the residual of a bucket, which the caller may change in place."""
        flat = self._flat.get(bucket.names)
        return self._repacked(bucket) if flat is None else flat

    def _repacked(self, bucket: Bucket) -> torch.Tensor:
        """Lay residuals out for a new bucket: the layout of buckets may change after the first step."""
        flat = torch.zeros_like(wide(bucket.flat))
        moved = set(bucket.names)
        for name, part in slices(bucket):
            view = flat[part]
            if name in self._by_name:
                view.copy_(self._by_name[name])
            self._by_name[name] = view
        self._flat = {names: tensor for names, tensor in self._flat.items() if not moved & set(names)}
        self._flat[bucket.names] = flat
        return flat

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies by parameter name, flat, in the memory order of the gradient."""
        return {name: tensor.clone() for name, tensor in self._by_name.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load saved residuals; they are laid out when their buckets are known."""
        self._flat.clear()
        self._by_name = {name: tensor.clone() for name, tensor in state.items()}


class FeedbackCompressor(Compressor):
    """A compressor with residuals."""

    keeps_residuals = True

    def __init__(self, *, seed: int = 0, warmup: int = 0) -> None:
        super().__init__(seed=seed, warmup=warmup)
        self.residuals = Residuals()

    def state_dict(self) -> dict[str, Any]:
        """Return the steps and the residuals."""
        return {**super().state_dict(), "residuals": self.residuals.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the steps and the residuals."""
        super().load_state_dict(state)
        self.residuals.load_state_dict(state.get("residuals", {}))


def slices(bucket: Bucket) -> Iterator[tuple[str, slice]]:
    """Yield each parameter's name and the slice of its gradient in the flat memory."""
    begin = bucket.flat.storage_offset()
    for name, part in zip(bucket.names, bucket.parts, strict=True):
        start = part.storage_offset() - begin
        yield name, slice(start, start + part.numel())


class Codec(Protocol):
    """Encodes rows of numbers as rows of bytes."""

    granule: int
    """A row's length is a multiple of this."""

    def encode(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return one row of bytes per row; the numbers of a row beyond its length are padding."""

    def decode(self, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the approximate rows that were encoded."""


def average_in_two_phases(
    values: torch.Tensor, exchange: Exchange, codec: Codec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the average of flat `values` over the ranks, this rank's values as decoded, and the second phase's error.

    The error is that of the average of this rank's chunk, in the shape of `values`, zero elsewhere.
    """
    rows, lengths = _cut(values, exchange.size, codec.granule)
    message = codec.encode(rows, lengths)
    mean = codec.decode(exchange.all_to_all(message), values.dtype).mean(0, keepdim=True)
    answer = codec.encode(mean, lengths[exchange.rank : exchange.rank + 1])
    answers = codec.decode(exchange.all_gather(answer[0]), values.dtype)
    error = torch.zeros_like(rows)
    error[exchange.rank] = mean[0] - answers[exchange.rank]
    decoded = codec.decode(message, values.dtype)
    count = values.numel()
    return answers.flatten()[:count], decoded.flatten()[:count], error.flatten()[:count]


def _cut(values: torch.Tensor, ranks: int, granule: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one row per rank, padded with zeros, and the length of each row without padding."""
    width = -(-values.numel() // (ranks * granule)) * granule
    rows = torch.nn.functional.pad(values, (0, ranks * width - values.numel())).view(ranks, width)
    starts = torch.arange(ranks, device=values.device) * width
    return rows, (values.numel() - starts).clamp(0, width)
