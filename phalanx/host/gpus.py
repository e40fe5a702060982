"""The GPUs of this machine, by NVML: how many there are, their memory, how busy one is; and how ranks share one.

No torch, no CUDA context.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from phalanx.errors import UsageError

HOST_ID = "NCCL_HOSTID"
"""What NCCL takes for the name of a rank's host; it refuses two ranks of one host on one GPU."""
_SUCCESS = 0
_GPU_CHIP = 0
"""NVML's number of the temperature sensor."""
_VERSION_BYTES = 96
_CONTEXT_BYTES = 10**9
"""What CUDA and nccl take of a GPU's memory for each process."""


def count_gpus() -> int:
    """Return how many GPUs a rank would see: NVML's count, limited by CUDA_VISIBLE_DEVICES; 0 without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with _nvml() as nvml:
        installed = _count(nvml)
    return installed if visible is None else min(installed, count_visible(visible, installed))


def gpu_memory() -> int:
    """Return the bytes of the smallest GPU that a rank would see; 0 without one, or without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with _nvml() as nvml:
        count = _count(nvml)
        named = [str(index) for index in range(count)] if visible is None else visible_gpus(visible, count)
        return min((_memory_of(nvml, entry) for entry in named), default=0)


def gpu_names() -> list[str]:
    """Return the name of each GPU of this machine; empty without a driver."""
    names = []
    with _nvml() as nvml:
        for index in range(_count(nvml)):
            assert nvml is not None, "it has counted this GPU"
            handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(_VERSION_BYTES)
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
            nvml.nvmlDeviceGetName(handle, text, _VERSION_BYTES)
            names.append(text.value.decode())
    return names


def driver_version() -> str:
    """Return the version of NVIDIA's driver; "none" without one."""
    with _nvml() as nvml:
        if nvml is None:
            return "none"
        text = ctypes.create_string_buffer(_VERSION_BYTES)
        is_known = nvml.nvmlSystemGetDriverVersion(text, _VERSION_BYTES) == _SUCCESS
        return text.value.decode() if is_known else "unknown"


def ranks_per_gpu(ranks: int, gpus: int) -> int:
    """Return the most ranks on one GPU where the ranks of a node are spread over its GPUs in turn."""
    return -(-ranks // gpus) if gpus else 1


def shared_memory(ranks: int, total: int) -> int:
    """Return the bytes of a GPU that each of several ranks may allocate beside its CUDA context; refuse too many."""
    fits = total // (2 * _CONTEXT_BYTES)
    if ranks > fits:
        needs = f"each takes {_CONTEXT_BYTES / 1e9:g} GB for CUDA and nccl alone, and needs as much for the model"
        raise UsageError(
            f"{ranks} ranks do not fit on a GPU with {total / 1e9:.0f} GB: {needs}.",
            hint=f"Request at most {max(1, fits)} per GPU, or run the same ranks on the CPU with --device cpu.",
        )
    return total // ranks - _CONTEXT_BYTES


def sharing_environment(process: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank with which NCCL accepts it on a shared GPU: its own host, and sockets.

    `process`: a word that no other process of this host has at the same time.
    """
    return {HOST_ID: f"{socket.gethostname()}-{process}", "NCCL_IB_DISABLE": environ.get("NCCL_IB_DISABLE", "1")}


@contextmanager
def _nvml() -> Iterator[ctypes.CDLL | None]:
    """Open NVML for the block; None without a driver."""
    nvml = _load_nvml()
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def _memory_of(nvml: ctypes.CDLL | None, entry: str) -> int:
    """Return the bytes of the GPU, or of the slice of one, that an entry of CUDA_VISIBLE_DEVICES names.

    NVML numbers GPUs by their place on the bus, as nvidia-smi does, and CUDA with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    if nvml is None:
        return 0
    handle, memory = ctypes.c_void_p(), _Memory()
    if entry.isdecimal():
        nvml.nvmlDeviceGetHandleByIndex_v2(int(entry), ctypes.byref(handle))
    elif nvml.nvmlDeviceGetHandleByUUID(entry.encode(), ctypes.byref(handle)) != _SUCCESS:
        # The beginning of a UUID, which CUDA takes: it may be that of any.
        return min((_memory_of(nvml, str(index)) for index in range(_count(nvml))), default=0)
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return int(memory.total)


def _count(nvml: ctypes.CDLL | None) -> int:
    count = ctypes.c_uint(0)
    is_known = nvml is not None and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == _SUCCESS
    return count.value if is_known else 0


def count_visible(visible: str, installed: int) -> int:
    """Count the entries of CUDA_VISIBLE_DEVICES as the CUDA runtime does."""
    return len(visible_gpus(visible, installed))


def visible_gpus(visible: str, installed: int) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES that the CUDA runtime takes.

    It stops at the first one that names no device, and at a repeated one.
    """
    valid: dict[str, None] = {}
    for entry in (part.strip() for part in visible.split(",")):
        is_index = entry.isdecimal() and int(entry) < installed
        is_uuid = entry.startswith(("GPU-", "MIG-"))
        if not (is_index or is_uuid) or entry in valid:
            break
        valid[entry] = None
    return list(valid)


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuReading(NamedTuple):
    """What NVML says of one GPU at this moment; None where it does not say it (a slice of a GPU has no utilisation)."""

    utilization: float | None = None
    """The share of the last sampling period (under a second) in which a kernel ran, from 0 to 1."""
    memory: int | None = None
    """Bytes in use, by all processes."""
    power: float | None = None
    """Watts."""
    temperature: float | None = None
    """Degrees Celsius."""


class GpuSensor:
    """Reads the GPU at a PCI address, such as "0000:17:00.0"; without a driver nothing is known."""

    def __init__(self, pci_address: str) -> None:
        self._handle = ctypes.c_void_p()
        self._nvml = _load_nvml()
        if self._nvml is not None:
            status = self._nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_address.encode(), ctypes.byref(self._handle))
            self._nvml = self._nvml if status == _SUCCESS else None

    def read(self) -> GpuReading:
        """Read it; takes tens of microseconds."""
        if self._nvml is None:
            return GpuReading()
        rates, memory, milliwatts, degrees = _Rates(), _Memory(), ctypes.c_uint(), ctypes.c_uint()
        ask, nvml = self._ask, self._nvml
        return GpuReading(
            rates.gpu / 100 if ask(nvml.nvmlDeviceGetUtilizationRates, rates) else None,
            memory.used if ask(nvml.nvmlDeviceGetMemoryInfo, memory) else None,
            milliwatts.value / 1000 if ask(nvml.nvmlDeviceGetPowerUsage, milliwatts) else None,
            float(degrees.value) if ask(nvml.nvmlDeviceGetTemperature, degrees, ctypes.c_int(_GPU_CHIP)) else None,
        )

    def _ask(self, function: Any, answer: Any, *arguments: Any) -> bool:
        return bool(function(self._handle, *arguments, ctypes.byref(answer)) == _SUCCESS)


def _load_nvml() -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == _SUCCESS else None
