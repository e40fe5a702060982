"""How busy a GPU is, as NVML counts it: no torch, no CUDA context, and no wait for the device."""

from __future__ import annotations

import ctypes

_SUCCESS = 0


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
        return rates.gpu / 100 if answer == _SUCCESS else None  # a slice of a GPU (MIG) has no figure of its own


def _load_nvml() -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == _SUCCESS else None
