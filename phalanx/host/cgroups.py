"""The control groups of this process: the memory they allow, and how often the kernel has killed in them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def memory_groups(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Iterator[Path]:
    """Yield the folders of this process's memory groups, inner ones first: version 2 (`0::/path`) and version 1."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = cgroups if controllers == "" else cgroups / "memory" if "memory" in controllers.split(",") else None
        if root is not None:
            inner = Path(path.lstrip("/"))
            yield from (root / part for part in (inner, *inner.parents) if str(part) != ".")
    yield cgroups  # in a container this is the own group


def host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the bytes of memory that processes of this machine, or of this container, may use together."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in memory_groups(proc, cgroups):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError):
                text = (group / name).read_text().strip()
                found += [int(text)] if text.isdecimal() else []
    return min(found)


def oom_kills(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return how often the kernel has killed for memory, on this machine or in this process's control groups."""
    names = ("memory.events", "memory.oom_control")
    counters = [proc / "vmstat", *(group / name for group in memory_groups(proc, cgroups) for name in names)]
    count = 0
    for path in counters:
        with contextlib.suppress(OSError):  # not every kernel and container shows every counter
            count += sum(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("oom_kill "))
    return count
