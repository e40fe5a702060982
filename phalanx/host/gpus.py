"""The GPUs of this machine, by NVML: how many there are and how busy one is. No torch, no CUDA context."""

from __future__ import annotations

import ctypes
import os

_SUCCESS = 0


def count_gpus() -> int:
    """Return how many GPUs a rank would see: NVML's count, limited by CUDA_VISIBLE_DEVICES; 0 without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    installed = _installed_gpus()
    return installed if visible is None else min(installed, _count_visible(visible, installed))


def _installed_gpus() -> int:
    nvml = _load_nvml()
    if nvml is None:
        return 0
    try:
        count = ctypes.c_uint(0)
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == _SUCCESS else 0
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


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuLoad:
    """Reads the utilisation of the GPU at a PCI address, such as "0000:17:00.0"; None where NVML does not give it."""

    def __init__(self, pci_address: str) -> None:
        self._handle = ctypes.c_void_p()
        self._nvml = _load_nvml()
        if self._nvml is not None:
            found = self._nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_address.encode(), ctypes.byref(self._handle))
            self._nvml = self._nvml if found == _SUCCESS else None

    def read(self) -> float | None:
        """Return the share of the last sampling period (under a second) in which a kernel ran, from 0 to 1."""
        if self._nvml is None:
            return None
        rates = _Rates()
        answer = self._nvml.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(rates))
        return rates.gpu / 100 if answer == _SUCCESS else None  # a slice of a GPU (MIG) has no figure


def _load_nvml() -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == _SUCCESS else None
