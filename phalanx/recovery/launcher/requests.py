"""Requests for another number of ranks: small files in the run's log folder, answered by its launcher."""

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


class ScaleRequests:
    """The requests in a log folder, for its launcher."""

    def __init__(self, log_dir: Path, notice: Callable[[str], None]) -> None:
        self._log_dir, self._notice = log_dir, notice
        self._problem = ""
        self._seen: float | None = None

    def attempt(self, work: Callable[[], None]) -> None:
        """Do something about a request; what goes wrong with the files is reported and ends nothing."""
        try:
            work()
        except OSError as error:  # a full disk, no permission: the run goes on
            problem = f"a request for another number of ranks cannot be read or answered: {error}"
            if problem != self._problem:
                self._notice(problem)
            self._problem = problem

    def take(self, after: float = 0.0) -> int | None:
        """Return the number of ranks that is asked for, and remove the request; None without one.

        `after`: only if it has been there for this many seconds.
        """
        request = self._log_dir / _REQUEST
        try:
            text = request.read_text()
        except FileNotFoundError:
            self._seen = None
            return None
        self._seen = self._seen or time.monotonic()
        if time.monotonic() - self._seen < after:
            return None
        request.unlink(missing_ok=True)
        self._seen = None
        try:
            return int(json.loads(text)["ranks"])
        except (ValueError, KeyError, TypeError):  # not written by `request_ranks`
            return 0

    def answer(self, refused: str | None) -> None:
        """Write why a request is not carried out; None: it is."""
        replace_file(self._log_dir / _ANSWER, json.dumps({"refused": refused}))
