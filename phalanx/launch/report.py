"""The report that the user reads when a rank has failed, the cause first."""

from __future__ import annotations

import linecache
import re
import signal
from typing import TYPE_CHECKING

from phalanx.launch.failure import Failure
from phalanx.launch.stacks import main_stack

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.launch.blame import RankExit

_TRACEBACK_LINES = 16
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in ')
_BEGINS = re.compile(r'  File "|(?:Original )?Traceback ')
_LOG_LINES = 8
_CRASHES = {
    signal.SIGSEGV: "crashed with a segmentation fault (SIGSEGV): native code touched memory it does not own",
    signal.SIGBUS: "crashed with a bus error (SIGBUS): often /dev/shm or a mapped file's disk is full",
    signal.SIGABRT: "aborted (SIGABRT): native code gave up",
    signal.SIGILL: "crashed with an illegal instruction (SIGILL): a library was built for another processor",
    signal.SIGFPE: "crashed with an arithmetic error (SIGFPE)",
}


def render(failure: Failure) -> str:
    """Return the report: rank, host, step and cause; then the evidence; then hint and logs."""
    lines = [_headline(failure)]
    lines += [f"  {line}" for line in failure.details]
    if failure.hint:
        lines.append(f"  {failure.hint}")
    if failure.others_stopped:
        ranks = "1 other rank" if failure.others_stopped == 1 else f"{failure.others_stopped} other ranks"
        lines.append(f"{ranks} stopped because of it.")
    if failure.logs:
        lines.append(f"Logs: {failure.logs}")
    return "\n".join(lines)


def _headline(failure: Failure) -> str:
    if failure.rank is None:
        return failure.cause
    label = "" if failure.label in ("", f"r{failure.rank}") else f" [{failure.label}]"
    host = f" on {failure.host}" if failure.host else ""
    step = "" if failure.step is None else f" at step {failure.step}"
    return f"rank {failure.rank}{label}{host}{step} {failure.cause}"


def explain(ended: RankExit, *, label: str, host: str, step: int | None, killed_for_memory: bool, log: Path) -> Failure:
    """Explain a rank's end from its exit code, its error record and its log."""
    if ended.record:
        cause, details, hint = _raised(ended)
        step = ended.record["step"] if ended.record["step"] is not None else step
    elif ended.code < 0:
        cause, details, hint = _killed(ended, killed_for_memory)
    else:
        cause, details, hint = f"exited with code {ended.code}", _log_end(ended), ""
    return Failure(
        cause=cause,
        exit_code=ended.code if ended.code > 0 else 128 - ended.code,
        rank=ended.rank,
        label=label,
        host=host,
        step=step,
        details=details,
        hint=hint,
        logs=str(log),
    )


_PLUMBING = ("/torch/nn/modules/module.py", "/torch/nn/parallel/distributed.py")
"""Frames between those of a model, which explain nothing. The log has the whole traceback."""


def _without_plumbing(lines: list[str]) -> list[str]:
    """Leave out the frames with which torch calls a module's forward, unless nothing else would be left."""
    kept: list[str] = []
    dropping = False
    for line in lines:
        if line.startswith('  File "'):
            dropping = line.split('"')[1].endswith(_PLUMBING)
        elif not line.startswith("    "):
            dropping = False
        if not dropping:
            kept.append(line)
    return kept if any(line.startswith("  File") for line in kept) else lines


def _with_sources(lines: list[str]) -> list[str]:
    """Add the source lines that only this process has: those of notebook cells and of a prompt."""
    complete: list[str] = []
    for place, line in enumerate(lines):
        complete.append(line)
        frame = _FRAME.match(line)
        is_bare = place + 1 == len(lines) or not lines[place + 1].startswith("    ")
        if frame and is_bare and (source := linecache.getline(frame["file"], int(frame["line"])).strip()):
            complete.append(f"    {source}")
    return complete


def _shortened(lines: list[str]) -> list[str]:
    """Keep the end of a long traceback, from a frame's first line on, and say that its beginning is missing."""
    if len(lines) <= _TRACEBACK_LINES:
        return lines
    start = len(lines) - _TRACEBACK_LINES + 2
    start = next((place for place in range(start, len(lines)) if _BEGINS.match(lines[place])), start)
    head = [] if "Traceback" in lines[start] else [lines[0]]
    return [*head, f"  ... {start - len(head)} lines are left out here: the log has them", *lines[start:]]


def _log_end(ended: RankExit) -> tuple[str, ...]:
    """Return the last lines of a rank's log, with a mark where there are more."""
    tail = ended.log_tail[-_LOG_LINES:]
    return ("...", *tail) if len(ended.log_tail) > len(tail) else tail


def _raised(ended: RankExit) -> tuple[str, tuple[str, ...], str]:
    record = ended.record
    assert record is not None
    lines: list[str] = record["traceback"]
    if not lines:
        # A PhalanxError: its message is complete without a traceback.
        return f"stopped: {record['message']}", (), record["hint"]
    message = record["message"].splitlines()
    said = f": {message[0]}" if message else ""
    return f"raised {record['type']}{said}", tuple(_shortened(_with_sources(_without_plumbing(lines)))), record["hint"]


def _killed(ended: RankExit, killed_for_memory: bool) -> tuple[str, tuple[str, ...], str]:
    number = -ended.code
    if number == signal.SIGKILL:
        return _killed_outright(killed_for_memory)
    try:
        known = signal.Signals(number)
    except ValueError:
        return f"was killed by signal {number}", _log_end(ended), ""
    if known not in _CRASHES:
        return f"was killed by {known.name}, which another process sent", _log_end(ended), ""
    stack = main_stack("\n".join(ended.log_tail))
    python_stack = ("Python stack, innermost first:", *(f"  {frame}" for frame in stack[:_LOG_LINES]))
    return _CRASHES[known], python_stack if stack else _log_end(ended), ""


def _killed_outright(killed_for_memory: bool) -> tuple[str, tuple[str, ...], str]:
    less = "Use less memory: a smaller batch_size, fewer ranks on this node, fewer data loader workers."
    if killed_for_memory:
        return "was killed by the kernel because memory ran out (SIGKILL)", (), less
    return (
        "was killed by SIGKILL: another process sent it, or memory ran out where this process cannot see the counter",
        (),
        f"If it was memory: {less[0].lower()}{less[1:]}",
    )
