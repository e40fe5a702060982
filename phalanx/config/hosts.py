"""Machines and their slots as horovodrun writes them: node1:8,node2:8."""

from __future__ import annotations

import re
from typing import NamedTuple

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class Host(NamedTuple):
    """One machine, and how many ranks may run there."""

    name: str
    slots: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read machines and slots; a ValueError says what is wrong and what to write."""
    hosts: list[Host] = []
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        if not _HOST.fullmatch(name):
            raise ValueError(f"{part.strip()!r} names no machine: write node1:8,node2:8.")
        if colon and not (slots.isdecimal() and int(slots) > 0):
            raise ValueError(f"{part.strip()!r} has no number of slots after the colon: write {name}:8.")
        if name in {host.name for host in hosts}:
            raise ValueError(f"{name} stands there twice: write it once, with all its slots.")
        hosts.append(Host(name, int(slots) if colon else 1))
    return tuple(hosts)


def slots_of(text: str) -> int | None:
    """Return how many ranks the machines have room for; None where the text is wrong, which is told elsewhere."""
    try:
        return sum(host.slots for host in parse_hosts(text))
    except ValueError:
        return None
