"""A rank without torch for the graders of lab 03: it starts in milliseconds, beats, waits for its peers, and fails as
ordered.

``python fake_rank.py FOLDER``; FOLDER/plan.json has the number of steps, the faults and the changes of places.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

STEP_SECONDS = 0.01
_LIMIT_SECONDS = 40.0
"""It ends by itself: nothing stays behind."""
_NOTICE_SECONDS = 0.3
"""How long after a peer was lost a rank ends with an error: the supervisor has seen the first one by then."""
SAVED_AND_ENDED = 75


class FakeRank:
    """One rank: its place in the group, and what it writes for the grader."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.parent = folder, os.getppid()
        self.rank, self.world, self.generation = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "GENERATION")
        )
        self.plan: dict[str, Any] = json.loads((folder / "plan.json").read_text())
        self.end_at = time.monotonic() + _LIMIT_SECONDS
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = not self.plan.get("deaf", False)

    def write(self, path: str, text: str) -> None:
        """Write a file that is there whole or not at all."""
        unfinished = self.folder / f"{path}.{self.rank}.unfinished"
        unfinished.write_text(text)
        unfinished.replace(self.folder / path)

    def begin(self) -> int:
        """Leave the process id, look for living ranks of older generations, and return the first step."""
        self.write(f"pids/{self.generation}-{self.rank}", str(os.getpid()))
        for file in (self.folder / "pids").iterdir():
            if file.suffix:
                continue  # one that is being written
            generation, rank = file.name.split("-")
            if int(generation) < self.generation and alive(int(file.read_text())):
                text = (
                    f"generation {self.generation} was started while rank {rank} of generation {generation} was alive"
                )
                self.write("overlap", text)
        with suppress(FileNotFoundError):
            return int((self.folder / "saved").read_text())
        return 0

    def beat(self, step: int, doing: str) -> None:
        """Say what this rank does."""
        self.write(f"beats/{self.generation}-{self.rank}", f"{step} {doing}")

    def peer(self, rank: int) -> tuple[int, str]:
        """Return step and work of another rank."""
        with suppress(FileNotFoundError):
            step, doing = (self.folder / "beats" / f"{self.generation}-{rank}").read_text().split()
            return int(step), doing
        return -1, ""

    def meet(self, step: int) -> None:
        """Wait until all ranks have come to this step, as in a collective; end when one is lost."""
        self.beat(step, "wait")
        for rank in range(self.world):
            while self.peer(rank) < (step, "wait"):  # ("compute" < "wait")
                if time.monotonic() > self.end_at or os.getppid() != self.parent:
                    os._exit(9)
                pid = self.folder / "pids" / f"{self.generation}-{rank}"
                if pid.exists() and not alive(int(pid.read_text())):
                    time.sleep(_NOTICE_SECONDS)
                    os._exit(1)
                time.sleep(0.002)

    def fault(self, step: int, early: bool) -> None:
        """Do what is ordered for this generation, rank and step, before or after its first beat."""
        for one in self.plan.get("faults", []):
            ordered = one["generation"], one["rank"], one["step"], one.get("early", False)
            if ordered == (self.generation, self.rank, step, early):
                if "slots" in one:
                    self.write("slots", str(one["slots"]))
                if "seconds" in one:
                    time.sleep(one["seconds"])
                if "code" in one:
                    os._exit(one["code"])
                if "signal" in one:
                    os.kill(os.getpid(), one["signal"])

    def run(self) -> NoReturn:
        """Make the steps."""
        first, steps = self.begin(), self.plan["steps"]
        for step in range(first, steps):
            self.fault(step, early=True)
            self.beat(step, "compute")
            self.write(f"steps/{self.generation}-{self.rank}", f"{first} {step}")
            self.fault(step, early=False)
            time.sleep(STEP_SECONDS)
            self.meet(step)
            stop = self.folder / f"stop-{self.generation}"
            if self.asked and self.rank == 0 and not stop.exists():
                self.write(stop.name, str(step + 2))  # in the next step, when all ranks are sure to read it
            ends = stop.exists() and step + 1 >= int(stop.read_text())
            if self.rank == 0 and ((step + 1) % 2 == 0 or ends):
                self.write("saved", str(step + 1))
            if ends and step + 1 < steps:
                os._exit(SAVED_AND_ENDED)
        os._exit(0)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    if not Path("/proc/self/stat").exists():  # not Linux: a process that was not waited for counts as alive
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


if __name__ == "__main__":
    FakeRank(Path(sys.argv[1])).run()
