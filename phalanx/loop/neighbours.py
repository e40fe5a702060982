"""The state of sharded runs in the host memory of two ranks, from which replaced ranks get their shards without a disk.

Every few steps each rank keeps a copy of its shards, and sends one to another rank, on another machine if there is one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from phalanx.checkpoint import Snapshot
from phalanx.checkpoint.memory import NeighbourMemory
from phalanx.loop.hooks import Callback, StepInfo
from phalanx.loop.state import fill_optimizers, put_back, snapshot_of, tensors_of
from phalanx.world.seed import set_rng_state

if TYPE_CHECKING:
    from phalanx.loop.formation import Formation
    from phalanx.loop.trainer import TrainLoop


class Neighbours(Callback):
    """Keeps the state every `every` steps; survives in a rank while the group changes."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._memory: NeighbourMemory | None = None

    def join(self, formation: Formation) -> None:
        """Use the ranks of a new group; all of them call this."""
        exchange = dist.new_group(backend="gloo", timeout=timedelta(seconds=formation.config.timeout))
        if self._memory is None:
            self._memory = NeighbourMemory(exchange)
        else:
            self._memory.rejoin(exchange)

    def leave(self) -> None:
        """Wait for what is under way, whose group ends: a failed exchange leaves the one before."""
        if self._memory is not None:
            self._memory.discard_pending()

    def on_step_end(self, trainer: TrainLoop, info: StepInfo) -> None:
        """Keep the state where it is due."""
        if info.step % self._every == 0:
            self._keep(trainer.formation, trainer.to_keep())

    def _keep(self, formation: Formation, shared: dict[str, Any]) -> None:
        assert self._memory is not None, "joined before"
        identity = {"run_id": formation.run_id, "lineage": formation.lineage}
        snapshot: Snapshot = snapshot_of(formation, {**shared, "identity": identity})
        self._memory.keep(snapshot, wait=False)

    def restore(self, formation: Formation) -> dict[str, Any] | None:
        """Load the newest step that the ranks hold completely; return what is not part of a `Prepared`."""
        assert self._memory is not None, "joined before"
        fill_optimizers(formation)
        template = tensors_of(formation)
        loaded = self._memory.load(template)
        if loaded is None:
            return None
        shared = dict(loaded.shared)
        identity = shared.pop("identity")
        formation.run_id, formation.lineage = identity["run_id"], identity["lineage"]
        if loaded.rank_state is not None:
            set_rng_state(loaded.rank_state)
        rest = put_back(formation, template, loaded.step, shared)
        return {**rest, "path": f"the memory of the ranks (step {loaded.step})"}
