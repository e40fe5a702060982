"""Lab 03: a fault-tolerant training system: checkpoints of all ranks, a supervisor of processes, equal state.

``python system.py --folder runs/a --ranks 3`` trains worker.py under the supervisor; ``phalanx learn check lab-03``
grades it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
        rank, ranks = dist.get_rank(), dist.get_world_size()
        place = self.folder / f"step-{step:09d}"
        place.mkdir(exist_ok=True)
        content = _bytes({"shared": shared if rank == 0 else None, "own": own})
        _write(place / f"rank-{rank}-of-{ranks}.pt", content)
        digests: list[Any] = [None] * ranks
        dist.all_gather_object(digests, hashlib.sha256(content).hexdigest())  # all files are on the disk after this
        if rank == 0:
            files = [f"rank-{number}-of-{ranks}.pt {digest}" for number, digest in enumerate(digests)]
            _write(place / "whole", "\n".join(files).encode())
            self._remove_old()
        dist.barrier()  # no rank goes on, and reports the step, before the checkpoint counts

    def load(self) -> tuple[int, dict[str, Any], dict[int, Any]] | None:
        """Return step, shared state and the states of all parts of the newest whole checkpoint, or None.

        All ranks call it together and get the same, also where another number of ranks has saved. A checkpoint with a
        missing, cut or changed file is passed over.
        """
        found: list[Any] = [None]
        if dist.get_rank() == 0:  # one rank decides, so that all continue from the same step
            found[0] = next((whole for place in self._newest_first() if (whole := self._read(place))), None)
        dist.broadcast_object_list(found, src=0)
        if found[0] is None:
            return None
        step, contents = found[0]
        parts = [torch.load(io.BytesIO(content), weights_only=False) for content in contents]
        own = {number: state for part in parts for number, state in part["own"].items()}
        return step, parts[0]["shared"], own

    def _newest_first(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"), reverse=True)

    def _read(self, place: Path) -> tuple[int, list[bytes]] | None:
        """Return step and contents of a checkpoint of which every file has its digest, or None."""
        try:
            lines = [line.split() for line in (place / "whole").read_text().splitlines()]
            contents = [(place / name).read_bytes() for name, _ in lines]
        except (OSError, ValueError):
            return None
        good = all(
            hashlib.sha256(content).hexdigest() == digest for content, (_, digest) in zip(contents, lines, strict=True)
        )
        complete = bool(lines) and lines[0][0].endswith(f"-of-{len(lines)}.pt")
        return (int(place.name.removeprefix("step-")), contents) if good and complete else None

    def _remove_old(self) -> None:
        whole = [place for place in self._newest_first() if (place / "whole").exists()]
        for place in whole[self.keep :]:
            (place / "whole").unlink()  # first: from now on it does not count
            for file in place.iterdir():
                file.unlink()
            place.rmdir()


def _bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _write(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def disagreeing_ranks(state: dict[str, Tensor]) -> list[int]:
    """Return the ranks whose tensors are not those of most ranks, sorted; the same list on all ranks.

    Compares bits: names, types, shapes and values. Where no state is that of more than half of the ranks, all ranks are
    returned, as none can be trusted. Sends some bytes only, whatever the size of the state.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().contiguous().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    ranks = dist.get_world_size()
    digests: list[Any] = [None] * ranks
    dist.all_gather_object(digests, digest.hexdigest())
    most, count = Counter(digests).most_common(1)[0]
    if 2 * count <= ranks:
        return list(range(ranks))
    return [rank for rank, found in enumerate(digests) if found != most]


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
        reached, failures = -1, 0
        while True:
            ranks = self._start(self.world())
            try:
                generation, why = self._watch(ranks)
            finally:
                _end(ranks)
            step = max((int(text.split()[0]) for text in self._beats(len(ranks)) if text), default=-1)
            self.history.append(generation)
            if generation.end == "done":
                return self.history
            failures = 0 if generation.end == "scaled" else 1 if step > reached else failures + 1
            reached = max(reached, step)
            if failures >= self.most_failures or ranks[generation.rank or 0].returncode == WRONG_SETTINGS:
                raise RuntimeError(f"rank {generation.rank} {why} in step {step}; {failures} failures without progress")

    def world(self) -> int:
        """Return the number of ranks of the next generation; wait while there are fewer places than ``least``.

        Never more than ``most``. While a generation runs, a change of this number (to ``least`` or more) ends it: all
        ranks get SIGTERM, save and end; those that have not ended after ``grace`` seconds are killed. Its end is
        "scaled", which is not a failure.
        """
        while (places := self.slots()) < self.least:
            time.sleep(0.05)
        return min(places, self.most)

    def _start(self, world: int) -> list[subprocess.Popen[bytes]]:
        (self.folder / "beats").mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:  # a fresh port: the old one may still be held by what was killed
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": str(world), "GENERATION": str(len(self.history)), "MASTER_PORT": str(port)}
        common |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        return [subprocess.Popen(self.command, env=os.environ | common | {"RANK": str(rank)}) for rank in range(world)]

    def _watch(self, ranks: list[subprocess.Popen[bytes]]) -> tuple[Generation, str]:
        """Wait for the end of a generation, and say how it ended."""
        world, seen, since = len(ranks), [""] * len(ranks), [time.monotonic()] * len(ranks)
        while True:
            codes = [process.poll() for process in ranks]
            if all(code == 0 for code in codes):
                return Generation(world, "done"), ""
            if failed := [rank for rank, code in enumerate(codes) if code not in (None, 0)]:
                # errors of others are often the consequence of a rank that was killed
                first = min(failed, key=lambda rank: (codes[rank] > 0, rank))  # type: ignore[operator]
                return Generation(world, "died", first), f"ended with code {codes[first]}"
            now = time.monotonic()
            for rank, text in enumerate(self._beats(world)):
                if text != seen[rank]:
                    seen[rank], since[rank] = text, now
            for rank, text in enumerate(seen):
                limit = self.hung_after if text else self.start_after
                if now - since[rank] > limit and not text.endswith("wait") and codes[rank] is None:
                    return Generation(world, "hung", rank), f"made no progress for {limit:g} s"
            if self.least <= (places := self.slots()) and min(places, self.most) != world:
                return self._scale(ranks)
            time.sleep(0.02)

    def _scale(self, ranks: list[subprocess.Popen[bytes]]) -> tuple[Generation, str]:
        """Ask all ranks to save and end."""
        for process in ranks:
            process.send_signal(signal.SIGTERM)
        end = time.monotonic() + self.grace
        while time.monotonic() < end and any(process.poll() is None for process in ranks):
            time.sleep(0.02)
        finished = all(process.returncode == 0 for process in ranks)
        return Generation(len(ranks), "done" if finished else "scaled"), ""

    def _beats(self, world: int) -> list[str]:
        files = [self.folder / "beats" / f"{len(self.history)}-{rank}" for rank in range(world)]
        return [file.read_text() if file.exists() else "" for file in files]


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()  # not terminate(): a stopped process would not get it
    for process in ranks:
        process.wait()


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
