"""Gradient compression, for training where a step waits for the network.

| name | bytes (2 ranks) | how |
|---|---|---|
| fp16, bf16 | 1/2 | rounded |
| int8 | about 1/4 | stochastic rounding, a scale for every 512 numbers |
| sign | about 1/30 | one bit, error feedback |
| topk | 2 x ratio | the largest, error feedback |
| randomk | ratio | random positions, equal on all ranks, error feedback |
| powersgd | rank (rows + columns) / (rows columns) | two thin matrices, error feedback, warm start |

`Compressor.reduce(bucket, exchange)` replaces a bucket by its average; `hook.py` connects it to torch's DDP. All ranks
must end with equal bits, or their weights diverge: a rank decodes also what it encoded itself, and every rank adds up
in the same order. A compressor's module is loaded when the config names it.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, Self

import torch

from phalanx.comm.exchange import Bucket, Exchange
from phalanx.config import DistributedConfig


class Compressor(ABC):
    """Averages buckets over the ranks of an exchange; one object per model and rank."""

    name: ClassVar[str]
    keeps_residuals: ClassVar[bool] = False
    """Whether residuals are added to the next step: then both must have the same unit, with fp16's loss scale."""

    def __init__(self, *, seed: int = 0, warmup: int = 0) -> None:
        self.seed = seed
        self.warmup = warmup
        self.steps = 0
        """Steps started so far; the first bucket of a step has index 0."""
        self.plain_bytes = 0
        """What this rank would have sent without compression, by a ring."""
        self.unit: torch.Tensor | float | None = None
        """The factor of the gradients in this step, equal on all ranks; None: 1."""

    @classmethod
    def of(cls, config: DistributedConfig, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> Self:
        """Return the compressor with the settings of a config, checked against the model's parameters."""
        return cls(seed=config.seed, warmup=config.compression_warmup)

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        """Replace a bucket by its average; all ranks call this for the same buckets in the same order."""
        if bucket.index == 0:
            self.steps += 1
        self.plain_bytes += ring_bytes(bucket.nbytes, exchange.size)
        if exchange.size == 1 or bucket.flat.numel() == 0:
            return
        if self.steps <= self.warmup:
            average(bucket.flat, exchange)
        elif self.unit is None:
            self._reduce(bucket, exchange)
        else:
            bucket.flat.div_(self.unit)
            self._reduce(bucket, exchange)
            bucket.flat.mul_(self.unit)

    @abstractmethod
    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        """Average a bucket that is not empty, over several ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next step needs, by parameter name."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; entries of another compressor are ignored."""
        self.steps = int(state.get("steps", 0))


class Uncompressed(Compressor):
    """The plain average."""

    name = "none"

    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        average(bucket.flat, exchange)


_HOMES = {
    "fp16": "quantize:FP16",
    "bf16": "quantize:BF16",
    "int8": "quantize:Int8",
    "sign": "quantize:Sign",
    "topk": "sparsify:TopK",
    "randomk": "sparsify:RandomK",
    "powersgd": "powersgd:PowerSGD",
}
"""Module of this package and class of each compressor."""


def build_compressor(config: DistributedConfig, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> Compressor:
    """Return the compressor that the config names, checked against the model's parameters."""
    kind = Uncompressed if config.compression == "none" else _load(config.compression)
    return kind.of(config, named_parameters)


def _load(name: str) -> type[Compressor]:
    module, _, kind = _HOMES[name].partition(":")
    loaded: type[Compressor] = getattr(import_module(f"{__name__}.{module}"), kind)
    return loaded


def merged_states(states: Sequence[Mapping[str, Any]], factor: float) -> dict[str, Any]:
    """Return one rank's state from several ranks': residuals added up and scaled, the rest from the first.

    With factor = new ranks / old ranks, and each old rank's state given to one new rank, the average of all residuals
    stays the same.
    """
    merged = dict(states[0])
    total: dict[str, torch.Tensor] = {}
    for state in states:
        for name, tensor in state.get("residuals", {}).items():
            total[name] = total[name] + tensor if name in total else tensor
    if total:
        merged["residuals"] = {name: tensor * factor for name, tensor in total.items()}
    return merged


def average(tensor: torch.Tensor, exchange: Exchange) -> None:
    """Average a tensor in place, without compression."""
    exchange.all_reduce(tensor, "mean")


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Return the bytes that one rank of a ring sends in an all-reduce."""
    return 2 * (ranks - 1) * nbytes // ranks


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with enough precision to add up errors: half precision becomes float32, a copy."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite, without allocating memory; waits for the device."""
    return bool(torch.isfinite(torch.linalg.vector_norm(tensor, math.inf)))


def generator(device: torch.device, *parts: int | str) -> torch.Generator:
    """Return a random generator that depends on these parts only, so that a resumed run draws the same numbers."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
