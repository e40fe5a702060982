"""Ranks as threads of one process, with an exchange between them: the arithmetic of compressors without processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from waiting import LIMIT_SECONDS

from phalanx.comm.exchange import Bucket

if TYPE_CHECKING:
    from collections.abc import Callable


class ThreadExchange:
    """An `Exchange` between threads: every call puts a tensor on the table, waits for all, and reads."""

    def __init__(self, rank: int, size: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.sent_bytes = rank, size, 0
        self._table, self._barrier = table, barrier

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._table[self.rank] = tensor.clone()
        self._barrier.wait(timeout=LIMIT_SECONDS)
        found = list(self._table)
        self._barrier.wait(timeout=LIMIT_SECONDS)
        return found

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        self.sent_bytes += 2 * (self.size - 1) * tensor.nbytes // self.size
        everyone = torch.stack(self._all(tensor))
        tensor.copy_(everyone.mean(0) if op == "mean" else everyone.sum(0))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sent_bytes += (self.size - 1) * tensor.nbytes
        return torch.stack(self._all(tensor))

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sent_bytes += (self.size - 1) * tensor.nbytes // self.size
        return torch.stack([rows[self.rank] for rows in self._all(tensor)])


def on_threads(function: Callable[[ThreadExchange], Any], size: int = 2) -> list[Any]:
    """Call `function(exchange)` on `size` ranks and return what each returned."""
    table: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    exchanges = [ThreadExchange(rank, size, table, barrier) for rank in range(size)]

    def call(exchange: ThreadExchange) -> Any:
        try:
            return function(exchange)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, exchanges))


def make_bucket(parts: dict[str, torch.Tensor], index: int = 0) -> Bucket:
    """Lay gradients end to end in flat memory."""
    flat = torch.cat([part.flatten() for part in parts.values()])
    views, start = [], 0
    for part in parts.values():
        views.append(flat[start : start + part.numel()].view(part.shape))
        start += part.numel()
    return Bucket(index, flat, tuple(parts), tuple(views))
