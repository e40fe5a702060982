"""Count the GPUs without importing torch or creating a CUDA context."""

from __future__ import annotations

import ctypes
import os

_NVML_SUCCESS = 0


def count_gpus() -> int:
    """Return how many GPUs a rank would see: NVML's count, cut down by CUDA_VISIBLE_DEVICES; 0 without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    installed = _installed_gpus()
    return installed if visible is None else min(installed, _count_visible(visible, installed))


def _installed_gpus() -> int:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != _NVML_SUCCESS:
        return 0
    try:
        count = ctypes.c_uint(0)
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == _NVML_SUCCESS else 0
    finally:
        nvml.nvmlShutdown()


def _count_visible(visible: str, installed: int) -> int:
    """Count entries as the CUDA runtime does: it stops at the first one that names no device, and at a repeated one."""
    seen: set[str] = set()
    for entry in (part.strip() for part in visible.split(",")):
        is_index = entry.isdecimal() and int(entry) < installed
        is_uuid = entry.startswith(("GPU-", "MIG-"))
        if not (is_index or is_uuid) or entry in seen:
            break
        seen.add(entry)
    return len(seen)
