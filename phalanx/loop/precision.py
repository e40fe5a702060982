"""Mixed precision: which dtype the forward pass uses, and the loss scaling that fp16 needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from phalanx.config.precision import precision_name

if TYPE_CHECKING:
    from phalanx.config import DistributedConfig

_NO_AUTOCAST: AbstractContextManager[None] = nullcontext()


class Precision:
    """The forward pass's dtype, its autocast context and, for fp16, its gradient scaler."""

    def __init__(self, config: DistributedConfig, device: torch.device, *, by_engine: bool = False) -> None:
        self.name = precision_name(config.mixed_precision, device.type)
        self.device_type = device.type
        self.dtype = None if by_engine else {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.name)
        self.scaler: torch.amp.GradScaler | None = None
        if self.dtype is torch.float16:
            self.scaler = torch.amp.GradScaler(
                device.type,
                init_scale=config.scaler_init_scale,
                growth_interval=config.scaler_growth_interval,
            )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        if self.dtype is None:
            return _NO_AUTOCAST
        return torch.autocast(self.device_type, dtype=self.dtype)
