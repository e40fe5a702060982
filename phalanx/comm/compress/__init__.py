"""Gradient compression, for training where a step waits for the network.

| name | bytes (2 ranks) | how |
|---|---|---|
| fp16, bf16 | 1/2 | rounded |
| int8 | about 1/4 | stochastic rounding, a scale for every 512 numbers |
| sign | about 1/30 | one bit, error feedback |
| topk | 2 x ratio | the largest, error feedback |
| randomk | ratio | random positions, equal on all ranks, error feedback |
| powersgd | rank (rows + columns) / (rows columns) | two thin matrices, error feedback, warm start |

`Compressor.reduce(bucket, exchange)` replaces a bucket by its average; `hook.py` connects it to torch's DDP.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from phalanx.comm.compress.base import Compressor, Uncompressed
from phalanx.comm.compress.feedback import merged_states
from phalanx.comm.compress.powersgd import PowerSGD, check_rank
from phalanx.comm.compress.quantize import BF16, FP16, Int8
from phalanx.comm.compress.sign import Sign
from phalanx.comm.compress.sparsify import RandomK, TopK
from phalanx.config import DistributedConfig

__all__ = ["Compressor", "build_compressor", "merged_states"]

_PLAIN: dict[str, type[Compressor]] = {kind.name: kind for kind in (Uncompressed, FP16, BF16, Int8, Sign)}


def build_compressor(config: DistributedConfig, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> Compressor:
    """Return the compressor that the config names, checked against the model's parameters."""
    seed, warmup = config.seed, config.compression_warmup
    if config.compression == "topk":
        return TopK(config.compression_ratio, seed=seed, warmup=warmup)
    if config.compression == "randomk":
        return RandomK(config.compression_ratio, seed=seed, warmup=warmup)
    if config.compression == "powersgd":
        check_rank(config.powersgd_rank, named_parameters)
        return PowerSGD(config.powersgd_rank, seed=seed, warmup=warmup)
    return _PLAIN[config.compression](seed=seed, warmup=warmup)
