"""What a compressor costs on this machine: gradient bytes a second, and bytes sent for each of them.

Measured on one process that plays all ranks: an exchange whose other ranks have the same gradient needs no network.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from phalanx.comm.bucket import Bucket
from phalanx.comm.compress import build_compressor
from phalanx.comm.compress.advise import Cost
from phalanx.config import DistributedConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ROUNDS = 3
_SETTINGS_OF = {"topk": ("compression_ratio",), "randomk": ("compression_ratio",), "powersgd": ("powersgd_rank",)}
"""Which settings a compressor has of its own; all have the warm-up."""


class EchoExchange:
    """An exchange of ranks that all hold what this one holds: nothing travels, everything is counted."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size
        self.sent_bytes = 0
        self.messages = 0

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Add up a tensor over the ranks, in place."""
        self._count(2 * (self.size - 1) * tensor.nbytes // self.size, 2)
        if op != "mean":
            tensor.mul_(self.size)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked by rank."""
        self._count((self.size - 1) * tensor.nbytes, 1)
        return tensor.expand(self.size, *tensor.shape).contiguous()

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r; return the rows that were sent here."""
        self._count((self.size - 1) * tensor.nbytes // self.size, 1)
        return tensor[:1].expand_as(tensor).contiguous()

    def close(self) -> None:
        """Nothing is held."""

    def _count(self, sent: int, messages: int) -> None:
        self.sent_bytes += sent
        self.messages += messages


def settings_of(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a compressor would follow: the config refuses the others."""
    own = () if name == "none" else (*_SETTINGS_OF.get(name, ()), "compression_warmup")
    return {key: value for key, value in settings.items() if key in own}


def measure_costs(
    names: Iterable[str], shapes: Sequence[tuple[int, ...]], ranks: int, device: str = "cpu", **settings: Any
) -> list[Cost]:
    """Measure compressors on gradients of these shapes, as the config's settings have them."""
    return [_measure(name, shapes, ranks, torch.device(device), settings) for name in names if name != "none"]


def _measure(
    name: str, shapes: Sequence[tuple[int, ...]], ranks: int, device: torch.device, settings: dict[str, Any]
) -> Cost:
    config = DistributedConfig(compression=name, **settings_of(name, settings))
    named = [(str(number), torch.zeros(shape, requires_grad=True)) for number, shape in enumerate(shapes)]
    compressor = build_compressor(config, named)
    gradient = torch.randn(sum(parameter.numel() for _, parameter in named), device=device)
    times = []
    for _ in range(_ROUNDS + 1):  # the first makes residuals and factors
        flat = gradient.clone()
        bucket = Bucket(0, flat, tuple(key for key, _ in named), _views(flat, shapes))
        exchange = EchoExchange(ranks)
        _settle(device)
        begin = time.perf_counter()
        compressor.reduce(bucket, exchange)
        _settle(device)
        times.append(time.perf_counter() - begin)
    nbytes = gradient.nbytes
    return Cost(name, exchange.sent_bytes / nbytes, nbytes / sorted(times[1:])[_ROUNDS // 2], exchange.messages)


def _views(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, ...]:
    pieces = torch.split(flat, [torch.Size(shape).numel() for shape in shapes])
    return tuple(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
