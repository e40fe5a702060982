"""The mesh as arithmetic: which place on which axis a rank has, before any process exists.

Ranks are laid out row-major over the axes in `AXES` order, so that the last axis (tensor) holds neighbouring ranks,
which share the fastest links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from phalanx.config import DistributedConfig

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The size of each axis. Their product is the number of ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of the whole mesh."""
        return self.pp * self.dp_size * self.cp * self.tp

    @property
    def dp_size(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def place(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on each axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a mesh of {self.world_size} ranks")
        coordinates = {}
        for axis, size in reversed(self.sizes.items()):
            rank, coordinates[axis] = divmod(rank, size)
        return {axis: coordinates[axis] for axis in AXES}

    def dp_rank(self, rank: int) -> int:
        """Return a rank's place among the ranks that see different samples."""
        place = self.place(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def label(self, rank: int) -> str:
        """Return the name a rank has in logs, such as "r3 dp1": only axes larger than one are named."""
        place = self.place(rank)
        parts = [f"{axis}{place[axis]}" for axis, size in self.sizes.items() if size > 1]
        if self.dp_replicate == 1 or self.dp_shard == 1:  # one data axis: its short name says enough
            parts = [part.replace("dp_replicate", "dp").replace("dp_shard", "dp") for part in parts]
        return " ".join([f"r{rank}", *parts])


def plan_mesh(config: DistributedConfig, world_size: int, ranks_per_node: int) -> Mesh:
    """Lay the ranks over the axes that the config asks for; what does not divide is refused with what would."""
    if config.resolved_strategy != "fsdp":
        return Mesh(dp_replicate=world_size)
    if config.sharding != "hybrid":
        return Mesh(dp_shard=world_size)
    shard = config.shard_size or ranks_per_node
    if world_size % shard:
        possible = [size for size in range(2, world_size + 1) if world_size % size == 0]
        raise UsageError(
            f"{world_size} ranks cannot be cut into groups of shard_size = {shard}",
            hint=f"With {world_size} ranks shard_size can be: {', '.join(map(str, possible))}.",
        )
    return Mesh(dp_replicate=world_size // shard, dp_shard=shard)
