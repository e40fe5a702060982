"""Checks of the host: CPU, cores, memory, /dev/shm, limits, NUMA, debugging rights."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.host.versions import NEWEST_TORCH, untested_torch
from phalanx.observe.format import size
from phalanx.tools.doctor.reader import CheckResult, HostReader

_GB = 10**9
_SMALL_SHM = 1 * _GB
_FEW_FILES = 4096
_LITTLE_PER_CORE = 0.5 * _GB


def check_host(machine: HostReader) -> Iterator[CheckResult]:
    """Check what ranks on any machine need."""
    yield from _software(machine)
    yield from _cpu(machine)
    yield from _cores(machine)
    yield from _memory(machine)
    yield from _limits(machine)
    yield from _tuning(machine)


def _software(machine: HostReader) -> Iterator[CheckResult]:
    """Say what is installed: with this, a report about a fault is complete."""
    versions = machine.fact("versions") or {}
    yield CheckResult("ok", "versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    if untested := untested_torch(versions.get("torch")):
        yield CheckResult("note", "torch", untested, f"if a run fails with it: pip install 'torch=={NEWEST_TORCH}.*'")
    lacking = machine.fact("extras") or {}
    if complete := [name for name, missing in lacking.items() if not missing]:
        yield CheckResult("ok", "extras", f"installed: {', '.join(complete)}")
    if absent := {name: missing for name, missing in lacking.items() if missing}:
        text = "; ".join(f"{name} ({', '.join(missing)})" for name, missing in absent.items())
        yield CheckResult("ok", "extras", f"not installed: {text}")


def _cpu(machine: HostReader) -> Iterator[CheckResult]:
    text = machine.text("/proc/cpuinfo") or ""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    model = name[1] if name else machine.fact("architecture")
    listed = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16", "i8mm")
    yield CheckResult(
        "ok", "CPU", f"{model}: {', '.join(flag for flag in listed if flag in flags) or 'no known flags'}"
    )
    if flags and not flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        has_gpus = bool(machine.names("/proc/driver/nvidia/gpus"))
        yield CheckResult(
            "note" if has_gpus else "warning",
            "CPU",
            "no bf16 instructions: bf16 on CPU ranks was seen to be 60 times slower than fp32",
            "on the CPU: --no-mixed-precision",
        )


def _cores(machine: HostReader) -> Iterator[CheckResult]:
    all_of_them, allowed = machine.fact("cpus") or 1, machine.fact("allowed_cpus") or 1
    if load := machine.fact("load"):
        yield CheckResult("ok", "load", f"{load[0]:.2f}, {load[1]:.2f}, {load[2]:.2f} in the last 1, 5 and 15 minutes")
    quota = _quota(machine)
    usable = min(allowed, quota or allowed)
    yield CheckResult("ok", "cores", f"{usable:g} of {all_of_them} can be used")
    if quota is not None and quota < allowed:
        yield CheckResult(
            "warning",
            "cores",
            f"the control group allows {quota:g} cores, and libraries see {allowed}: they start too many threads",
            f"export OMP_NUM_THREADS={max(1, int(quota))}",
        )
    elif allowed < all_of_them:
        yield CheckResult(
            "note",
            "cores",
            f"this process may use {allowed} of {all_of_them} cores (affinity)",
            "taskset -p $$ shows it; srun --cpu-bind=none, or more --cpus-per-task, lifts it",
        )
    threads = machine.fact("environment").get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > usable:
        fix = f"export OMP_NUM_THREADS={max(1, int(usable))}, or leave it out: phalanx divides the cores by the ranks"
        yield CheckResult("warning", "cores", f"OMP_NUM_THREADS={threads} is more than {usable:g} cores", fix)


def _quota(machine: HostReader) -> float | None:
    """Return the cores that the control group allows; None without a limit."""
    new = (machine.text("/sys/fs/cgroup/cpu.max") or "").split()
    if len(new) == 2 and new[0].isdecimal():
        return int(new[0]) / int(new[1])
    quota = machine.text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") or ""
    period = machine.text("/sys/fs/cgroup/cpu/cpu.cfs_period_us") or ""
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _memory(machine: HostReader) -> Iterator[CheckResult]:
    memory, cores = machine.fact("memory") or 0, machine.fact("allowed_cpus") or 1
    installed = re.search(r"^MemTotal:\s*(\d+)", machine.text("/proc/meminfo") or "", re.MULTILINE)
    limited = installed is not None and memory < 0.98 * int(installed[1]) * 1024
    text = f"{size(memory)}{', by the control group' if limited else ''}"
    yield CheckResult("ok", "memory", text)
    if memory < _LITTLE_PER_CORE * cores:
        yield CheckResult("warning", "memory", f"{text} for {cores} cores is little", "fewer ranks: --num-workers")
    shm = machine.fact("shm")
    if shm is None:
        yield CheckResult(
            "error",
            "/dev/shm",
            "it is missing: ranks and data workers share memory there",
            "mount -t tmpfs shm /dev/shm",
        )
    elif shm["total"] < _SMALL_SHM:
        yield CheckResult(
            "error",
            "/dev/shm",
            f"{size(shm['total'])} is too small for data workers and ranks (a container's default)",
            "docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm",
        )
    elif shm["free"] < 0.1 * shm["total"]:
        text = f"{size(shm['free'])} of {size(shm['total'])} are free"
        yield CheckResult("warning", "/dev/shm", text, "ls -la /dev/shm: remove what dead processes left")
    else:
        yield CheckResult("ok", "/dev/shm", f"{size(shm['free'])} of {size(shm['total'])} are free")


def _limits(machine: HostReader) -> Iterator[CheckResult]:
    limits = machine.fact("limits") or {}
    files = limits.get("nofile", -1)
    if 0 <= files < _FEW_FILES:
        text = f"{files} open files: many ranks and data workers need more"
        yield CheckResult("warning", "limits", text, "ulimit -n 65536 (for good: /etc/security/limits.conf)")
    locked = limits.get("memlock", -1)
    if locked >= 0 and machine.names("/sys/class/infiniband"):
        text = f"{size(locked)} of memory may be locked: RDMA registers buffers, and fails or falls back to TCP"
        yield CheckResult("error", "limits", text, "ulimit -l unlimited; in containers --ulimit memlock=-1")
    if not any(0 <= limit < least for limit, least in ((files, _FEW_FILES), (limits.get("nproc", -1), 1024))):
        yield CheckResult("ok", "limits", f"{files if files >= 0 else 'unlimited'} open files")
    if 0 <= limits.get("nproc", -1) < 1024:
        yield CheckResult("warning", "limits", f"{limits['nproc']} processes and threads", "ulimit -u 65536")


def _tuning(machine: HostReader) -> Iterator[CheckResult]:
    nodes = [name for name in machine.names("/sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    if len(nodes) > 1:
        text = f"{len(nodes)} NUMA nodes: a rank is fastest on the node of its GPU and network card"
        yield CheckResult("note", "NUMA", text, "nvidia-smi topo -m shows them; numactl --cpunodebind, srun --cpu-bind")
    pages = machine.text("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    if "[never]" in pages:
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (root)"
        yield CheckResult(
            "note", "huge pages", "transparent huge pages are off: large tensors take more page faults", fix
        )
    governor = machine.text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor == "powersave":
        yield CheckResult(
            "note", "CPU", "the frequency governor is powersave", "cpupower frequency-set -g performance (root)"
        )
    scope = machine.text("/proc/sys/kernel/yama/ptrace_scope")
    if scope not in (None, "0") and not machine.fact("root"):
        text = f"ptrace_scope = {scope}: py-spy cannot read other processes (phalanx stacks --native)"
        yield CheckResult(
            "note", "debugging", text, "sysctl kernel.yama.ptrace_scope=0 (root), or --cap-add SYS_PTRACE"
        )
