"""Who owned the memory when most of it was in use, from a history of allocations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

_SHOWN = 20


class MemoryOwners(NamedTuple):
    """The most bytes that were in use at once, of those allocated while recording, and their owners."""

    peak: int
    owners: list[tuple[str, int, int]]
    """(owner, bytes, allocations), the largest first."""


def owners_at_peak(history: Iterable[tuple[int, int, str]]) -> MemoryOwners:
    """Replay allocations (address, bytes, owner) and frees (bytes below 0); return the owners at the peak."""
    live: dict[int, tuple[int, str]] = {}
    used = peak = 0
    held: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    best: dict[str, tuple[int, int]] = {}
    for address, nbytes, owner in history:
        if nbytes > 0:
            live[address] = (nbytes, owner)
            used += nbytes
            held[owner][0] += nbytes
            held[owner][1] += 1
        elif address in live:  # else it was allocated before recording began
            if used > peak:  # copied at the top only, not with each allocation on the way
                peak, best = used, {name: (value[0], value[1]) for name, value in held.items()}
            size, name = live.pop(address)
            used -= size
            held[name][0] -= size
            held[name][1] -= 1
    if used > peak:
        peak, best = used, {name: (value[0], value[1]) for name, value in held.items()}
    ranked = sorted(((name, *value) for name, value in best.items() if value[0]), key=lambda each: -each[1])
    return MemoryOwners(peak, ranked[:_SHOWN])


def top_owners(trace: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the owners at the peak of a CUDA allocator's history, as plain data; an owner is a line of the user's."""
    history = [
        (int(entry["addr"]), int(entry["size"]) * (1 if entry["action"] == "alloc" else -1), _line(entry))
        for entry in trace
        if entry["action"] in ("alloc", "free_completed")
    ]
    return owners_at_peak(history)._asdict()


def _line(entry: dict[str, Any]) -> str:
    """Return the innermost Python line outside of torch, else the innermost one."""
    frames = [frame for frame in entry.get("frames", []) if str(frame.get("filename", "")).endswith(".py")]
    own = next((f for f in frames if "/torch/" not in f["filename"]), frames[0] if frames else None)
    return f"{own['filename']}:{own['line']} {own['name']}" if own else "backward pass (no Python line)"
