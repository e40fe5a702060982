"""How a rank ended, in words: from its exit code, its error record and its log; and which rank's end came first."""

from __future__ import annotations

import linecache
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.diagnosis.memory_breakdown import MemoryBreakdown
from phalanx.diagnosis.stacks import main_stack
from phalanx.errors import error_line
from phalanx.host.lost_peers import reports_lost_peer, reports_mismatch
from phalanx.host.versions import installed_packages, untested_torch
from phalanx.launch.failure import FailureReport
from phalanx.observe.call_ring import is_users

YIELD_SECONDS = 0.5
"""How long a rank that lost its connection waits for another rank's real cause to come in."""


@dataclass(frozen=True)
class RankExit:
    """The failure of one rank, with what is known of it."""

    rank: int
    code: int
    """As `subprocess` has it: the exit status, or minus the signal's number."""
    time: float
    record: dict[str, Any] | None
    """What the rank wrote about its exception."""
    log_tail: tuple[str, ...]
    """The last lines of its log."""
    killed_for: str = ""
    """Why this launcher killed it, if so."""

    @property
    def when(self) -> float:
        """When it went wrong: the moment of the exception where there was one, else of the exit."""
        return float(self.record["time"]) if self.record else self.time

    @property
    def lost_peer(self) -> bool:
        """Whether it reports only that another rank was lost."""
        return self._reports(reports_lost_peer)

    @property
    def is_about_collectives(self) -> bool:
        """Whether it reports that another rank was lost, or called another collective: the cause may be elsewhere."""
        return self.lost_peer or self.has_mismatch

    @property
    def has_mismatch(self) -> bool:
        """Whether it reports that the ranks called different collectives."""
        return self._reports(reports_mismatch)

    def _reports(self, matches: Callable[[str], bool]) -> bool:
        if self.record:
            return self.record.get("of_collectives", True) and matches(self.record["message"])
        # A thread of a library aborts the process without an exception of Python's.
        return self.code == -6 and any(matches(line) for line in self.log_tail)


def find_first_cause(exits: Sequence[RankExit]) -> RankExit:
    """Return the rank to blame: real causes before lost connections, then the earliest."""
    return min(exits, key=lambda rank_exit: (rank_exit.lost_peer, rank_exit.when, rank_exit.rank))


_TRACEBACK_LINES = 16
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in ')
_BEGINS = re.compile(r'  File "|(?:Original )?Traceback ')
_LOG_LINES = 8
_CRASHES = {
    signal.SIGSEGV: "crashed with a segmentation fault (SIGSEGV): native code touched memory it does not own",
    signal.SIGBUS: "crashed with a bus error (SIGBUS): often /dev/shm or a mapped file's disk is full",
    signal.SIGABRT: "aborted (SIGABRT): native code detected an error",
    signal.SIGILL: "crashed with an illegal instruction (SIGILL): a library was built for another processor",
    signal.SIGFPE: "crashed with an arithmetic error (SIGFPE)",
}


def explain(
    rank_exit: RankExit,
    *,
    label: str,
    host: str,
    step: int | None,
    killed_for_memory: bool,
    log: Path,
    bill: MemoryBreakdown | None = None,
) -> FailureReport:
    """Explain a rank's end from its exit code, its error record and its log; `bill`: of its memory, if any."""
    if rank_exit.record:
        cause, details, hint = _from_error(rank_exit)
        step = rank_exit.record["step"] if rank_exit.record["step"] is not None else step
    elif rank_exit.code < 0:
        cause, details, hint = _from_signal(rank_exit, killed_for_memory, bill)
    else:
        cause, details, hint = f"exited with code {rank_exit.code}", _log_end(rank_exit), ""
    is_crash = not rank_exit.record and -rank_exit.code in _CRASHES
    has_traceback = bool(rank_exit.record and rank_exit.record["traceback"])
    if is_crash or has_traceback:  # a PhalanxError has none, and says what is wrong
        hint = " ".join(filter(None, (hint, _untested_torch())))
    code = rank_exit.code if rank_exit.code > 0 else 128 - rank_exit.code
    if rank_exit.record:  # the launcher may have ended it before it had left, because of another rank
        code = rank_exit.record.get("exit_code") or code
    return FailureReport(
        cause=cause,
        exit_code=code,
        rank=rank_exit.rank,
        label=label,
        host=host,
        step=step,
        details=details,
        hint=hint,
        logs=str(log) if log.exists() and log.stat().st_size else "",
        was_killed=not rank_exit.record and not rank_exit.killed_for and rank_exit.code < 0 and not is_crash,
    )


def _untested_torch() -> str:
    """Return a sentence about a torch newer than the newest tested; empty for any other."""
    note = untested_torch(installed_packages().get("torch"))
    return f"{note[0].upper()}{note[1:]}." if note else ""  # `capitalize` would change the other letters


_PLUMBING = ("/torch/nn/modules/module.py", "/torch/nn/parallel/distributed.py")
"""Frames between those of a model, which explain nothing. The log has the whole traceback."""


def _without_plumbing(lines: list[str]) -> list[str]:
    """Leave out the frames with which torch calls a module's forward, unless nothing else would be left."""
    users: list[str] = []
    dropping = False
    for line in lines:
        if line.startswith('  File "'):
            dropping = line.split('"')[1].endswith(_PLUMBING)
        elif not line.startswith("    "):
            dropping = False
        if not dropping:
            users.append(line)
    return users if any(line.startswith("  File") for line in users) else lines


def _with_sources(lines: list[str]) -> list[str]:
    """Add the source lines that only this process has: those of notebook cells and of a prompt."""
    complete: list[str] = []
    for index, line in enumerate(lines):
        complete.append(line)
        frame = _FRAME.match(line)
        is_bare = index + 1 == len(lines) or not lines[index + 1].startswith("    ")
        if frame and is_bare and (source := linecache.getline(frame["file"], int(frame["line"])).strip()):
            complete.append(f"    {source}")
    return complete


def _shortened(lines: list[str]) -> list[str]:
    """Keep the end of a long traceback, from a frame's first line on, and say that its beginning is missing."""
    if len(lines) <= _TRACEBACK_LINES:
        return lines
    start = len(lines) - _TRACEBACK_LINES + 2
    start = next((index for index in range(start, len(lines)) if _BEGINS.match(lines[index])), start)
    head = [] if "Traceback" in lines[start] else [lines[0]]
    users = [number for number, line in enumerate(lines) if (frame := _FRAME.match(line)) and is_users(frame["file"])]
    if users and users[-1] < start:  # the user's own line says more than the library's
        head += lines[users[-1] : users[-1] + 2]
    return [*head, f"  ... {start - len(head)} lines are left out here: the log has them", *lines[start:]]


def _log_end(rank_exit: RankExit) -> tuple[str, ...]:
    """Return the last lines of a rank's log, with a mark where there are more."""
    tail = rank_exit.log_tail[-_LOG_LINES:]
    return ("...", *tail) if len(rank_exit.log_tail) > len(tail) else tail


def _from_error(rank_exit: RankExit) -> tuple[str, tuple[str, ...], str]:
    record = rank_exit.record
    assert record is not None
    lines: list[str] = record["traceback"]
    if not lines:
        # A PhalanxError: its message is complete without a traceback.
        return f"stopped: {record['message']}", (), record["hint"]
    text = error_line(record["type"], record["message"])
    return f"raised {text}", tuple(_shortened(_with_sources(_without_plumbing(lines)))), record["hint"]


def _from_signal(
    rank_exit: RankExit, killed_for_memory: bool, bill: MemoryBreakdown | None
) -> tuple[str, tuple[str, ...], str]:
    number = -rank_exit.code
    if rank_exit.killed_for:
        return rank_exit.killed_for, _log_end(rank_exit), ""
    if number == signal.SIGKILL:
        less = "Use less memory: a smaller batch_size, fewer ranks on this node, fewer data loader workers."
        if killed_for_memory:
            cause = "was killed by the kernel because memory ran out (SIGKILL)"
            return cause, () if bill is None else tuple(bill.lines()), less
        cause = "was killed by SIGKILL: another process sent it, or memory ran out where this process cannot see it"
        return cause, (), f"If it was memory: {less[0].lower()}{less[1:]}"
    try:
        crash = signal.Signals(number)
    except ValueError:
        return f"was killed by signal {number}", _log_end(rank_exit), ""
    if crash not in _CRASHES:
        return f"was killed by {crash.name}, which another process sent", _log_end(rank_exit), ""
    stack = main_stack("\n".join(rank_exit.log_tail))
    python_stack = ("Python stack, innermost first:", *(f"  {frame}" for frame in stack[:_LOG_LINES]))
    return _CRASHES[crash], python_stack if stack else _log_end(rank_exit), ""
