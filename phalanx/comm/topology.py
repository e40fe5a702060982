"""Where the ranks are: which share a host, a NUMA node, a switch. What follows from it is plain arithmetic.

Each rank finds out about itself from its host name, the kernel and the environment; one all-gather tells the others.
`wire.among(ring_order(places))` is then a wire whose neighbours are neighbours in the machine room too.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from phalanx.comm import ring
from phalanx.comm.shared.machine import machine_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phalanx.comm.wire import Wire

SWITCH_VARIABLE = "PHALANX_SWITCH"
"""Names this host's switch where Slurm does not: levels from the core down, with dots, such as "spine1.leaf4"."""

_NUMA_NODES = Path("/sys/devices/system/node")
_MESSAGE_BYTES = 2048
_LONGEST_PATH = 1024
_LONGEST_NAME = 512


@dataclass(frozen=True)
class Place:
    """Where one rank is. `numa` is None where it may run on several nodes, `switch` is empty where nothing says it."""

    rank: int
    host: str
    numa: int | None = None
    switch: tuple[str, ...] = ()


def find_places(wire: Wire) -> list[Place]:
    """Return where each rank of a wire is; every rank calls it, and only the first call sends anything."""
    known: dict[tuple[int, ...], list[Place]] = wire.tally.places
    if wire.peers not in known:
        message = json.dumps(asdict(own_place(wire.rank))).encode().ljust(_MESSAGE_BYTES)
        heard = ring.all_gather(torch.frombuffer(bytearray(message), dtype=torch.uint8), wire)
        known[wire.peers] = [_read_place(bytes(row.numpy())) for row in heard]
    return known[wire.peers]


def own_place(rank: int, environment: Mapping[str, str] | None = None) -> Place:
    """Return where this process is."""
    switch = switch_path(os.environ if environment is None else environment)
    return Place(rank, machine_id()[:_LONGEST_NAME], numa_node(_affinity()), switch)


def _read_place(message: bytes) -> Place:
    found = json.loads(message)
    return Place(found["rank"], found["host"], found["numa"], tuple(found["switch"]))


def _affinity() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def numa_node(cores: set[int], nodes: Path = _NUMA_NODES) -> int | None:
    """Return the NUMA node that holds all these cores, or None."""
    for path in sorted(nodes.glob("node[0-9]*/cpulist")):
        if cores <= core_set(path.read_text()):
            return int(path.parent.name.removeprefix("node"))
    return None


def core_set(text: str) -> set[int]:
    """Read the kernel's way to write cores: `0-3,8,10-11`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def switch_path(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the switches above this host, from the core down.

    Slurm writes them with the host at the end (`s0.s4.node7`) where its topology plugin knows them.
    """
    levels = tuple(environment.get("SLURM_TOPOLOGY_ADDR", "")[:_LONGEST_PATH].split("."))
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if "switch" in kinds and len(kinds) == len(levels):
        return tuple(name for name, kind in zip(levels, kinds, strict=True) if kind == "switch")
    named = environment.get(SWITCH_VARIABLE, "")[:_LONGEST_PATH]
    return tuple(named.split(".")) if named else ()


def hosts(places: Sequence[Place]) -> list[list[int]]:
    """Return the ranks of each host, hosts in the order of their first rank."""
    found: dict[str, list[int]] = {}
    for place in places:
        found.setdefault(place.host, []).append(place.rank)
    return list(found.values())


def ring_order(places: Sequence[Place]) -> list[int]:
    """Return the ranks in an order in which neighbours share as much as they can.

    Ranks of a NUMA node stand together, then those of a host, of a switch, of the switch above. Everything else keeps
    the order of the ranks, so that a cluster whose ranks are in order already keeps it.
    """
    first_rank: dict[tuple[object, ...], int] = {}
    trails = {place.rank: _trail(place) for place in places}
    for rank, trail in sorted(trails.items()):
        for depth in range(len(trail) + 1):
            first_rank.setdefault(trail[:depth], rank)
    return sorted(
        trails, key=lambda rank: ([first_rank[trails[rank][: d + 1]] for d in range(len(trails[rank]))], rank)
    )


def _trail(place: Place) -> tuple[object, ...]:
    """Name what a rank is in, from the core switch down; a level is told from its namesakes by those above it."""
    return (*place.switch, place.host, place.numa)


def with_switches(places: Sequence[Place], groups: Sequence[Sequence[int]]) -> list[Place]:
    """Take measured groups of near ranks for switches where nothing else names one."""
    number = {rank: f"near{index}" for index, group in enumerate(groups) for rank in group}
    return [place if place.switch else replace(place, switch=(number[place.rank],)) for place in places]
