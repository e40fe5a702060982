"""Control of a run from outside: continue or stop at agreed points (tuning trials), and a stop request.

Progress is counted in iterations: epochs of our loop, or what a script reports. The controller reads the run's events
and writes its answer into one small file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.host.files import replace_file

CONTROL = "PHALANX_GATE"
"""The environment variable that describes the gate to a run."""

_LOOK_SECONDS = 0.02


class TrialControl:
    """The run's side, and the watcher's: both know the file."""

    def __init__(self, file: str | Path, at: Sequence[int] | None = None, first: int = 1, every: int = 1) -> None:
        """`at`: the iterations at which the run asks; None: at every `every`-th one from `first` on."""
        self.file = Path(file)
        self._at = None if at is None else tuple(at)
        self._first = first
        self._every = every
        self._asked = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> TrialControl | None:
        """Return the gate that whoever started this run has set up, if any."""
        text = (os.environ if environ is None else environ).get(CONTROL)
        return None if not text else cls(**json.loads(text))

    def to_text(self) -> str:
        """Write the gate for the environment of a run."""
        return json.dumps({"file": str(self.file), "at": self._at, "first": self._first, "every": self._every})

    def start_after(self, iteration: int) -> None:
        """Take note that the run begins after this iteration: what lies before is decided."""
        self._asked = iteration

    def is_due(self, iteration: int) -> bool:
        """Whether the run asks now: a point lies between the last iteration that was looked at and this one."""
        before, self._asked = self._asked, iteration
        if self._at is None:
            return iteration >= self._first and iteration // self._every > before // self._every
        return any(before < point <= iteration for point in self._at)

    def wait(self, iteration: int, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the word, and return whether the run goes on; `given_up`: something else ends the run anyway."""
        while not given_up():
            word = self._read()
            if "stop" in word:
                return bool(iteration < word["stop"])
            if word.get("through", 0) >= iteration:
                return True
            time.sleep(_LOOK_SECONDS)
        return True

    def let_through(self, iteration: int) -> None:
        """Tell the run that it may pass this iteration."""
        self._write({"through": iteration})

    def stop_at(self, iteration: int) -> None:
        """Tell the run to end after this iteration, and to pass those before it."""
        self._write({"stop": iteration})

    def _read(self) -> dict[str, Any]:
        try:
            word: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return word

    def _write(self, word: dict[str, int]) -> None:
        replace_file(self.file, json.dumps(word))


_reason: str | None = None


def wish(reason: str) -> None:
    """Ask this process's rank to stop; `reason` is what it says of it, such as SIGTERM."""
    global _reason
    _reason = reason


def take() -> str | None:
    """Return why this rank is to stop, or None."""
    return _reason
