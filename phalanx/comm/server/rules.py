"""How a shard takes steps, as plain data that all shards of a job share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from phalanx.comm.server.optimizers import pattern_of
from phalanx.comm.server.saved import StateFile, StateSlots

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from phalanx.comm.server.placement import Placement

Mode = Literal["sync", "async", "bounded"]


@dataclass(frozen=True)
class Rules:
    """How updates are made, and how a shard's state is kept."""

    workers: int
    """Workers that are expected at the start; later ones may come and go."""
    mode: Mode = "sync"
    staleness: int = 0
    """bounded: how many steps a worker may be ahead of the slowest."""
    folder: Path | None = None
    """Where the shards keep their states; None: nowhere, unless a shard has slots of its own."""
    save_every: int = 0
    """Save after every so many updates, before they are acknowledged; 0: by the clock."""
    save_seconds: float = 30.0
    """Save after so many seconds where save_every is 0; later where saving takes more than a twentieth of the time."""
    rejoin_seconds: float = 10.0
    """How long a restored shard waits for the workers it knew before it goes on without them."""


@dataclass(frozen=True)
class ShardSpec:
    """Everything that makes a shard."""

    number: int
    placement: Placement
    optimizer: torch.optim.Optimizer
    """The workers' optimizer: its class and settings are taken, its parameters are let go."""
    rules: Rules
    token: str
    slots: StateSlots | None = None
    """A place for the state that lasts as long as the process that starts the shard, and leaves nothing behind."""

    def __post_init__(self) -> None:
        # Here, in the worker's process: a rate that lies on a GPU cannot be read in a forked child.
        object.__setattr__(self, "optimizer", pattern_of(self.optimizer))

    @property
    def vault(self) -> StateFile | StateSlots | None:
        """Where the shard's state is kept; None: a shard that dies is lost."""
        folder = self.rules.folder
        return self.slots or (None if folder is None else StateFile(folder / f"shard-{self.number}"))
