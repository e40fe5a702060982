"""A slow link, emulated: an exchange that sleeps for as long as its bytes would take on a link of a given rate.

For machines where the kernel cannot shape traffic (`phalanx bench compression` says which of the two it used). The
clock is real: the courier sleeps while the rank computes, as it would wait for a network card.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from phalanx.comm.exchange import TorchExchange

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    import torch.distributed as dist

    from phalanx.comm.exchange import Exchange

_emulated: float | None = None


class ThrottledExchange:
    """An exchange whose every call takes at least as long as its bytes on a link of `bytes_per_second`."""

    def __init__(self, inner: Exchange, bytes_per_second: float) -> None:
        self._inner = inner
        self._rate = bytes_per_second
        self.rank = inner.rank
        self.size = inner.size
        self.sent_bytes = inner.sent_bytes

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Combine a tensor over the ranks, in place."""
        with self._at_rate():
            self._inner.all_reduce(tensor, op)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked by rank."""
        with self._at_rate():
            return self._inner.all_gather(tensor)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r; return the rows that were sent here."""
        with self._at_rate():
            return self._inner.all_to_all(tensor)

    def close(self) -> None:
        """Let go of what the real exchange holds."""
        self._inner.close()

    @contextmanager
    def _at_rate(self) -> Iterator[None]:
        begin, before = time.perf_counter(), self.sent_bytes
        yield
        self.sent_bytes = self._inner.sent_bytes
        due = begin + (self.sent_bytes - before) / self._rate
        time.sleep(max(0.0, due - time.perf_counter()))


@contextmanager
def emulated_link(bytes_per_second: float) -> Iterator[None]:
    """Have every exchange that is opened meanwhile, in this process, run at a rate."""
    global _emulated
    before, _emulated = _emulated, bytes_per_second
    try:
        yield
    finally:
        _emulated = before


def is_emulated() -> bool:
    """Whether exchanges are opened at a rate of ours."""
    return _emulated is not None


def open_exchange(group: dist.ProcessGroup | None) -> Exchange:
    """Return the exchange of a process group, slowed down where a link is emulated."""
    exchange = TorchExchange(group)
    return exchange if _emulated is None else ThrottledExchange(exchange, _emulated)
