"""A run's events as columns: read once, continued where the file has grown, and reduced to the width of a chart."""

from __future__ import annotations

import base64
import json
import math
import os
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from phalanx.observe.events import MetricsReported, RanksReported, StepDone, from_dict
from phalanx.observe.goodput import Account, account

Column = NDArray[np.float64]

_CHUNK_BYTES = 1 << 20
_LONG_BYTES = 4 << 20
"""Of a file that is longer and was not read yet, a preview is shown first."""
_LINE_BYTES = 2048
_MOST_EVENTS = 2000
_MOST_REPORTS = 320
"""Reports about ranks that are kept; of a longer run every second one is dropped, again and again."""
_MOST_SPANS = 1500
_one_at_a_time = threading.Lock()
"""Long files are read one after the other: the first is shown sooner, and the last not later."""
_NOT_LISTED = ("step", "ranks", "phase", "goodput", "epoch", "metrics")
"""Events with a curve, a heat map, a timeline or their own bar."""


class _Table:
    """Points that share their steps and times: one column per curve, NaN where a point lacks a value."""

    def __init__(self) -> None:
        self._parts: list[dict[str, Column]] = []

    def add(self, steps: list[Any], times: list[Any], values: dict[str, list[Any]]) -> None:
        """Append points: None is a value that is not known, and what is not finite ("nan", "inf") becomes infinite."""
        columns = {name: _numbers(numbers) for name, numbers in {"step": steps, "time": times, **values}.items()}
        if not (np.isfinite(columns["step"]).all() and np.isfinite(columns["time"]).all()):
            raise ValueError("a point without a step or a time")
        self._parts.append(columns)

    def columns(self) -> dict[str, Column]:
        """Return all points, ordered by step; of a step that was done again the last one."""
        if len(self._parts) > 1:
            names = dict.fromkeys(name for part in self._parts for name in part)
            self._parts = [{name: np.concatenate([_column(part, name) for part in self._parts]) for name in names}]
        if not self._parts:
            return {}
        merged = self._parts[0]
        steps = merged["step"]
        if (np.diff(steps) > 0).all():
            return merged
        last = len(steps) - 1 - np.unique(steps[::-1], return_index=True)[1]
        return {name: column[last] for name, column in merged.items()}


def _numbers(values: list[Any]) -> Column:
    if str in set(map(type, values)):
        values = [math.inf if isinstance(value, str) and not math.isfinite(float(value)) else value for value in values]
    column = np.array(values, dtype=float)
    if column.ndim != 1:
        raise ValueError("a list in the place of a number")
    return column


def _column(part: dict[str, Column], name: str) -> Column:
    return part[name] if name in part else np.full(len(part["step"]), np.nan)


class RunEvents:
    """The events of one run's file. `refresh` reads what is new; a file that was replaced is read again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.RLock()
        self._file: tuple[int, int] = (0, 0)
        self._reduced: tuple[Any, list[dict[str, Any]]] = (None, [])
        self._clear()

    def _clear(self) -> None:
        self._offset = 0
        self._tables: dict[str, _Table] = {}
        self._ledger: list[dict[str, Any]] = []
        self._last_step: dict[str, Any] = {"event": "seen", "time": 0.0, "step": 0}
        self._open_phases: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        self.reports: list[dict[str, Any]] = []
        self._skip, self._skipped = 0, 0
        self.listed: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self.starts: list[dict[str, Any]] = []
        self.damaged = 0

    def refresh(self) -> None:
        """Read what was appended since the last time; half a line at the end stays for the next time."""
        with self.lock:
            try:
                file = self.path.open("rb")
            except FileNotFoundError:
                self._clear()
                return
            with file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
                    self._clear()
                    self._file = (status.st_dev, status.st_ino)
                long = status.st_size - self._offset > _CHUNK_BYTES
                with _one_at_a_time if long else nullcontext():
                    self._continue(file)

    def _continue(self, file: BinaryIO) -> None:
        file.seek(self._offset)
        rest = b""
        while chunk := file.read(_CHUNK_BYTES):
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            self._offset += len(whole) + len(newline)
            self._read(whole.split(b"\n") if newline else [])

    def _read(self, lines: list[bytes]) -> None:
        steps = []
        for event in self._parsed([line for line in lines if line]):
            if isinstance(event, dict) and event.get("event") == "step":
                steps.append(event)
            elif not isinstance(event, dict) or not isinstance(event.get("time"), float | int):
                self.damaged += 1
            else:
                self._flush(steps)
                self._guarded(self._add, event)
        self._flush(steps)

    def _parsed(self, lines: list[bytes]) -> Iterable[Any]:
        """Return the lines as data: all at once, which is faster, or one by one where a line is damaged."""
        try:
            events = json.loads(b"[" + b",".join(lines) + b"]")
            if len(events) == len(lines):
                return cast("list[Any]", events)
        except ValueError:
            pass
        return [event for line in lines if (event := self._guarded(json.loads, line)) is not None]

    def _guarded(self, function: Any, argument: Any) -> Any:
        """Call a function, and count what it cannot read: a writer that was killed, or another one's file."""
        try:
            return function(argument)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            self.damaged += 1
            return None

    def _flush(self, steps: list[dict[str, Any]]) -> None:
        if steps:
            before = self.damaged
            self._guarded(self._add_steps, steps)
            if self.damaged > before and len(steps) > 1:
                self.damaged = before
                for step in steps:
                    self._guarded(self._add_steps, [step])
            self._guarded(self._see, steps[-1])
            steps.clear()

    def _see(self, event: dict[str, Any]) -> None:
        step = event.get("step")
        self._last_step = {"event": "seen", "time": float(event["time"]), "step": step if isinstance(step, int) else 0}

    def _add_steps(self, events: list[dict[str, Any]]) -> None:
        fields = {name: field for name, field in StepDone.CURVES.items() if field in events[0]}
        steps, times, *columns = map(list, zip(*map(itemgetter("step", "time", *fields.values()), events), strict=True))
        curves = {name: values for name, values in zip(fields, columns, strict=True) if set(values) != {None}}
        self._table("step").add(steps, times, curves)

    def _table(self, kind: str) -> _Table:
        return self._tables.setdefault(kind, _Table())

    def _add(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("metrics", "ranks"):
            values = cast("MetricsReported | RanksReported", from_dict(event)).scalars()
            self._table(kind + str(event.get("split", ""))).add(
                [event["step"]], [event["time"]], {name: [value] for name, value in values.items()}
            )
        if kind == "ranks":
            self._add_report(event)
        elif kind == "phase":
            self._add_phase(event)
        elif kind in ("goodput", "run_started"):
            self._add_ledger(event)
        if kind == "run_started":
            self.starts.append(event)
            self._open_phases.clear()
        if kind not in _NOT_LISTED:
            self.listed.append(event)
        self._see(event)

    def _add_report(self, event: dict[str, Any]) -> None:
        self._skipped += 1
        if self._skipped <= self._skip:
            return
        self._skipped = 0
        values = {name: _numbers(numbers) for name, numbers in event["values"].items()}
        if any(len(numbers) != len(event["ranks"]) for numbers in values.values()):
            raise ValueError("a report with another number of values than ranks")
        whole = {"ranks": [int(rank) for rank in event["ranks"]], "counted": int(event.get("counted", 0))}
        self.reports.append({**event, **whole, "values": values})
        if len(self.reports) > _MOST_REPORTS:
            self.reports = self.reports[::2]
            self._skip = 2 * self._skip + 1

    def _add_phase(self, event: dict[str, Any]) -> None:
        if event["state"] == "begin":
            self._open_phases[event["name"]] = event["time"]
        else:
            began = self._open_phases.pop(event["name"], event["time"] - float(event.get("seconds", 0.0)))
            self.spans.append((str(event["name"]), began, event["time"]))

    def _add_ledger(self, event: dict[str, Any]) -> None:
        """Keep what `account` needs: the first and the last report of each attempt, and when each was last seen."""
        ledger = self._ledger
        if event["event"] == "goodput" and len(ledger) > 1:
            same = [entry["event"] == "goodput" and entry["began"] == event["began"] for entry in ledger[-2:]]
            if all(same):
                ledger.pop()
            elif not same[-1]:
                ledger.append(self._last_step)
        elif ledger:
            ledger.append(self._last_step)
        ledger.append(event)

    def account(self, beat: list[dict[str, Any]]) -> Account | None:
        """Return where the run's time went; `beat`: its last heartbeat, as `StoredRun.last_beat` returns it."""
        with self.lock:
            events = [*self._ledger, *([self._last_step] if self._ledger else []), *beat]
        return cast("Account | None", self._guarded(account, events))

    @property
    def until(self) -> float:
        """The time of the last event."""
        return float(self._last_step["time"])

    def curves(self, width: int, low: float = -np.inf, high: float = np.inf, by: str = "step") -> list[dict[str, Any]]:
        """Return tables of curves with at most 2 x `width` points each, of the steps or seconds from `low` to `high`.

        Columns are base64 of little-endian floats: 64 bits for steps and times, 32 for values.
        """
        request = (self._file, self._offset, width, low, high, by)
        with self.lock:
            if self._reduced[0] != request:
                tables = [table.columns() for table in self._tables.values()]
                self._reduced = request, [_reduced(table, width, low, high, by) for table in tables if table]
            return self._reduced[1]

    def timeline(self) -> list[tuple[str, float, float]]:
        """Return phases as (name, begin, end); neighbours of one name that a chart cannot separate become one."""
        with self.lock:
            spans = list(self.spans)
            spans += [(name, began, self.until) for name, began in self._open_phases.items()]
        if len(spans) <= _MOST_SPANS:
            return spans
        gap = (spans[-1][2] - spans[0][1]) / _MOST_SPANS
        merged: dict[str, list[tuple[str, float, float]]] = {}
        for name, began, end in spans:
            phase = merged.setdefault(name, [])
            if phase and began - phase[-1][2] < gap:
                phase[-1] = (name, phase[-1][1], end)
            else:
                phase.append((name, began, end))
        return [span for phase in merged.values() for span in phase]

    def heat(self) -> dict[str, Any] | None:
        """Return what ranks reported: for each gauge a matrix of ranks x reports; None without a report."""
        with self.lock:
            reports = list(self.reports)
        if not reports:
            return None
        rows = {rank: row for row, rank in enumerate(sorted({rank for report in reports for rank in report["ranks"]}))}
        names = dict.fromkeys(name for report in reports for name in report["values"])
        matrices = {name: np.full((len(rows), len(reports)), np.nan, np.float32) for name in names}
        for column, report in enumerate(reports):
            at = [rows[rank] for rank in report["ranks"]]
            for name, values in report["values"].items():
                matrices[name][at, column] = values
        return {
            "ranks": list(rows),
            "times": [report["time"] for report in reports],
            "steps": [report["step"] for report in reports],
            "slowest": [report.get("slowest") for report in reports],
            "counted": max(report["counted"] for report in reports),
            "gauges": {name: packed(matrix) for name, matrix in matrices.items()},
        }


def preview(path: Path, width: int) -> list[dict[str, Any]]:
    """Return curves of lines at `width` places of a long file; nothing of a short one, or where there is none.

    A page of many long runs shows these within a second, and what lies between when the files have been read.
    """
    size = path.stat().st_size if path.is_file() else 0
    if size < _LONG_BYTES:
        return []
    sample, lines = RunEvents(path), []
    with path.open("rb") as file:
        for index in range(width):
            file.seek(index * (size - _LINE_BYTES) // max(1, width - 1))
            lines += file.read(_LINE_BYTES).split(b"\n")[1:2]  # the first is a part of a line
    sample._read(lines)
    return [{**table, "preview": True} for table in sample.curves(width)]


def packed(column: NDArray[Any]) -> str:
    """Return an array as base64 of its bytes, little-endian: JSON has neither NaN nor a short form for numbers."""
    return base64.b64encode(column.astype(column.dtype.newbyteorder("<")).tobytes()).decode()


def _reduced(table: dict[str, Column], width: int, low: float, high: float, by: str) -> dict[str, Any]:
    """Reduce a table to buckets of equal numbers of points: of each its lowest, highest and mean value."""
    inside = (table[by] >= low) & (table[by] <= high)
    steps, times = table["step"][inside], table["time"][inside]
    count = len(steps)
    starts = np.linspace(0, count, width, endpoint=False).astype(int) if count > 2 * width else np.arange(count)
    curves = {}
    for name, column in table.items():
        if name in ("step", "time"):
            continue
        values = column[inside]
        wrong = np.flatnonzero(np.isinf(values))
        curves[name] = _buckets(np.where(np.isfinite(values), values, np.nan), starts)
        if len(wrong):
            curves[name] |= {"not_finite": len(wrong), "first": float(steps[wrong[0]])}
    return {"step": packed(steps[starts]), "time": packed(times[starts]), "count": count, "curves": curves}


def _buckets(values: Column, starts: NDArray[np.int_]) -> dict[str, Any]:
    if not len(values) or len(starts) == len(values):
        return {"low": packed(values.astype(np.float32))}
    is_finite = np.isfinite(values)
    number = np.add.reduceat(is_finite, starts, dtype=float)
    total = np.add.reduceat(np.where(is_finite, values, 0.0), starts)
    mean = np.divide(total, number, out=np.full(len(starts), np.nan), where=number > 0)
    reduced = {"low": np.fmin.reduceat(values, starts), "high": np.fmax.reduceat(values, starts), "mean": mean}
    return {name: packed(column.astype(np.float32)) for name, column in reduced.items()}
