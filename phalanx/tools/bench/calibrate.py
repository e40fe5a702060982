"""`phalanx bench machine`: products, copies, attention and collectives of this machine, as the planner reads them.

Products and copies are measured over sizes, one device in this process; collectives by `bench comm`, a rank per GPU, or
two ranks on the CPU.
"""

from __future__ import annotations

import io
import os
import platform
import socket
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from phalanx.launch import PlainConsole
from phalanx.tools.bench.comm.plan import BenchPlan
from phalanx.tools.bench.comm.run import run_bench
from phalanx.tools.plan import presets

_LONG_SECONDS = 1.0
"""A size whose repetition takes longer than this is the last one."""
_REPEAT_SECONDS = 0.2
_CPU_RANKS = 2
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Curve = list[tuple[int, float]]


def measure(show: Callable[[str], object]) -> dict[str, dict[str, Any]]:
    """Return the entries of this machine: `gpus`, `links` where there are two devices, and the measured `curves`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = f"{'cpu-' * (device.type == 'cpu')}measured:{socket.gethostname()}"
    gpu_data = None if device.type == "cpu" else presets.gpu_of_device(_title(device), _memory_gib(device))
    if device.type == "cpu":  # a rank of two has half of the machine, as `train` starts them
        torch.set_num_threads(max(1, _cores() // _CPU_RANKS))
    show(f"{name}: {_title(device)}" + (f", which is {gpu_data.name} in the planner's data" if gpu_data else ""))
    products = {kind: _products(device, dtype) for kind, dtype in _DTYPES.items()}
    best = {kind: max(rate for _, rate in curve) for kind, curve in products.items()}
    precisions = [kind for kind in _DTYPES if best[kind] >= best["fp32"]]  # the others are emulated here
    for kind, curve in products.items():
        show(f"  matrix products, {kind}: {best[kind]:.3g} TFLOP/s, {curve[-1][1]:.3g} at size {curve[-1][0]}")
    copies = _copies(device)
    copied = max(rate for _, rate in copies)
    show(f"  copies: {copied:.3g} GB/s")
    first = precisions[0]
    tflops = {kind: max(best[kind], gpu_data.tflops.get(kind, 0.0) if gpu_data else 0.0) for kind in precisions}
    memory_gbps = max(copied, gpu_data.memory_gbps if gpu_data else 0.0)
    attention = _attention(device, _DTYPES[first]) / tflops[first]
    show(f"  attention: {attention * tflops[first]:.3g} TFLOP/s")
    launch_us = _launch_us(device)
    show(f"  short kernels: {launch_us:.3g} us each")
    link = _collectives(device, show)
    gpu: dict[str, Any] = {
        "memory_gib": round(_memory_gib(device), 1),
        "tflops": {kind: round(value, 4) for kind, value in tflops.items()},
        "memory_gbps": round(memory_gbps, 1),
        "matmul": round(products[first][-1][1] / tflops[first], 3),
        "bandwidth": round(copied / memory_gbps, 3),
        "attention": round(attention, 3),
        "launch_us": round(launch_us, 2),
        "sms": torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _cores(),
        "reserve_gib": gpu_data.reserve_gib if gpu_data else 0.5,
        "intra_node": name if link else gpu_data.intra_node if gpu_data else "shared-memory",
        "inter_node": gpu_data.inter_node if gpu_data else "ethernet-10",
        "source": f"measured on {socket.gethostname()}, {_title(device)}, {date.today().isoformat()}",
    }
    entries = {"gpus": {name: gpu}, "curves": {name: {"products": products, "copies": copies}}}
    return {**entries, "links": {name: link}} if link else entries


def _title(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{_cores()} cores, {platform.machine()}"


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 / _CPU_RANKS


def _products(device: torch.device, dtype: torch.dtype) -> Curve:
    """Return (size, TFLOP/s) of square products."""
    curve: Curve = []
    for size in (256, 512, 1024, 2048, 4096, 8192, 16384) if device.type == "cuda" else (128, 256, 512, 1024, 2048):
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = _timed(device, partial(torch.matmul, left, right))
        curve.append((size, 2.0 * size**3 / seconds / 1e12))
        if seconds > _LONG_SECONDS / 8:  # the next size takes eight times as long
            break
    return curve


def _copies(device: torch.device) -> Curve:
    """Return (bytes, GB/s) of copies, read and written bytes counted."""
    curve: Curve = []
    for size in (1 << 20, 1 << 24, 1 << 28) if device.type == "cpu" else (1 << 20, 1 << 24, 1 << 28, 1 << 30):
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        seconds = _timed(device, partial(target.copy_, source))
        curve.append((size, 2.0 * size / seconds / 1e9))
    return curve[1:]  # the first fits in the cache


def _attention(device: torch.device, dtype: torch.dtype) -> float:
    """Return the TFLOP/s of the forward pass of causal attention."""
    batch, heads, length, width = (4, 16, 2048, 128) if device.type == "cuda" else (1, 4, 512, 64)
    query = torch.randn(batch, heads, length, width, device=device).to(dtype)
    seconds = _timed(device, lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True))
    return 2.0 * batch * heads * length**2 * width / seconds / 1e12


def _launch_us(device: torch.device) -> float:
    """Return the time of a kernel that has almost nothing to compute."""
    small = torch.zeros(64, device=device)

    def many() -> None:
        for _ in range(100):
            small.add_(1)

    return _timed(device, many) / 100 * 1e6


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    """Return the shortest time of a call, after a warm-up."""
    work()
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < _REPEAT_SECONDS or best == float("inf"):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _collectives(device: torch.device, show: Callable[[str], object]) -> dict[str, Any] | None:
    """Return the link between the devices of this machine, as `bench comm` measures it; None for a single GPU."""
    ranks = torch.cuda.device_count() if device.type == "cuda" else _CPU_RANKS
    if ranks < 2:
        show("  collectives: not measured, there is one GPU")
        return None
    sizes = tuple(4**power << 10 for power in range(10 if device.type == "cuda" else 8))
    plan = BenchPlan(op="all_reduce", algos=("nccl",) if device.type == "cuda" else ("shm", "gloo"), sizes=sizes)
    measured = run_bench(plan, ranks, PlainConsole(out=io.StringIO()))
    rows = [] if measured is None else measured["rows"]
    first = rows[0]["algo"] if rows else ""
    curve = [(row["size_bytes"], row["busbw_gbs"]) for row in rows if row["algo"] == first]
    if not curve:
        return None
    best = max(rate for _, rate in curve)
    show(f"  all-reduce on {ranks} ranks by {first}: {best:.3g} GB/s, {rows[0]['time_us']:.3g} us for the smallest")
    return {
        "gbps": round(best, 4),
        "latency_us": round(rows[0]["time_us"], 2),
        "curve": [[size, round(rate / best, 5)] for size, rate in curve],
        "source": f"phalanx bench comm on {ranks} ranks by {first}, {date.today().isoformat()}",
    }


def calibrate(output: str | None, show: Callable[[str], object]) -> Path:
    """Measure this machine, and keep it where `--gpu measured` finds it, or in a file."""
    path = presets.measured_file() if output is None else Path(output)
    return presets.keep_measured(measure(show), path)
