"""Control of a tuning trial from outside: it continues or stops at agreed points.

Progress is counted in iterations: epochs of Phalanx's loop, or what a script reports. The controller reads the run's
events and writes its answer into one small file.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from phalanx.host.files import replace_file

CONTROL = "PHALANX_TRIAL_CONTROL"
"""The environment variable that describes the control file to a run."""

_POLL_SECONDS = 0.02


class TrialControl:
    """The control file, as the run and the controller use it."""

    def __init__(self, file: str | Path, at: Sequence[int] | None = None, first: int = 1, every: int = 1) -> None:
        """`at`: the iterations at which the run waits for an answer; None: at every `every`-th one from `first` on."""
        self.file = Path(file)
        self._at = None if at is None else tuple(at)
        self._first = first
        self._every = every
        self.iteration = 0
        """The last iteration that was checked: what lies before is decided."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> TrialControl | None:
        """Return the control that the process which started this run has set up, if any."""
        text = (os.environ if environ is None else environ).get(CONTROL)
        return None if not text else cls(**json.loads(text))

    def to_text(self) -> str:
        """Return the value of the environment variable for a run."""
        return json.dumps({"file": str(self.file), "at": self._at, "first": self._first, "every": self._every})

    def start_after(self, iteration: int) -> None:
        """Set that the run begins after this iteration: what lies before is decided."""
        self.iteration = iteration

    def is_due(self, iteration: int) -> bool:
        """Whether the run waits now: a point lies between the last iteration that was checked and this one."""
        before, self.iteration = self.iteration, iteration
        if self._at is None:
            return iteration >= self._first and iteration // self._every > before // self._every
        return any(before < point <= iteration for point in self._at)

    def wait(self, iteration: int, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the answer: whether the run continues. `given_up`: whether something else ends the run anyway."""
        while not given_up():
            answer: dict[str, int] = {}
            with contextlib.suppress(FileNotFoundError):
                answer = json.loads(self.file.read_text(encoding="utf-8"))
            if "stop" in answer:
                return iteration < answer["stop"]
            if answer.get("through", 0) >= iteration:
                return True
            time.sleep(_POLL_SECONDS)
        return True

    def let_through(self, iteration: int) -> None:
        """Let the run pass this iteration."""
        replace_file(self.file, json.dumps({"through": iteration}))

    def stop_at(self, iteration: int) -> None:
        """Let the run end after this iteration, and pass those before it."""
        replace_file(self.file, json.dumps({"stop": iteration}))
