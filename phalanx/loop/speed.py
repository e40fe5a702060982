"""Speed of a run: tokens per second, the share of the devices' peak (MFU), and peak memory."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.models.contract import CountsFlops, implements
from phalanx.observe.timing import peak_flops
from phalanx.world.world import World


@dataclass(frozen=True)
class TokenRate:
    """Converts samples per second to tokens per second and, where the peak is known, to MFU."""

    tokens_per_sample: int = 0
    peak_share_per_token: float | None = None

    def tokens(self, samples_per_second: float) -> float | None:
        """Return tokens per second over all ranks; None for a model without tokens."""
        return samples_per_second * self.tokens_per_sample if self.tokens_per_sample else None

    def mfu(self, samples_per_second: float) -> float | None:
        """Return the model's operations as a share of all devices' peak."""
        tokens = self.tokens(samples_per_second)
        return None if tokens is None or self.peak_share_per_token is None else tokens * self.peak_share_per_token


class PeakMemory:
    """The peak memory of this rank: the device's on CUDA, the process's on the CPU.

    Reading it takes up to half a millisecond, as long as a small step, so it is read once per second at most.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read_at = -math.inf
        self._peak = 0

    def bytes(self) -> int:
        """Return the peak as it was at most a second ago."""
        now = time.monotonic()
        if now - self._read_at >= 1.0:
            self._read_at = now
            if self._device.type == "cuda":
                stats = torch.cuda.memory_stats_as_nested_dict(self._device)
                self._peak = int(stats["allocated_bytes"]["all"]["peak"])
            else:
                self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return self._peak


def token_rate(model: nn.Module, batch: Any, world: World, precision: str) -> TokenRate:
    """Look at the first batch: integers [batch, time] are tokens where the model counts its operations."""
    inputs = batch[0] if isinstance(batch, Sequence) and len(batch) else batch
    is_tokens = isinstance(inputs, torch.Tensor) and inputs.ndim == 2 and not inputs.is_floating_point()
    if not is_tokens or not implements(model, CountsFlops):
        return TokenRate()
    length = int(inputs.shape[1])
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    if world.device.type != "cuda" or frozen:  # the count is that of training every weight
        return TokenRate(length)
    peak = peak_flops(torch.cuda.get_device_name(world.device), precision)
    return TokenRate(length, None if peak is None else model.flops_per_token(length) / (peak * world.world_size))
