"""Fault tolerance: write checkpoints that survive a kill, complete state, failure detection, recovery, elasticity.

``python template_fault_tolerance.py`` shows what is written; ``phalanx learn check`` grades it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import Store

Ranks = Sequence[BaseProcess]
Clock = Callable[[], float]
Sleep = Callable[[float], None]


class CheckpointStore:
    """Checkpoints of one run in one folder: each is whole or absent, and a damaged one is found and passed over."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = Path(folder), keep
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write ``state`` as the checkpoint of ``step``, remove all but the newest ``keep``, return the new file.

        After a kill at any moment, load() finds the old or the new checkpoint, whole. The content is on the disk
        (os.fsync) before it has the name of a checkpoint. ``step`` grows; with keep=2, the two newest steps stay. The
        newest is the one of the largest step, whatever the times of the files. Files of others in the folder stay.
        """
        # TODO atomic-checkpoint: save so that a kill at any moment leaves the old or the new checkpoint whole.
        #   Hints, one at a time: phalanx learn hint atomic-checkpoint
        raise NotImplementedError("CheckpointStore")

    def load(self) -> tuple[int, dict[str, Any]] | None:
        """Return (step, state) of the newest whole checkpoint; None for an empty folder; all damaged: RuntimeError.

        A checkpoint that was cut or in which a bit has changed is passed over. A new CheckpointStore on the same folder
        finds the same.
        """
        # Part of TODO atomic-checkpoint.
        raise NotImplementedError("CheckpointStore")


@dataclass
class Training:
    """What belongs to a training; the next batch is the one at ``position`` in the shuffled order of ``epoch``."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    epoch: int = 0
    position: int = 0


class TrainingState:
    """All that a checkpoint must hold so that a training which continues gives the same bits as one never stopped."""

    @staticmethod
    def capture(training: Training) -> dict[str, Any]:
        """Return a snapshot: later steps of the training do not change it.

        The dict can be pickled. Calling it changes nothing in the training.
        """
        # TODO complete-state: return all that the next step depends on, as a snapshot; put it back in restore().
        #   Hints, one at a time: phalanx learn hint complete-state
        raise NotImplementedError("TrainingState")

    @staticmethod
    def restore(training: Training, state: dict[str, Any]) -> None:
        """Put a training, new or used, into the state of a snapshot.

        After it, the training gives the same losses and weights, to the bit, as one that was never stopped. The
        snapshot stays as it is, also while the training goes on: it can be restored a second time.
        """
        # Part of TODO complete-state.
        raise NotImplementedError("TrainingState")


class FailureDetector:
    """Heartbeats in a store: names ranks that are dead (no beat) or hung (beats, but does not get on)."""

    def __init__(
        self, store: Store, rank: int, world: int, dead_after: float, hung_after: float, clock: Clock = time.monotonic
    ) -> None:
        self.store, self.rank, self.world, self.clock = store, rank, world, clock
        self.dead_after, self.hung_after = dead_after, hung_after

    def beat(self) -> None:
        """Show that this rank is alive; a thread calls it every fraction of a second."""
        # TODO detect-failure: write signs of life in beat() and progress(), and judge them in failures().
        #   Hints, one at a time: phalanx learn hint detect-failure
        raise NotImplementedError("FailureDetector")

    def progress(self, step: int, waiting: bool) -> None:
        """Show what the training loop does: it computes ``step``, or it waits for the other ranks in a collective."""
        # Part of TODO detect-failure.
        raise NotImplementedError("FailureDetector")

    def failures(self) -> dict[int, str]:
        """Return the ranks that have failed by now, each with "dead" or "hung"; never blocks.

        A rank that has not beaten for more than ``dead_after`` seconds is "dead"; one that never came is dead as long
        after this detector was made. A rank that beats but whose progress has not changed for more than ``hung_after``
        seconds is "hung", unless it waits for others; one that has shown no progress yet counts from when this
        detector was made. A rank that works again is not named any more. Clocks of ranks may differ.
        """
        # Part of TODO detect-failure.
        raise NotImplementedError("FailureDetector")


def supervise(
    start: Callable[[int], Ranks], last_step: Callable[[], int], max_restarts: int, backoff: float, sleep: Sleep
) -> int:
    """Run ranks until all of them end well, starting all anew after a failure; return the number of restarts.

    ``start(generation)`` starts all ranks and returns their processes (exitcode, is_alive(), kill(), join() as in
    multiprocessing); the generation is the number of restarts so far. ``last_step()`` is the step of the last
    checkpoint. When a rank fails, all others are ended before the next start. The pause before a restart is ``backoff``
    seconds, and twice as long after each further failure from the same checkpoint. RuntimeError, with the rank that
    failed first and its exit code, after the third failure from one checkpoint or when ``max_restarts`` restarts are
    used. ``sleep(seconds)`` is the only way to wait.
    """
    # TODO automatic-recovery: start the ranks, watch them, start all anew after a failure, and know when to stop.
    #   Hints, one at a time: phalanx learn hint automatic-recovery
    raise NotImplementedError("supervise")


class ElasticTraining:
    """One epoch on a number of ranks that may change between steps: the global batch and the samples stay the same."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, order: list[int], global_batch: int) -> None:
        self.model, self.optimizer, self.order, self.global_batch = model, optimizer, order, global_batch
        self.position = 0

    def share(self, rank: int, world: int) -> list[int]:
        """Return the samples of this rank in the next global batch; the last batch may be smaller, a share empty.

        The next global batch is ``order[position : position + global_batch]``. Shares differ by one sample at most, and
        together they are this batch: no sample is missing, none is in two shares.
        """
        # TODO elastic: divide each global batch over the ranks, make the step that one process would make, and join.
        #   Hints, one at a time: phalanx learn hint elastic
        raise NotImplementedError("ElasticTraining")

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Make one step on the mean squared error of the global batch; ``inputs`` and ``targets`` are this share.

        The mean is over the samples and over the outputs of each, as F.mse_loss takes it. After the step, model and
        optimizer are on each rank as after the same step in one process with the whole batch.
        ``position`` has moved on by the size of the batch. ``inputs`` may have no rows.
        """
        # Part of TODO elastic.
        raise NotImplementedError("ElasticTraining")

    def join(self) -> None:
        """Give all ranks the state of rank 0, after a checkpoint was loaded there or ranks have come.

        Rank 0 has the right model, optimizer and position; other ranks may hold anything.
        """
        # Part of TODO elastic.
        raise NotImplementedError("ElasticTraining")


def main() -> None:
    """Try the checkpoints in a temporary folder."""
    store = CheckpointStore(Path(tempfile.mkdtemp()))
    try:
        for step in (9, 10, 100):
            print("saved", store.save(step, {"weight": torch.full((2,), float(step))}).name)
        print("loaded", store.load())
    except NotImplementedError as error:
        print(f"{error} is not written yet: look for TODO in {Path(__file__).name}")


if __name__ == "__main__":
    main()
