"""Evidence that the kernel killed for memory: its counters before and after."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def oom_kills(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return how often the kernel has killed for memory, on this machine or in this process's control group."""
    sources = [proc / "vmstat", *_cgroup_counters(proc, cgroups)]
    return sum(_counter(source) for source in sources)


def _cgroup_counters(proc: Path, cgroups: Path) -> list[Path]:
    """Return the counter files of this process's groups: version 2 (`0::/path`) and version 1 (`4:memory:/path`)."""
    found = [cgroups / "memory.events"]
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if controllers == "" and relative:
            found.append(cgroups / relative / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(cgroups / "memory" / relative / "memory.oom_control")
    return found


def _counter(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        # Not every kernel and container shows every counter.
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
