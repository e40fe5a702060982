"""Which precision `mixed_precision` asks for: the one place that knows what `True` means."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

PrecisionName = Literal["fp32", "bf16", "fp16"]

_CPU_INFO = Path("/proc/cpuinfo")
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Two on x86, the last on ARM: instructions that multiply in bf16. Elsewhere it is emulated."""


def precision_name(wanted: bool | str, device_type: str) -> PrecisionName:
    """Return the precision of the forward pass; True picks what is fast: fp16 on CUDA, bf16 on a CPU that has it."""
    if wanted is True:
        return "fp16" if device_type == "cuda" else "bf16" if cpu_has_bf16() else "fp32"
    if wanted is False:
        return "fp32"
    return "fp16" if wanted == "fp16" else "bf16"  # the config allows no other name


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether this machine's CPU computes in bf16 by itself; asked of the kernel, without torch."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:  # not Linux
        return False
    flags = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return any(_BF16_FLAGS.intersection(words) for words in flags)
