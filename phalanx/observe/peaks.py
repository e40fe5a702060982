"""What accelerators can do at best, for model FLOP utilisation (MFU): dense bf16 and fp16, as their makers state it."""

from __future__ import annotations

_TERAFLOPS = {
    "B200": 2250.0,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "A100": 312.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "MI300X": 1307.4,
    "MI250X": 383.0,
}
"""By what the driver calls them. The name that says more comes first: an H100 PCIe is an H100, too."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return a device's peak in operations a second, or None when it is not known: then no MFU is told."""
    if precision not in ("bf16", "fp16"):
        return None
    words = device_name.replace("-", " ").split()
    for name, teraflops in _TERAFLOPS.items():
        if all(part in words for part in name.split()):
            return teraflops * 1e12
    return None
