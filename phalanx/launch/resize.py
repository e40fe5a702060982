"""Requests to change the number of ranks of a run that is in progress, as small files in its log folder.

`request_ranks` is for another process (`phalanx runs scale`); the launcher has `Requests`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.host.files import replace_file

_REQUEST, _ANSWER = "ranks.request", "ranks.answer"
_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 20.0


def request_ranks(log_dir: Path, ranks: int) -> None:
    """Ask the launcher of a run for another number of ranks; UsageError where it refuses, or does not answer."""
    answer = log_dir / _ANSWER
    answer.unlink(missing_ok=True)
    replace_file(log_dir / _REQUEST, json.dumps({"ranks": ranks}))
    deadline = time.monotonic() + _ANSWER_SECONDS
    try:
        while not answer.exists():
            if time.monotonic() > deadline:
                raise UsageError(
                    f"the launcher of {log_dir.parent} did not answer within {_ANSWER_SECONDS:g} s.",
                    hint="Only a run that was started elastic can be resized: --num-workers 2:8, or --max-restarts N.",
                )
            time.sleep(_POLL_SECONDS)
    finally:
        (log_dir / _REQUEST).unlink(missing_ok=True)  # also after Ctrl-C: it must not be carried out later
    refused = json.loads(answer.read_text())["refused"]
    answer.unlink(missing_ok=True)
    if refused:
        raise UsageError(refused)


class Requests:
    """The requests in a log folder, for the launcher; what goes wrong with one is reported and ends nothing."""

    def __init__(self, log_dir: Path, notice: Callable[[str], None]) -> None:
        self._log_dir, self._notice = log_dir, notice
        self._problem = ""

    def answer(self, resize: Callable[[int, str], str | None]) -> None:
        """Carry out a request, if there is one."""
        try:
            self._answer(resize)
        except OSError as error:  # a full disk, no permission: the run goes on
            problem = f"a request for another number of ranks cannot be read or answered: {error}"
            if problem != self._problem:
                self._notice(problem)
            self._problem = problem

    def _answer(self, resize: Callable[[int, str], str | None]) -> None:
        request = self._log_dir / _REQUEST
        try:
            wanted = json.loads(request.read_text())["ranks"]
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError):  # not written by `request_ranks`
            wanted = 0
        request.unlink(missing_ok=True)
        refused = resize(wanted, f"a request for {wanted} rank{'s' * (wanted != 1)}")
        replace_file(self._log_dir / _ANSWER, json.dumps({"refused": refused}))
