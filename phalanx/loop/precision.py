"""Mixed precision: which dtype the forward pass uses, and the loss scaling that fp16 needs."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from phalanx.config import DistributedConfig
from phalanx.config.settings import cpu_has_bf16, precision_name

_COMPUTES_IN_FP32 = "mixed_precision = true: this CPU has no bf16 arithmetic, so it computes in fp32, which is faster"
_EMULATED = (
    "mixed_precision = 'bf16': this CPU emulates bf16, at least 60 times slower than fp32 (as measured on an ARM "
    "Neoverse-N1). Write mixed_precision=True for what is fast here, or leave it out."
)
_NO_AUTOCAST: AbstractContextManager[None] = nullcontext()


class Precision:
    """The forward pass's dtype, its autocast context and, for fp16, its gradient scaler."""

    def __init__(self, config: DistributedConfig, device: torch.device, *, by_engine: bool = False) -> None:
        wanted = config.mixed_precision
        self.name = precision_name(wanted, device.type)
        self.device_type = device.type
        emulated = device.type == "cpu" and not cpu_has_bf16()
        self.note = _COMPUTES_IN_FP32 if wanted is True and emulated else None
        self.warning = _EMULATED if self.name == "bf16" and emulated else None
        if self.warning is not None:  # torch prints fifty lines of C++ frames
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS gemm")
        self.dtype = None if by_engine else {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.name)
        self.scaler: torch.amp.GradScaler | None = None
        if self.dtype is torch.float16:
            options = config.options
            self.scaler = torch.amp.GradScaler(
                device.type, init_scale=options.scaler_init_scale, growth_interval=options.scaler_growth_interval
            )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        if self.dtype is None:
            return _NO_AUTOCAST
        return torch.autocast(self.device_type, dtype=self.dtype)
