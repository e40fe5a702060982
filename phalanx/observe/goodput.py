"""Goodput: which part of a run's wall time was productive, and what the rest was spent on.

The main rank keeps a `Ledger` of its attempt and reports it as `Goodput` events. `account` adds up the attempts of a
run from its events; what happened between attempts, and to steps that were done again, follows from their times and
step numbers.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.host.processes import process_began
from phalanx.observe.events import Goodput
from phalanx.observe.heartbeat import previous_beat
from phalanx.observe.step_clock import StepClock

CATEGORIES = {
    "productive": "productive",
    "import": "start-up: import",
    "startup": "start-up: model and data",
    "first_steps": "start-up: first step",
    "compile": "compilation",
    "data_wait": "data wait",
    "communication": "exposed communication",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint stall",
    "lost": "lost and redone",
    "recovery": "recovery",
    "abort": "recovery: abort of collectives",
    "group": "recovery: new process groups",
    "idle": "idle",
}
"""What a second of wall time may be spent on, and how reports call it."""

EVENTS = "events.jsonl"
"""The file of a run's events, in its folder."""

LAUNCHED_AT = "PHALANX_LAUNCHED_AT"
"""The environment variable in which the launcher says when its command began, in seconds since the epoch."""

_REPORT_SECONDS = 10.0
"""The longest time between two reports, beyond one step: what an attempt that is killed leaves unreported."""
_LONG_PAUSE = 1.0
_PAUSES = {"evaluate": "evaluation"}
"""Categories of the pauses that have another name."""
_process_is_counted = False


class Ledger:
    """The seconds of one attempt on this rank, by category; they add up to its wall time."""

    def __init__(self, clock: StepClock, *, attempt: int = 0, launched: bool = False) -> None:
        """`clock`: that of the attempt's steps; `launched`: this process was started to train."""
        global _process_is_counted
        self._attempt = attempt
        self._clock = clock
        self._offset = time.time() - clock.now  # durations do not jump when the time of day is set
        self._before: defaultdict[str, float] = defaultdict(float)
        self.began = self._now()
        if launched and not _process_is_counted:
            self._count_start()
        _process_is_counted = True  # a second fit in this process begins here
        self._loop_began = self._now()
        self._report_at = self._reported_pauses = 0.0
        beat = previous_beat() if attempt else None
        self._before_beat = None if beat is None else [beat.step, beat.time]

    def _now(self) -> float:
        return self._offset + self._clock.now

    def _count_start(self) -> None:
        """Begin with the command that started the ranks; a later attempt begins with this process."""
        began = process_began()
        commanded = float(os.environ.get(LAUNCHED_AT) or began)
        if self._attempt == 0 and commanded < began:
            self._before["import"] = began - commanded
            began = commanded
        self.began = min(began, self.began)

    def begin(self) -> None:
        """Training begins: the time before was start-up, or recovery where an earlier attempt failed."""
        self._loop_began = self._now()
        self._before["startup"] = self._loop_began - self.began - self._before["import"]
        if self._attempt > 0:
            recovery = self._loop_began - self.began
            self._before.clear()
            self._before["recovery"] = recovery

    @property
    def is_due(self) -> bool:
        """Whether it is time for a report: some seconds after the last one, or after long pauses."""
        paused = self._clock.paused_seconds - self._reported_pauses
        return paused >= _LONG_PAUSE or self._clock.now >= self._report_at

    def seconds(self) -> dict[str, float]:
        """Return the time so far by category; the loop's time that nothing else explains was productive."""
        clock, now = self._clock, self._clock.read()
        spent = {_PAUSES.get(name, name): seconds for name, seconds in clock.pauses.items()}
        spent["data_wait"] = now.data_wait
        work = max(0.0, self._now() - self._loop_began - sum(spent.values()) - now.communication)
        first = clock.warm_up
        if 0 < first.steps < now.steps:  # what the first steps took more than others is start-up
            took = max(0.0, first.seconds - first.data_wait)
            usual = max(0.0, work - took) / (now.steps - first.steps)
            spent["first_steps"] = min(work, max(0.0, took - first.steps * usual))
            work -= spent["first_steps"]
        if clock.communication() is not None:
            spent["communication"] = now.communication
        parts = {"productive": work, **spent}
        for name, seconds in self._before.items():
            parts[name] = parts.get(name, 0.0) + seconds
        return {name: parts[name] for name in CATEGORIES if name in parts}

    def event(self, step: int, first_step: int, samples: tuple[int, int], rate: float, mfu: float | None) -> Goodput:
        """Return the report of the attempt so far. `samples`: of the run before this attempt, and so far."""
        self._report_at = self._clock.now + _REPORT_SECONDS
        self._reported_pauses = self._clock.paused_seconds
        return Goodput(
            step=step,
            first_step=first_step,
            seconds=self.seconds(),
            began=self.began,
            attempt=self._attempt,
            first_samples=samples[0],
            samples=samples[1],
            throughput=rate,
            mfu=mfu,
            before=self._before_beat,
            time=self._now(),
        )


@dataclass
class _Attempt:
    """What the events say of one attempt."""

    last: Mapping[str, Any]
    step: int
    end: float

    @property
    def tail(self) -> float:
        """Seconds after the last report, in which only steps were taken."""
        return max(0.0, self.end - float(self.last["time"]))

    def extend(self, step: int, when: float) -> None:
        """Note that it was at a step at a time."""
        self.step, self.end = max(self.step, step), max(self.end, when)


@dataclass(frozen=True)
class Account:
    """Where the wall time of a whole run went, over its attempts and resumptions."""

    seconds: dict[str, float]
    attempts: int
    steps: int
    redone_steps: int
    steady_throughput: float
    """Samples per second without start-up and compilation, in the last attempt."""
    steady_mfu: float | None
    throughput: float
    """Samples per second of wall time; samples of steps that were lost do not count."""
    until: float = field(repr=False, default=0.0)
    """The time of the last event."""

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        """The seconds as shares of all."""
        return {name: seconds / self.total if self.total else 0.0 for name, seconds in self.seconds.items()}

    @property
    def mfu(self) -> float | None:
        """MFU over the whole wall time; None where the peak is not known."""
        if self.steady_mfu is None or not self.steady_throughput:
            return None
        return self.steady_mfu * self.throughput / self.steady_throughput

    @property
    def communication_is_counted(self) -> bool:
        """Whether the strategy counts how long the rank waited; else that time is part of `productive`."""
        return "communication" in self.seconds


def read_events(path: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the events in a run's events.jsonl from a byte offset on, the oldest first; without a file, nothing."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            with suppress(ValueError):  # a writer that was killed has left a part of a line
                event = json.loads(line)
                if isinstance(event, dict) and "event" in event and "time" in event:
                    yield event


def account(events: Iterable[Mapping[str, Any]]) -> Account | None:
    """Add up a run from its events, the oldest first; None where none of them is about goodput."""
    events = list(events)
    attempts = _attempts(events)
    if not attempts:
        return None
    total: defaultdict[str, float] = defaultdict(float)
    redone = 0
    for number, attempt in enumerate(attempts):
        first = attempt.last["first_step"]
        resumed = min((later.last["first_step"] for later in attempts[number + 1 :]), default=attempt.step)
        lost = max(0, attempt.step - max(first, resumed))
        redone += lost
        for name, seconds in attempt.last["seconds"].items():
            total[name] += seconds
        total["productive"] += attempt.tail
        if lost:
            wasted = (attempt.last["seconds"]["productive"] + attempt.tail) * lost / (attempt.step - first)
            total["lost"] += wasted
            total["productive"] -= wasted
        if number and attempt.last["attempt"]:  # the time until another command resumes a run is no part of it
            total["recovery"] += max(0.0, attempt.last["began"] - attempts[number - 1].end)
    for part, seconds in ((part, s) for event in events for part, s in event.get("parts", {}).items()):
        named = min(seconds, total["recovery"])
        total[part] += named
        total["recovery"] -= named
    last, wall = attempts[-1], sum(total.values())
    useful = last.last["samples"] - attempts[0].last["first_samples"]
    return Account(
        seconds={name: total[name] for name in CATEGORIES if name in total},
        attempts=len(attempts),
        steps=last.step,
        redone_steps=redone,
        steady_throughput=last.last["throughput"],
        steady_mfu=last.last["mfu"],
        throughput=useful / wall if wall else 0.0,
        until=last.end,
    )


def _attempts(events: Iterable[Mapping[str, Any]]) -> list[_Attempt]:
    attempts: dict[float, _Attempt] = {}
    current: _Attempt | None = None
    for event in events:
        kind, when = event["event"], float(event["time"])
        if kind == "run_started":
            current = None
        elif kind == "goodput":
            if event["began"] not in attempts and attempts and event.get("before") is not None:
                next(reversed(attempts.values())).extend(*event["before"])
            current = attempts.setdefault(event["began"], _Attempt(event, event["step"], when))
            current.last = event
        if current is not None:
            step = event.get("step")
            current.extend(step if isinstance(step, int) else 0, when)
    return list(attempts.values())
