"""The state of sharded runs in the host memory of two ranks, from which replaced ranks get their shards without a disk.

Every few steps each rank keeps a copy of its shards, and sends one to another rank, on another node if there is one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from phalanx.checkpoint import Snapshot
from phalanx.loop.hooks import Callback
from phalanx.loop.run_state import kept, load_kept
from phalanx.loop.state import fill_optimizers, state_tensors
from phalanx.loop.step_info import StepInfo
from phalanx.recovery.ranks.neighbour_memory import NeighbourMemory

if TYPE_CHECKING:
    from phalanx.loop.formation import Formation
    from phalanx.loop.running_trainer import RunningTrainer
    from phalanx.loop.train_loop import TrainLoop


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

    def on_step_end(self, trainer: RunningTrainer, info: StepInfo) -> None:
        """Keep the state where it is due."""
        if info.step % self._every == 0:
            assert self._memory is not None, "joined before"
            loop = cast("TrainLoop", trainer)
            loop.losses_checked()  # the state has those of all ranks
            self._memory.keep(kept(loop.state, loop.evaluation), wait=False)

    def restore(self, formation: Formation) -> dict[str, Any] | None:
        """Load the newest step that the ranks hold completely; return the loop's part of it."""
        assert self._memory is not None, "joined before"
        if self._memory.newest() is None:  # filling a fresh optimizer would count as one of Adam's steps
            return None
        fill_optimizers(formation)
        template = state_tensors(formation)
        snapshot = self._memory.load(template)
        if snapshot is None:
            return None
        content = Snapshot(snapshot.step, snapshot.epoch, template, snapshot.rank_state, snapshot.shared)
        state = load_kept(formation, content, "the memory of the ranks")
        if snapshot.rank_state is not None and formation.strategy.keeps_rank_state:
            formation.strategy.load_rank_state([snapshot.rank_state], 1.0)
        return state
