"""The runs and searches of a folder as plain data for the page: how each stands, its curves, events, files and logs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sqlite3
import stat
import threading
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from phalanx.errors import PhalanxError
from phalanx.host.files import open_below
from phalanx.host.remote import RemotePath
from phalanx.observe.best_mark import latest_mark
from phalanx.observe.goodput import CATEGORIES, EVENTS
from phalanx.run.facts import changed, choices, facts
from phalanx.run.record import FILE
from phalanx.run.stored import STUDY_FILE, StoredRun, is_run, last_values
from phalanx.tools.ui.columns import RunEvents, preview

_CHANGING = ("running", "unknown")
"""Statuses that may change although no file does: the process has ended."""
_UNREADABLE = (OSError, PhalanxError, ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""What reading a run raises: no rights, a version that is not known, an event with other values than ours have."""
_TAIL_BYTES = 16 << 10
_TAIL_LINES = 60
_LOG_BYTES = 64 << 10
_FILES = ("*.html", "*.json", "*.toml", "*.txt", EVENTS, "logs/*.log", "logs/*.json", "profile/*")
"""What the page links of a run's folder."""
_READ = (EVENTS, FILE, STUDY_FILE, "config.toml", "trials")
"""What is read of a run's or a search's folder, apart from the files that are linked."""
_NOT_SHOWN = (
    "command",
    "settings",
    "recipe",
    "alias",
    "tags",
    "note",
    "pid",
    "pid_started",
    "outcome",
    "started",
    "continued",
)
"""Fields of run.json that the page shows elsewhere, or that mean nothing to a reader."""


class Catalog:
    """All runs of a folder, or some that were chosen. Methods are safe to call from several threads."""

    def __init__(self, folder: Path, chosen: Iterable[StoredRun] = ()) -> None:
        self.folder = folder
        self._chosen = list(chosen)
        self._lock = threading.Lock()
        self._events: dict[str, RunEvents] = {}
        self._summaries: dict[str, dict[str, Any]] = {}

    def paths(self) -> dict[str, Path]:
        """Return the folders of all runs by the names that the page uses."""
        if self._chosen:
            return {run.name: run.path for run in self._chosen}
        folders = {}
        with suppress(FileNotFoundError, NotADirectoryError):  # no run has been started yet
            for path in self.folder.iterdir():
                if _is_linked(path):
                    continue
                try:
                    is_a_run = path.is_dir() and is_run(path)
                except PermissionError:  # the run of another user is named, and not shown
                    is_a_run = True
                if is_a_run:
                    folders[path.name] = path
                elif (path / STUDY_FILE).is_file():
                    folders |= {
                        f"{path.name}/trials/{trial.name}": trial
                        for trial in (path / "trials").glob("*")
                        if is_run(trial) and not _is_linked(trial)
                    }
        return folders

    def path(self, name: str) -> Path:
        """Return the folder of one run; KeyError for a name that is not that of a run in the folder, or of a trial."""
        if self._chosen:
            return self.paths()[name]
        first, *rest = name.split("/")
        wrong = any(part in ("", ".", "..") or "\0" in part for part in (first, *rest))
        path = self.folder / name
        trial = len(rest) == 2 and rest[0] == "trials" and not wrong and (self.folder / first / STUDY_FILE).is_file()
        if wrong or not (trial or not rest) or _is_linked(self.folder / first) or _is_linked(path) or not is_run(path):
            raise KeyError(name)
        return path

    def files(self, folder: Path) -> dict[str, int]:
        """Return the files of a run or search that the page links, with their sizes; no links, nor what is in them."""
        real = folder.resolve()
        names = sorted(str(path.relative_to(folder)) for pattern in _FILES for path in folder.glob(pattern))
        inside = [name for name in names if (real / name).resolve() == real / name and (real / name).is_file()]
        return {name: (real / name).stat().st_size for name in inside}

    def open(self, link: str) -> BinaryIO:
        """Open a file that the page links, by the name of its run or search and its path; KeyError for others."""
        parts = link.split("/")
        length = 3 if parts[1:2] == ["trials"] else 1
        name, inside = "/".join(parts[:length]), "/".join(parts[length:])
        folder = self.folder / name if self._is_study(name) else self.path(name)
        if inside not in self.files(folder):
            raise KeyError(link)
        return open_below(folder, inside)

    def log(self, link: str, start: int) -> dict[str, Any]:
        """Return what a log holds from an offset on; of a negative one, its end."""
        with self.open(link) as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - _LOG_BYTES) if start < 0 or start > size else start
            file.seek(begin)
            text = file.read(16 * _LOG_BYTES)
        return {"from": begin, "to": begin + len(text), "text": text.decode(errors="replace")}

    def _is_study(self, name: str) -> bool:
        plain = name not in ("", ".", "..") and os.sep not in name and "\0" not in name
        path = self.folder / name
        return plain and not self._chosen and not _is_linked(path) and (path / STUDY_FILE).is_file()

    def study(self, name: str) -> dict[str, Any]:
        """Return a search: what it looks for, and its trials with their values and runs."""
        if not self._is_study(name):
            raise KeyError(name)
        path = self.folder / name
        try:
            with closing(sqlite3.connect(f"{(path / STUDY_FILE).resolve().as_uri()}?mode=ro", uri=True)) as base:
                about = {key: json.loads(text) for key, text in base.execute(_ABOUT)}
                attributes: dict[int, dict[str, Any]] = {}
                for number, key, text in base.execute(_TOLD):
                    attributes.setdefault(number, {})[key] = json.loads(text)
                rows = base.execute(_TRIALS).fetchall()
        except sqlite3.Error as error:
            raise ValueError(f"{path / STUDY_FILE} cannot be read: {error}") from None
        trials = [
            {
                "number": number,
                "run": f"{name}/trials/{number:04d}",
                "state": attributes[number].get("state", "running"),
                "value": value,
                "params": json.loads(attributes[number].get("params", "{}")),
                "cause": attributes[number].get("cause", ""),
            }
            for number, value in rows
            if number in attributes
        ]
        metric, mode = (json.loads(about.get(key, "null")) for key in ("metric", "mode"))
        complete = [
            trial for trial in trials if trial["value"] is not None and trial["state"] in ("finished", "stopped")
        ]
        best = (max if mode == "max" else min)(complete, key=lambda trial: trial["value"], default={})
        summary = {"id": name, "path": str(path.resolve()), "metric": metric, "mode": mode, "trials": trials}
        return cast("dict[str, Any]", finite({**summary, "best": best.get("number"), "files": self.files(path)}))

    def summaries(self) -> list[dict[str, Any]]:
        """Return how each run stands, the newest first. What has not changed is not read again."""
        paths = self.paths()
        with self._lock:
            for gone in self._summaries.keys() - paths.keys():
                del self._summaries[gone]
                self._events.pop(gone, None)
            for name, path in paths.items():
                version, summary = _version(path), self._summaries.get(name)
                if summary is None or summary["version"] != version:
                    self._summaries[name] = {"id": name, "version": version, **_summary(path)}
                elif summary["status"] in _CHANGING:
                    self._summaries[name] = {**summary, "status": StoredRun(path).status}
            return sorted(self._summaries.values(), key=lambda row: (row["started"], row["id"]), reverse=True)

    def events(self, name: str) -> RunEvents:
        """Return the events of a run, up to date."""
        path = self.path(name) / EVENTS
        with self._lock:
            run_events = self._events.setdefault(name, RunEvents(path))
        run_events.refresh()
        return run_events

    def preview(self, name: str, width: int) -> list[dict[str, Any]]:
        """Return curves of a long run before it has been read; nothing of one that was asked for, or is short."""
        return [] if name in self._events else preview(self.path(name) / EVENTS, width)

    def detail(self, name: str) -> dict[str, Any]:
        """Return everything about a run except its curves."""
        run, events = StoredRun(self.path(name)), self.events(name)
        with events.lock:  # another request may read on meanwhile
            return self._detail(name, run, events)

    def _detail(self, name: str, run: StoredRun, events: RunEvents) -> dict[str, Any]:
        beats = run.last_beat()
        time = events.account(beats)
        described, problem = _described(run)
        detail = {
            "id": name,
            "path": str(run.path.resolve()),
            "command": run.command,
            "environment": _environment(run),
            "files": self.files(run.path),
            "facts": described,
            "changed": [name for name, value in _settings(run).items() if value is not None and name in described],
            "configured": (run.path / "config.toml").is_file(),
            "problems": [text for text in (run.damage, problem, _damage(events)) if text],
            "goodput": None if time is None else {CATEGORIES[key]: text for key, text in time.seconds.items()},
            "attempts": 0 if time is None else time.attempts,
            "redone": 0 if time is None else time.redone_steps,
            "starts": [event["time"] for event in events.starts],
            "until": max([events.until, *(beat["time"] for beat in beats)]),
            "spans": events.timeline(),
            "events": list(events.listed),
            "failures": _failures(run),
            "checkpoints": _checkpoints(run, events),
            "heat": events.heat(),
        }
        return cast("dict[str, Any]", finite(detail))


_ABOUT = "SELECT key, value_json FROM study_user_attributes"
_TOLD = "SELECT number, key, value_json FROM trials JOIN trial_user_attributes USING (trial_id)"
_TRIALS = "SELECT number, value FROM trials LEFT JOIN trial_values USING (trial_id) ORDER BY number"


def _is_linked(path: Path) -> bool:
    """Whether another user has put a link here: it may lead to what is closed to those who see the page."""
    for candidate in (path, *(path / name for name in _READ)):
        with suppress(FileNotFoundError, PermissionError):  # in a closed folder nothing is read
            status = candidate.lstat()
            if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), 0):
                return True
    return False


def _version(path: Path) -> str:
    """Return a text that changes when a run's files do."""
    parts = []
    for name in (EVENTS, FILE):
        with suppress(OSError):
            status = os.stat(path / name)
            parts.append(f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}")
    return ".".join(parts)


def _summary(path: Path) -> dict[str, Any]:
    run = StoredRun(path)
    try:
        os.listdir(path)
        best = None if _is_remote(run) else run.best
        (steps, total), begun, last = run.steps, run.begun, run.last_step
        layout, ended = begun.get("layout") or begun.get("strategy") or "", run.ended
        record, values = run.record, last_values(run)
        speed = ended.get("throughput", values.get("perf/samples_per_second"))
        summary = {
            "status": run.status,
            "started": run.started,
            "steps": steps,
            "total_steps": total,
            "best": None if best is None else {"name": best[0], "value": best[1]},
            "seconds": ended.get("total_time") or max(0.0, float(last.get("time", run.started)) - run.started),
            "ranks": begun.get("world_size"),
            "recipe": (record.recipe or {}).get("name") or record.script or record.module if record else None,
            "study": path.parents[1].name if path.parent.name == "trials" else None,
            "note": record.note if record else "",
            "values": values | ({} if speed is None else {"throughput": speed}),
            "settings": _settings(run),
            "layout": f"{layout}, {begun['world_size']} x {begun['device']}" if "device" in begun else layout,
            "alias": run.alias,
            "tags": run.tags,
            "reason": str(ended.get("reason", "")) or _cause(run),
        }
        return cast("dict[str, Any]", finite(summary))
    except _UNREADABLE as error:
        why = error.strerror if isinstance(error, OSError) else error
        return {"status": "unreadable", "started": 0.0, "steps": 0, "reason": str(why), "tags": []}


def _settings(run: StoredRun) -> dict[str, Any]:
    """Return what of a run's settings, model and data differs from the defaults; empty if they cannot be read."""
    try:
        return changed(choices(run))
    except _UNREADABLE:  # the page of the run says why
        return {}


def _is_remote(run: StoredRun) -> bool:
    """Whether checkpoints are at a URL: they are not listed there at every look."""
    return isinstance(run.checkpoint_dir, RemotePath)


def _cause(run: StoredRun) -> str:
    """Return what the rank that failed first has written."""
    first = next(iter(_failures(run) if run.status == "failed" else ()), {})
    return f"{first.get('type')}: {first.get('message')}" if first else ""


def _environment(run: StoredRun) -> dict[str, Any]:
    """Return where and with what a run was started, as run.json holds it."""
    record = {} if run.record is None else dataclasses.asdict(run.record)
    return {name: value for name, value in record.items() if name not in _NOT_SHOWN and value not in (None, "", [], {})}


def _described(run: StoredRun) -> tuple[dict[str, Any], str]:
    """Return the run's facts, or why they cannot be read."""
    try:
        return facts(run), ""
    except _UNREADABLE as error:
        return {}, str(error)


def _damage(events: RunEvents) -> str:
    if events.damaged == 1:
        return f"1 line of {EVENTS} cannot be read and is left out"
    return f"{events.damaged} lines of {EVENTS} cannot be read and are left out" if events.damaged else ""


def _failures(run: StoredRun) -> list[dict[str, Any]]:
    """Return what each rank that raised has written, the first in time first, with the end of its output."""
    records = []
    for path in (run.path / "logs").glob("rank-*.error.json"):
        with suppress(OSError, ValueError), open_below(run.path, f"logs/{path.name}") as file:
            record = json.loads(file.read())  # ValueError: it is being written; OSError: a link, or no right to read
            if isinstance(record, dict):
                record["output"] = _tail(run.path, path.name.replace(".error.json", ".log"))
                records.append(record)
    return sorted(records, key=lambda record: str(record.get("time")))


def _tail(run_dir: Path, log: str) -> str:
    try:
        with open_below(run_dir, f"logs/{log}") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])
    except OSError:
        return ""


def _checkpoints(run: StoredRun, events: RunEvents) -> list[dict[str, Any]]:
    """Return the checkpoints that events tell of, the newest first, and which of them still exist."""
    try:
        existing = [] if _is_remote(run) else run.checkpoints
        best = latest_mark(existing)
    except (OSError, PhalanxError):
        existing, best = [], None
    event_of = {Path(str(event.get("path"))).name: event for event in events.listed if event["event"] == "checkpoint"}
    rows = [
        {
            **{key: event.get(key) for key in ("step", "time", "bytes", "seconds", "stall", "path")},
            "exists": _is_remote(run) or name in {path.name for path in existing},
            "best": best is not None and name == best.path.name,
        }
        for name, event in event_of.items()
    ]
    return rows[::-1]


def finite(value: Any) -> Any:
    """Return a value as JSON can hold it: a number that is not finite becomes a text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
