"""An average in two phases, for codes that cannot be added up: each rank sums a share of it and tells the others.

    1. the gradient is cut into one chunk a rank; every rank sends chunk r, encoded, to rank r (all-to-all)
    2. rank r decodes what it got, averages it, and sends the average, encoded again, to all (all-gather)

The bytes are those of a ring all-reduce, divided by what the code saves. All ranks decode the same answers, the rank
that computed one too, so all end with equal bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from phalanx.comm.exchange import Exchange


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
