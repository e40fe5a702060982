"""How fast a language model learns: tokens a second, and the share of the devices' peak that they are (MFU)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from phalanx.observe.peaks import peak_flops

if TYPE_CHECKING:
    from torch import nn

    from phalanx.loop.formation import Formation


@dataclass(frozen=True)
class TokenRate:
    """What turns samples a second into tokens a second and, where the peak is known, into MFU."""

    tokens_per_sample: int = 0
    peak_share_per_token: float | None = None

    def tokens(self, samples_per_second: float) -> float | None:
        """Return tokens a second over all ranks; None for a model that reads none."""
        return samples_per_second * self.tokens_per_sample if self.tokens_per_sample else None

    def mfu(self, samples_per_second: float) -> float | None:
        """Return the share of all devices' peak that the model's own operations are."""
        tokens = self.tokens(samples_per_second)
        return None if tokens is None or self.peak_share_per_token is None else tokens * self.peak_share_per_token


def token_rate(model: nn.Module, batch: Any, formation: Formation) -> TokenRate:
    """Look at the first batch: integers [batch, time] for a model that knows its operations a token are tokens."""
    inputs = batch[0] if isinstance(batch, Sequence) and len(batch) else batch
    count = getattr(model, "flops_per_token", None)
    is_tokens = isinstance(inputs, torch.Tensor) and inputs.ndim == 2 and not inputs.is_floating_point()
    if not is_tokens or not callable(count):
        return TokenRate()
    time = int(inputs.shape[1])
    peak = _peak(model, formation)
    return TokenRate(time, None if peak is None else float(count(time)) / (peak * formation.world_size))


def _peak(model: nn.Module, formation: Formation) -> float | None:
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    if formation.device.type != "cuda" or frozen:  # the count is that of training every weight
        return None
    return peak_flops(torch.cuda.get_device_name(formation.device), formation.precision.name)
