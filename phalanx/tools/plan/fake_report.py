"""What a dry run found: memory and collectives of each kind of rank, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from phalanx.observe.format import size as size_text
from phalanx.tools.plan.memory_trace import KINDS


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind in a step of one rank."""

    op: str
    axis: str
    ranks: int
    bytes: int
    """The whole message: what an all-gather returns, what a reduce-scatter takes."""
    count: float

    @property
    def total(self) -> float:
        """Bytes of all calls."""
        return self.bytes * self.count


@dataclass(frozen=True)
class FakeRank:
    """What one kind of rank holds and sends."""

    kind: str
    rank: int
    peak_bytes: int
    memory: dict[str, dict[str, int]]
    """Part of the model to bytes by kind (`KINDS`), when most was held."""
    collectives: tuple[Sent, ...]
    seconds: float

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind at the peak."""
        return {kind: sum(parts.get(kind, 0) for parts in self.memory.values()) for kind in KINDS}


@dataclass(frozen=True)
class DryRun:
    """The ranks that were tried, and what was assumed."""

    world_size: int
    mesh: dict[str, int]
    ranks: tuple[FakeRank, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def peak_bytes(self) -> int:
        """Bytes of the rank that holds the most."""
        return max(rank.peak_bytes for rank in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        ranks = [
            {
                **{name: getattr(rank, name) for name in ("kind", "rank", "peak_bytes", "memory", "seconds")},
                "by_kind": rank.by_kind(),
                "collectives": [{**vars(sent), "total": sent.total} for sent in rank.collectives],
            }
            for rank in self.ranks
        ]
        return {"world_size": self.world_size, "mesh": self.mesh, "ranks": ranks, "notes": list(self.notes)}

    def text(self) -> str:
        """Return the result for a terminal."""
        axes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1) or "one rank"
        lines = [f"dry run: {self.world_size} ranks ({axes}) start, and each kind takes a step"]
        for rank in self.ranks:
            lines += _rank_lines(rank)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _rank_lines(rank: FakeRank) -> Iterator[str]:
    yield f"{rank.kind} (rank {rank.rank}): peak {size_text(rank.peak_bytes)} ({rank.seconds:.0f} s)"
    for kind, size in rank.by_kind().items():
        yield f"  {kind:<16}{size_text(size):>12}"
    yield f"  {'by module':<24}" + "".join(f"{kind:>15}" for kind in KINDS)
    for unit, parts in rank.memory.items():
        yield f"  {unit:<24}" + "".join(f"{size_text(parts[kind]) if kind in parts else '-':>15}" for kind in KINDS)
    yield "  per step:"
    for sent in rank.collectives:
        yield (
            f"  {sent.count:>8g} x {sent.op:<15}{size_text(sent.bytes):>12}  over {sent.axis} ({sent.ranks} ranks), "
            f"{size_text(round(sent.total))} in all"
        )
