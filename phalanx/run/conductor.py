"""`recorded_run`: a run from its record to its end, for commands, trainers and ranks that start one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config import DistributedConfig
from phalanx.errors import PreemptedError
from phalanx.host.files import replace_file
from phalanx.launch.error_file import record_path
from phalanx.run.record import RunRecord, claim_run_dir, discard, end_record, is_unused

if TYPE_CHECKING:
    from phalanx.launch import LaunchSpec

Advise = Callable[[BaseException, bool], None]
"""Adds to an error what its reader can do next; the second argument says whether the run's folder is kept."""


@dataclass
class RecordedRun:
    """A run whose record is begun, for the block that takes its steps."""

    folder: Path
    config: DistributedConfig
    of_script: bool = False
    """Whether the program of a user runs, which may write files into the folder without taking a step."""
    outcome: str = "finished"
    """How a run ended whose block raised nothing: one that a signal stopped may have a result, too."""
    was_started: bool = False

    def on_ranks(self, spec: LaunchSpec, *, waiting: str = "") -> None:
        """Start the ranks, and return when all have ended; `waiting`: what the console shows until they report."""
        from phalanx.run.start import run_on_ranks  # the parent's side: a rank does not load it

        self.was_started = True
        run_on_ranks(spec, self.config, waiting=waiting)

    def is_discarded(self, error: BaseException | None) -> bool:
        """Whether the folder goes at the end: of a fast_dev_run, or of a run that failed before its first step."""
        if error is None:
            return bool(self.config.fast_dev_run) and is_unused(self.config, self.folder)
        if (self.of_script and self.was_started) or not isinstance(error, (Exception, KeyboardInterrupt)):
            return False
        return is_unused(self.config, self.folder, error)


@contextmanager
def recorded_run(
    folder: Path,
    config: DistributedConfig,
    record: RunRecord,
    *,
    of_script: bool = False,
    in_place: bool = False,
    advise: Advise | None = None,
    prepare: Callable[[], None] | None = None,
) -> Iterator[RecordedRun]:
    """Record the run of the block in its folder: how it began and ended. A run that left nothing leaves no folder.

    One process has the folder until the run ends; of several nodes, the first one, which writes the record. `in_place`:
    this process takes the steps, so that no launcher writes why they failed. `prepare`: called with the folder claimed,
    before the record is written.
    """
    with nullcontext() if config.node_rank else claim_run_dir(folder):
        run = RecordedRun(folder, config, of_script)
        if not config.node_rank:
            if prepare is not None:
                prepare()
            record.begin(folder, resumes=bool(config.resume_from_checkpoint))
        with _ended(run, in_place=in_place, advise=advise):
            yield run


@contextmanager
def _ended(run: RecordedRun, *, in_place: bool, advise: Advise | None) -> Iterator[None]:
    """Record how the block ended."""
    folder = run.folder
    try:
        yield
    except BaseException as error:
        is_discarded = run.is_discarded(error)
        if advise is not None:
            advise(error, not is_discarded)
        _end(run, outcome_of(error), error, is_discarded=is_discarded)
        if in_place and isinstance(error, Exception) and folder.is_dir():
            _write_failure(folder, error)
        raise
    _end(run, run.outcome, None, is_discarded=run.is_discarded(None))


def outcome_of(error: BaseException) -> str:
    """Return how a run ended that raised."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "preempted" if isinstance(error, PreemptedError) else "failed"


def _end(run: RecordedRun, outcome: str, error: BaseException | None, *, is_discarded: bool) -> None:
    if is_discarded:
        discard(run.folder, error)
    elif not run.config.node_rank:
        cause = str(error).partition("\n")[0] if outcome == "failed" else ""
        end_record(run.folder, outcome, cause)


def _write_failure(folder: Path, error: Exception) -> None:
    """Write why a run failed, as the launcher of ranks does."""
    (folder / "logs").mkdir(exist_ok=True)
    record: dict[str, Any] = {"rank": 0, "time": time.time(), "type": type(error).__qualname__, "message": str(error)}
    replace_file(record_path(folder / "logs", 0), json.dumps(record) + "\n")
