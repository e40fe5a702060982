"""Which precision `mixed_precision` asks for: the one place that knows what `True` means."""

from __future__ import annotations

from typing import Literal

PrecisionName = Literal["fp32", "bf16", "fp16"]


def precision_name(wanted: bool | str, device_type: str) -> PrecisionName:
    """Return the precision of the forward pass; True picks by device: fp16 on CUDA, bf16 on the CPU."""
    if wanted is True:
        return "fp16" if device_type == "cuda" else "bf16"
    if wanted is False:
        return "fp32"
    return "fp16" if wanted == "fp16" else "bf16"  # the config allows no other name
