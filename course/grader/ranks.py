"""Start real ranks on a learner's file and collect what they did; a run never takes longer than its limit."""

from __future__ import annotations

import atexit
import io
import json
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grader.rank import marker as marker
from grader.wire import Call
from grader.zygote import Zygote, ZygoteLost

STILL_SECONDS = 4.0
"""A run in which all ranks wait and nothing has moved for this long is a deadlock."""
_POLL_SECONDS = 0.01
_MOST_OUTPUT_BYTES = 8192
_LATE_SECONDS = 0.5
"""After one rank has failed, the others have this long to fail or to end by themselves."""
_SECONDARY = re.compile(
    "connection (closed|reset)|broken pipe|timed out|socket closed|application timeout", re.IGNORECASE
)
_zygote: Zygote | None = None


@dataclass
class Answer:
    """What one rank did."""

    rank: int
    value: Any = None
    calls: list[Call] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int = 0
    code: int | None = None
    """The exit code of a rank that ended before its answer; minus the signal that ended it."""
    error: str = ""
    output: str = ""

    @property
    def sent(self) -> int:
        """The bytes that it sent to single ranks."""
        return sum(call.bytes for call in self.calls if call.is_send)

    @property
    def messages(self) -> int:
        """The number of messages that it sent to single ranks."""
        return sum(call.is_send for call in self.calls)


class RunFailed(Exception):
    """A run did not come to its end; the text says which rank stopped it, and where."""

    def __init__(self, text: str, line: int | None = None, *, unwritten: bool = False) -> None:
        super().__init__(text)
        self.line = line
        self.unwritten = unwritten


@dataclass(frozen=True)
class Order:
    """One run: a function of the grader on some ranks of one learner's file."""

    answer: Path
    function: Callable[..., Any]
    ranks: int
    """0: one process without a group."""
    args: tuple[Any, ...] = ()
    timeout: float = 60.0
    kill: Mapping[int, float | str] = field(default_factory=dict)
    expect_failure: bool = False
    forbidden: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment of the ranks has these from before the learner's file is loaded."""
    programs: bool = False
    """Whether the learner's file may start other programs."""


Watch = Callable[[list[dict[str, Any]]], None]


def run_ranks(order: Order, folder: Path, watch: Watch | None = None) -> list[Answer]:
    """Run, and return one answer per rank; raise RunFailed with the first cause."""
    try:
        return _run(start_zygote(), order, folder, watch)
    except ZygoteLost as lost:
        end_zygote()
        raise RunFailed(str(lost)) from None


def _run(zygote: Zygote, order: Order, folder: Path, watch: Watch | None) -> list[Answer]:
    place = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    began = time.monotonic()
    pids = zygote.start(_specs(order, place, began))
    try:
        reason = _follow(zygote, order, place, pids, began, watch)
        codes = zygote.ended()
        answers = [_answer(place, rank, codes.get(pid)) for rank, pid in enumerate(pids)]
        if reason:
            raise RunFailed(f"{reason}: {_where_all(order, place, pids)}")
    finally:
        zygote.end_all()
    _raise_first(order, place, answers)
    return answers


def start_zygote() -> Zygote:
    """Return the process that starts ranks; the first call takes the seconds of loading torch."""
    global _zygote
    if _zygote is None:
        _zygote = Zygote()
        atexit.register(end_zygote)
    return _zygote


def end_zygote() -> None:
    """End the process that starts ranks; the next run starts it anew."""
    global _zygote
    if _zygote is not None:
        zygote, _zygote = _zygote, None
        zygote.close()


def _specs(order: Order, place: Path, began: float) -> list[dict[str, Any]]:
    common = {
        "folder": str(place),
        "answer": str(order.answer),
        "world": order.ranks,
        "function": pickle.dumps((order.function, order.args)),
        "timeout": order.timeout,
        "forbidden": order.forbidden,
        "variables": dict(order.variables),
        "programs": order.programs,
        "paths": sys.path,
        "began": began,
    }
    return [{**common, "rank": rank, "kill": order.kill.get(rank)} for rank in range(max(1, order.ranks))]


def _follow(zygote: Zygote, order: Order, place: Path, pids: list[int], began: float, watch: Watch | None) -> str:
    """Wait until every rank has its answer or has ended; return why it waited in vain, or nothing."""
    moved, seen, failed_at = began, None, None
    while True:
        codes = zygote.ended()
        states = [_state(place, rank) for rank in range(len(pids))]
        if watch is not None:
            watch(states)
        left = [
            rank for rank, pid in enumerate(pids) if pid not in codes and not (place / f"rank-{rank}.answer").exists()
        ]
        if not left:
            return ""
        now = time.monotonic()
        changes = [state.get("changes") for state in states]
        if changes != seen:
            moved, seen = now, changes
        lost = len(codes) > 0 or any(state.get("doing") == "has failed" for state in states)
        failed_at = failed_at or (now if lost else None)
        if failed_at is not None and not order.expect_failure and now - failed_at > _LATE_SECONDS:
            return ""  # the others wait for the lost one: its error is the cause
        if now - began > order.timeout:
            return f"not finished after {order.timeout:.0f} s"
        all_wait = all(states[rank].get("doing") == "waits" for rank in left)
        alone = len(left) < len(pids)  # the others have their answers, or have ended
        if all_wait and not (alone and order.expect_failure) and now - moved > STILL_SECONDS:
            who = "all ranks that are left" if alone else "all ranks"
            return f"deadlock: {who} wait and nothing has moved for {STILL_SECONDS:.0f} s"
        time.sleep(_POLL_SECONDS)


def _state(place: Path, rank: int) -> dict[str, Any]:
    try:
        return json.loads((place / f"rank-{rank}.state").read_bytes())  # type: ignore[no-any-return]
    except (OSError, ValueError):  # not begun, or read while it is written: the next look finds it
        return {}


def _answer(place: Path, rank: int, code: int | None) -> Answer:
    file = place / f"rank-{rank}.answer"
    try:
        found = _PlainValues(io.BytesIO(file.read_bytes())).load() if file.exists() else {}
    except Exception as error:  # classes of the learner's file are not known here
        raise RunFailed(f"rank {rank}: the result holds your own objects, give plain values: {error}") from error
    answer = Answer(rank, code=code, output=_tail(place / f"rank-{rank}.out"))
    if "value" in found:
        answer.value, answer.calls = found["value"], found["calls"]
        answer.seconds, answer.peak_bytes = found["seconds"], found["peak_bytes"]
    elif "error" in found:
        answer.error, answer.calls = f"{found['error']['kind']}: {found['error']['text']}", found["error"]["calls"]
        (place / f"rank-{rank}.failure").write_bytes(pickle.dumps(found["error"]))
    return answer


class _PlainValues(pickle.Unpickler):
    """Reads what a rank left; it makes tensors, containers and the grader's own records, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function that a value is made with."""
        known = module.partition(".")[0] in ("torch", "numpy", "collections", "grader", "pathlib")
        if known or (module == "builtins" and name in ("set", "frozenset", "complex", "bytearray", "range", "slice")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _tail(log: Path) -> str:
    """Return the end of what a rank printed."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _MOST_OUTPUT_BYTES))
        return file.read().decode(errors="replace")


def _raise_first(order: Order, place: Path, answers: list[Answer]) -> None:
    """Raise for the rank that failed first; an error of a rank whose peer had ended is not the cause."""
    failures, ended = [], []
    for answer in answers:
        file = place / f"rank-{answer.rank}.failure"
        if file.exists():
            error = _PlainValues(io.BytesIO(file.read_bytes())).load()
            failures.append((bool(_SECONDARY.search(error["text"])), error["at"], answer.rank, error))
        elif answer.code is not None and not order.expect_failure:
            ended.append(f"rank {answer.rank} ended ({_exit_name(answer.code)}) before it had an answer")
    if order.expect_failure:  # failures of what was written; not that it is missing, or refused
        failures = [one for one in failures if one[3]["kind"] == "NotImplementedError" or one[3]["refused"]]
    if ended and all(secondary for secondary, *_ in failures):
        raise RunFailed(ended[0])
    if failures:
        _, _, rank, error = min(failures, key=lambda failure: failure[:3])
        raise _described(order, rank, error)


def _exit_name(code: int) -> str:
    known = {number.value: number.name for number in signal.Signals}
    return known.get(-code, f"signal {-code}") if code < 0 else f"exit code {code}"


def _described(order: Order, rank: int, error: dict[str, Any]) -> RunFailed:
    name, line = order.answer.name, error["line"]
    place = f"{name}:{line}" if line else name
    if error["kind"] == "NotImplementedError":
        return RunFailed(f"{error['text'] or error['where']} is not written yet ({place})", line, unwritten=True)
    if error["refused"]:
        used = re.sub(r"^line \d+ ", "it ", error["text"])
        return RunFailed(f"{place} is refused: {used}", line)
    if error["kind"] in ("SyntaxError", "IndentationError"):
        return RunFailed(f"{place} is not Python: {error['text']}", line)
    who = f"rank {rank}" if order.ranks else "your code"
    if line is None:
        lines = [line for line in error["trace"].strip().splitlines() if line.strip(" ^~")]
        last = lines[-2:-1]
        return RunFailed(
            f"{who}: what your code returned, or left behind, cannot be used: {error['kind']}: {error['text']} "
            f"(seen by the grader in: {' '.join(part.strip() for part in last)})"
        )
    return RunFailed(f"{who}: {error['kind']} in {error['where']} ({place}): {error['text']}", line)


def _where_all(order: Order, place: Path, pids: list[int]) -> str:
    parts = []
    for rank, pid in enumerate(pids):
        state = _state(place, rank)
        if (place / f"rank-{rank}.answer").exists():
            parts.append(f"rank {rank} {state.get('doing', 'has ended')}")
        elif state.get("doing") == "waits":
            peer = "" if state.get("peer") is None else f" {_preposition(state['kind'])} rank {state['peer']}"
            parts.append(f"rank {rank} waits in {state['kind']}{peer} ({order.answer.name}:{state['line']})")
        else:
            who = f"rank {rank}" if order.ranks else "your code"
            parts.append(f"{who} is at {_line_now(order, place, rank, pid)}")
    return "; ".join(parts)


def _preposition(kind: str) -> str:
    return "from" if "recv" in kind else "to"


def _line_now(order: Order, place: Path, rank: int, pid: int) -> str:
    """Ask a rank that does not wait in a call for its stack, and return the line of the learner's file."""
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return "its end"
    time.sleep(0.1)
    file = place / f"rank-{rank}.stack"
    stack = file.read_text() if file.exists() else ""
    found = re.search(rf'File "{re.escape(str(order.answer))}", line (\d+) in (\S+)', stack)
    return f"{order.answer.name}:{found[1]} in {found[2]}" if found else "a place outside your file"
