"""Lab 03: a fault-tolerant training system: checkpoints of all ranks, a supervisor of processes, equal state.

``python system.py --folder runs/a --ranks 3`` trains worker.py under the supervisor; ``phalanx learn check lab-03``
grades it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

SAVED_AND_ENDED = 75
"""The exit code of a rank that got SIGTERM, saved after its step, and ended."""
WRONG_SETTINGS = 2
"""The exit code of a rank that will fail in the same way each time."""


class Checkpoints:
    """Checkpoints of a group of ranks in one folder: of each step there is a whole one or none."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, shared: dict[str, Any], own: dict[int, Any]) -> None:
        """Write the checkpoint of a step. All ranks call it together.

        ``shared`` is equal on all ranks, ``own`` is the state of the parts that this rank computes. A rank may be
        killed at any moment: then load() finds the checkpoint before this one, or this one, whole. The newest ``keep``
        checkpoints stay.
        """
        # TODO lab-03-checkpoint: save the states of all ranks so that a kill at any moment leaves one whole checkpoint.
        #   Hints, one at a time: phalanx learn hint lab-03-checkpoint
        raise NotImplementedError("Checkpoints")

    def load(self) -> tuple[int, dict[str, Any], dict[int, Any]] | None:
        """Return step, shared state and the states of all parts of the newest whole checkpoint, or None.

        All ranks call it together and get the same, also where another number of ranks has saved. A checkpoint with a
        missing, cut or changed file is passed over.
        """
        # Part of TODO lab-03-checkpoint.
        raise NotImplementedError("Checkpoints")


def disagreeing_ranks(state: dict[str, Tensor]) -> list[int]:
    """Return the ranks whose tensors are not those of most ranks, sorted; the same list on all ranks.

    Compares bits: names, types, shapes and values. Where no state is that of more than half of the ranks, all ranks are
    returned, as none can be trusted. Sends some bytes only, whatever the size of the state.
    """
    # TODO lab-03-consistency: find the ranks whose state has other bits than that of most ranks.
    #   Hints, one at a time: phalanx learn hint lab-03-consistency
    raise NotImplementedError("disagreeing_ranks")


@dataclass(frozen=True)
class Generation:
    """What became of one start of all ranks."""

    world: int
    end: str
    """done, died, hung or scaled."""
    rank: int | None = None
    """The rank that died or hung."""


class Supervisor:
    """Starts ranks as processes and starts all anew, with as many as there are places, when one is lost or hangs."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        slots: Callable[[], int],
        least: int = 1,
        most: int = 8,
        hung_after: float = 10.0,
        start_after: float = 60.0,
        grace: float = 10.0,
        most_failures: int = 3,
    ) -> None:
        """Keep the settings.

        slots() says how many ranks can run now. A rank writes ``STEP compute`` or ``STEP wait`` into the file
        ``folder/beats/GENERATION-RANK`` when its work changes; the first beat comes within start_after seconds.
        """
        self.command, self.folder, self.slots, self.least, self.most = command, Path(folder), slots, least, most
        self.hung_after, self.start_after, self.grace = hung_after, start_after, grace
        self.most_failures = most_failures
        self.history: list[Generation] = []

    def run(self) -> list[Generation]:
        """Run until all ranks of a generation end with code 0; return what became of each generation.

        RuntimeError, with the rank and how it ended, when ``most_failures`` generations in a row died or hung without a
        step that no generation had reached before, and at once for a rank that ends with WRONG_SETTINGS.
        """
        # TODO lab-03-failures: start all ranks, watch them, end all when one is lost or hangs, start anew.
        #   Hints, one at a time: phalanx learn hint lab-03-failures
        raise NotImplementedError("Supervisor")

    def world(self) -> int:
        """Return the number of ranks of the next generation; wait while there are fewer places than ``least``.

        Never more than ``most``. While a generation runs, a change of this number (to ``least`` or more) ends it: all
        ranks get SIGTERM, save and end; those that have not ended after ``grace`` seconds are killed. Its end is
        "scaled", which is not a failure.
        """
        # TODO lab-03-elastic: go on with as many ranks as there are places, when ranks are lost or come back.
        #   Hints, one at a time: phalanx learn hint lab-03-elastic
        raise NotImplementedError("Supervisor")


def main() -> None:
    """Train worker.py under the supervisor; the file ``slots`` in the folder says how many ranks can run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument(
        "--ranks", type=int, default=2, help="how many can run at first; write a number to FOLDER/slots"
    )
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    slots = options.folder / "slots"
    slots.write_text(str(options.ranks))
    worker = Path(__file__).with_name("worker.py")
    command = [sys.executable, str(worker), str(options.folder), str(options.steps)]
    supervisor = Supervisor(command, options.folder, lambda: int(slots.read_text() or 0))
    try:
        supervisor.run()
    finally:
        for number, generation in enumerate(supervisor.history):
            rank = "" if generation.rank is None else f" (rank {generation.rank})"
            print(f"generation {number}: {generation.world} ranks, {generation.end}{rank}")


if __name__ == "__main__":
    main()
