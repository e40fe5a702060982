"""Runs on disk: status, checkpoints, files, and lookup by name."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from phalanx.errors import UsageError, nearest
from phalanx.features import feature
from phalanx.host.files import is_trusted
from phalanx.host.remote import RemotePath, as_path
from phalanx.observe.best_mark import latest_mark
from phalanx.observe.events import MetricsReported, StepDone, from_dict
from phalanx.observe.format import duration
from phalanx.observe.goodput import EVENTS, read_events
from phalanx.observe.heartbeat import HeartbeatBoard, board_path
from phalanx.observe.run_folder import WRITTEN, read_written
from phalanx.recipes import Recipe
from phalanx.run.record import CHANGES, FILE, MODEL_FILES, PACKAGES, RunRecord, read_record

RUNS = Path("runs")
STUDY_FILE = "study.db"
"""The record of a search, in its folder."""
_TAIL_BYTES = 1 << 17
_FRESH_SECONDS = 3600.0
_OWN_PATTERNS = (
    *(FILE, EVENTS, CHANGES, PACKAGES, WRITTEN, "config.toml", "tracking.json"),
    *("checkpoints/step-*", "checkpoints/.chunks-*", "checkpoints/.writing-*", "checkpoints/.removing-*"),
    *("checkpoints/.copying-*", "checkpoints/.run-*.lock"),
    *("logs/rank-*", "logs/heartbeats*", "profile/rank-*", "profile/trace.json.gz"),
)
"""The files of a run. A folder that the user had before may hold others, also in `checkpoints` and `logs`."""
_FITS = "fit-[0-9]*"
_NOTED_PATTERNS = ("wandb/*", "events.out.tfevents.*", MODEL_FILES, _FITS)
"""Files of a run if the run has noted that it wrote them: other programs and runs use these names, too."""


@dataclass(frozen=True)
class StoredRun:
    """A run's folder, and what its files say. Everything is read when it is first asked for."""

    path: Path

    @property
    def name(self) -> str:
        """The name that other commands take: the path inside ./runs (of a trial: STUDY/trials/0003), else the path."""
        path, runs = self.path.parent.resolve() / self.path.name, RUNS.resolve()
        return str(path.relative_to(runs)) if path.is_relative_to(runs) else str(self.path)

    @cached_property
    def _read(self) -> RunRecord | str | None:
        return read_record(self.path)

    @property
    def record(self) -> RunRecord | None:
        """What started it; None for a run of an older version, and where `damage` says what is wrong."""
        return self._read if isinstance(self._read, RunRecord) else None

    @property
    def damage(self) -> str:
        """Why run.json cannot be used; empty where it can, or where there is none."""
        return self._read if isinstance(self._read, str) else ""

    @cached_property
    def is_trusted(self) -> bool:
        """Whether this user or root alone can have written run.json; else it is shown, and nothing is done by it."""
        return is_trusted(self.path) and is_trusted(self.path / FILE)

    def require_trust(self, effect: str, hint: str = "") -> None:
        """Refuse a run that another user may have written; `effect`: how the sentence about it ends."""
        if self.is_trusted:
            return
        path, copy = shlex.quote(str(self.path)), shlex.quote(f"{self.path.name}-copy")
        owners = {self.path.stat().st_uid}
        with suppress(OSError):  # there is none, or the folder is closed
            owners.add((self.path / FILE).stat().st_uid)
        if owners <= {os.geteuid(), 0}:
            whose, how = "can be written by other users", f"chmod go-w {path} {shlex.quote(str(self.path / FILE))}"
        else:
            whose, how = "belongs to another user", f"cp -r {path} {copy}"
        raise UsageError(
            f"{self.path / FILE} {whose}, and {effect}",
            hint=f"If you have read it and trust it: {how}. {hint}".strip(),
        )

    @property
    def command(self) -> str:
        """The command that started it, as it can be pasted."""
        return shlex.join(self.record.command) if self.record is not None else "(not recorded)"

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that it trained, with all changes; None for a script or a trainer in Python."""
        if self.record is None or self.record.recipe is None:
            return None
        self.require_trust("names modules that would be imported", "Or give --model and --data yourself.")
        document = dict(self.record.recipe)
        for name in ("presets", "callbacks", "paths"):
            document[name] = tuple(document.get(name, ()))
        return with_kept_files(Recipe(**document), self.path.absolute() / MODEL_FILES)

    @cached_property
    def _ends(self) -> list[dict[str, Any]]:
        """The first event and the latest ones."""
        try:
            with (self.path / EVENTS).open("rb") as file:
                first = file.readline()
                begin = max(len(first), os.fstat(file.fileno()).st_size - _TAIL_BYTES)
                file.seek(begin)
                rest = file.read().split(b"\n")
        except OSError:
            return []
        if begin > len(first):
            rest = rest[1:]  # the first of them is a part of a line
        return [event for line in (first, *rest) if (event := _parsed(line)) is not None]

    def _last(self, *kinds: str) -> dict[str, Any]:
        return next((event for event in reversed(self._ends) if event["event"] in kinds), {})

    @property
    def begun(self) -> dict[str, Any]:
        """The last event `run_started`, or the first of a long run."""
        return self._last("run_started")

    @property
    def ranks_per_gpu(self) -> int:
        """How many ranks share a GPU; over 1, its figures do not say how fast the layout is."""
        return int(self.begun.get("ranks_per_gpu", 1))

    @property
    def last_step(self) -> dict[str, Any]:
        """The last event `step`; empty before the first."""
        return self._last("step")

    @property
    def last_report(self) -> dict[str, Any]:
        """The last event `ranks`; empty before the first."""
        return self._last("ranks")

    @property
    def ended(self) -> dict[str, Any]:
        """The event `run_ended`; empty while it runs, also after a resumption."""
        last = self._last("run_started", "run_ended")
        return last if last.get("event") == "run_ended" else {}

    @property
    def status(self) -> str:
        """In one word: running, finished, stopped, preempted, failed, or killed where nothing was reported."""
        last, record = self._last("run_started", "run_ended"), self.record
        is_local = record is not None and record.host == socket.gethostname()
        alive = record is not None and record.is_alive
        if last.get("event") == "run_ended":
            # A run that is resumed reports its start only when its ranks have started.
            begins = alive and record is not None and max(record.started, record.continued) > float(last["time"])
            return "running" if begins else str(last.get("status", "unknown"))
        restarts = alive and record is not None and record.settings.get("max_restarts")
        if self.failure and float(self.failure["time"]) > float(last.get("time", 0.0)) and not restarts:
            return "failed"
        # A notebook that was interrupted lives on.
        if record is not None and record.outcome and (not alive or not last or record.outcome == "interrupted"):
            return record.outcome
        if alive or self._is_locked:
            return "running"
        return "damaged" if self.damage else "killed" if is_local else "unknown"

    @cached_property
    def failure(self) -> dict[str, Any]:
        """What the last rank that raised has written: its `time`, `type` and `message`; empty without one."""
        records = [_parsed(file.read_bytes(), "message") for file in self.path.glob("logs/rank-*.error.json")]
        return max(
            (record for record in records if record is not None), key=lambda record: float(record["time"]), default={}
        )

    @property
    def _is_locked(self) -> bool:
        """Whether a rank on any host holds the run's lock, where its checkpoints are; those at a URL have none."""
        directory, run_id = self.checkpoint_dir, self.begun.get("run_id")
        if isinstance(directory, RemotePath):
            return False
        name = "*" if self.owns_checkpoint_dir else run_id  # a folder elsewhere may be that of many runs
        for path in directory.glob(f".run-{name}.lock") if name else ():
            with suppress(FileNotFoundError), path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
                except OSError:  # a file system without locks
                    continue
        return False

    @property
    def in_use(self) -> str:
        """Why the run may still be running, as the end of a sentence; empty where it is not."""
        status = self.status
        if status == "running":
            return "is running"
        if status not in ("unknown", "damaged") or (self.record is not None and self.record.was_requeued):
            return ""
        files = (self.path / EVENTS, self.path / "logs" / "heartbeats")
        ages = [time.time() - file.stat().st_mtime for file in files if file.is_file()]
        if not ages or min(ages) > _FRESH_SECONDS:
            return ""
        host = f" on {self.record.host}" if self.record is not None else ""
        return f"may be running{host}: it has not reported its end, and its files changed {duration(min(ages))} ago"

    @property
    def how_to_free(self) -> str:
        """What to do about a run that is `in_use`."""
        end = "Stop it first, with Ctrl-C or SIGTERM"
        if self.status == "running":
            return f"{end}."
        if self.record is None:
            return f"{end}, on its host; or wait until its files have not changed for {duration(_FRESH_SECONDS)}."
        command = f"phalanx runs stop {shlex.quote(self.name)} --ended"
        return f"{end}, on its host. If it has ended there without a report, say so: {command}"

    @property
    def started(self) -> float:
        """When it started, in seconds since the epoch."""
        if self.record is not None:
            return self.record.started
        return float(self._ends[0]["time"]) if self._ends else self.path.stat().st_mtime

    @property
    def steps(self) -> tuple[int, int | None]:
        """Steps taken, and the steps of the whole run where they are known."""
        step = max((int(e["step"]) for e in self._ends if isinstance(e.get("step"), int)), default=0)
        return step, self.begun.get("total_steps")

    @property
    def best(self) -> tuple[str, float] | None:
        """The metric that the run is judged by, and its best value so far; else what was measured last."""
        ended, marked = self.ended, latest_mark(self.checkpoints)
        measured = [event for event in self._ends if event["event"] == "metrics" and event["split"] == "val"]
        if ended.get("best_value") is not None:
            return str(ended["best_metric"]), float(ended["best_value"])
        if marked is not None:
            return marked.metric, marked.value
        for name, value in ended.get("best", {}).items():
            if measured and not any(name in event.get("values", {}) for event in measured):
                continue  # the best training loss of a run whose validation measures something else
            return f"{'val' if measured else 'train'}/{name}", float(value)
        last: dict[str, Any] = measured[-1] if measured else {}
        loss = self.last_step.get("loss")
        trained = None if loss is None else ("train/loss", float(loss))
        return next(((f"val/{name}", float(value)) for name, value in last.get("values", {}).items()), trained)

    @property
    def checkpoint_dir(self) -> Path:
        """Where its checkpoints are; of a run that is not trusted, those in its own folder alone."""
        record = self.record if self.is_trusted else None
        if record is None or (directory := record.settings.get("checkpoint_dir")) is None:
            return self.path / "checkpoints"
        path = as_path(str(directory))
        return path if isinstance(path, RemotePath) else Path(record.directory) / path

    @property
    def checkpoints(self) -> list[Path]:
        """Published checkpoints of this run, the oldest first."""
        directory = self.checkpoint_dir
        try:
            paths = sorted(path for path in directory.glob("step-*") if (path / "manifest.json").is_file())
        except OSError:
            if not isinstance(directory, RemotePath):
                raise
            return []  # runs can be listed without access to where their checkpoints are
        if self.owns_checkpoint_dir:
            return paths
        names, runs = set[str](), set[str]()
        for event in self.events():
            if event["event"] == "checkpoint":
                names.add(Path(event["path"]).name)
            elif event["event"] == "run_started" and event.get("run_id"):
                runs.add(event["run_id"])
        recorded = [path for path in paths if path.name in names]
        # A name in a folder that was free again may be that of another run by now; at a URL each save has its own.
        return (
            recorded if isinstance(directory, RemotePath) or not runs else [p for p in recorded if _run_of(p) in runs]
        )

    @property
    def owns_checkpoint_dir(self) -> bool:
        """Whether its checkpoints are in its own folder; a `checkpoint_dir` elsewhere may be shared with other runs."""
        return self.checkpoint_dir.resolve().is_relative_to(self.path.resolve())

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the best value of the run's metric; None where none is marked."""
        marked = latest_mark(self.checkpoints)
        return None if marked is None else marked.path

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with suppress(FileNotFoundError):  # a run that goes on removes old checkpoints
                    total += os.lstat(os.path.join(folder, name)).st_size
        return total

    @property
    def alias(self) -> str:
        """The name that the user gave this run alone; empty without one."""
        return self.record.alias if self.record is not None else ""

    @property
    def tags(self) -> list[str]:
        """The labels that the user gave it, which other runs may have too."""
        return self.record.tags if self.record is not None else []

    def events(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """Return all events, or those after an offset in bytes, the oldest first."""
        return read_events(self.path / EVENTS, start)

    def last_beat(self) -> list[dict[str, Any]]:
        """Return the main rank's last heartbeat as an event, for a run that goes on or was killed; else nothing."""
        if self.ended or not self.is_trusted:  # a map of a file that its owner cuts ends this process
            return []
        with suppress(OSError, IndexError, ValueError):  # no launcher has made the file, or another user's
            with closing(HeartbeatBoard(board_path(self.path / "logs"))) as board:
                beat = board.read(0)
            return [] if beat is None else [{"event": "heartbeat", "time": beat.time, "step": beat.step}]
        return []

    def clear(self) -> None:
        """Remove the files that the run has written; other files in its folder stay."""
        self.require_trust("its links may lead to other files, so nothing was removed")
        noted = read_written(self.path)
        paths = [path for pattern in _NOTED_PATTERNS for path in self.path.glob(pattern)]
        written = [path for path in paths if str(path.relative_to(self.path)) in noted]
        fits = [path for path in written if path.match(_FITS)]
        for fit in fits:
            StoredRun(fit).clear()
        for path in [*written, *(path for pattern in _OWN_PATTERNS for path in self.path.glob(pattern))]:
            if path in fits:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for link in self.path.glob("wandb/*"):
            if link.is_symlink() and not link.exists():  # W&B's links to its latest run, which was this one
                link.unlink()
        for folder in (*fits, *(self.path / name for name in ("checkpoints", "logs", "profile", "wandb"))):
            with suppress(OSError):  # it is not there, or holds other files
                folder.rmdir()


def _run_of(checkpoint: Path) -> str | None:
    """Return the run that saved a checkpoint; None if its manifest cannot be read."""
    try:
        document = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document.get("run_id") if isinstance(document, dict) else None


def _parsed(line: bytes, key: str = "event") -> dict[str, Any] | None:
    """Return an event, or an object with this key; None for an empty line, and for one that was not finished."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and key in event and "time" in event else None


def last_values(run: StoredRun) -> dict[str, float]:
    """Return the last value of each curve that a run's latest events are points of, by the names of dashboards."""
    values: dict[str, float] = {}
    for event in run._ends:
        if event["event"] not in ("step", "metrics"):
            continue
        with suppress(ValueError, TypeError, AttributeError):  # a writer of another version
            values |= cast("StepDone | MetricsReported", from_dict(event)).scalars()
    return values


def is_run(path: Path) -> bool:
    """Whether a folder holds a run that has begun."""
    events = path / EVENTS
    return (path / FILE).is_file() or (events.is_file() and events.stat().st_size > 0)


def list_studies(folder: Path = RUNS) -> list[Path]:
    """Return the folders of searches (`phalanx tune`) in a folder; the runs of each are in its folder `trials`."""
    return sorted(path.parent for path in folder.glob(f"*/{STUDY_FILE}"))


def list_runs(folder: Path = RUNS) -> list[StoredRun]:
    """Return the runs in a folder, the newest first; the trials of a search are in their own folder."""
    if not folder.is_dir():
        return []
    runs = []
    for path in folder.iterdir():
        with suppress(PermissionError):  # the folder of another user's run is closed
            if path.is_dir() and is_run(path):
                runs.append(StoredRun(path))
    return sorted(runs, key=lambda run: (run.started, run.path.name), reverse=True)


def find_run(name: str | Path, folder: Path = RUNS) -> StoredRun:
    """Return a run by its folder, its name, the beginning of it, a tag that no other run has, or "last"."""
    if not isinstance(name, str | Path) or not str(name).strip():
        raise UsageError(f"{name!r} does not name a run", hint="Write its name, its folder, or last.")
    path = Path(name)
    for candidate in (path, folder / path):
        if candidate.is_dir() and is_run(candidate):
            return StoredRun(candidate)
    runs = list_runs(folder)
    if str(name) == "last" and runs:  # in a folder that users share, this user's
        return next((run for run in runs if run.is_trusted), runs[0])
    word = str(name)
    meanings: list[tuple[str, str, Callable[[StoredRun], bool]]] = [
        ("the name", "Write its folder.", lambda run: run.alias == word),
        ("a tag", f"Write one of them. All: phalanx runs --tag {shlex.quote(word)}", lambda run: word in run.tags),
        # "gp" begins gpt-..., and "g" means g-... if there is one.
        ("the beginning", "Write more of the name.", lambda run: run.path.name.startswith(f"{word}-")),
        ("the beginning", "Write more of the name.", lambda run: run.path.name.startswith(word)),
    ]
    for meaning, hint, matches in meanings:
        matching = [run for run in runs if matches(run)]
        if len(matching) > 1:
            listed = ", ".join(run.path.name for run in matching[:5]) + (", ..." if len(matching) > 5 else "")
            raise UsageError(f"'{name}' is {meaning} of {len(matching)} runs: {listed}", hint=hint)
        if matching:
            return matching[0]
    if path.exists():
        raise UsageError(f"{path} is not the folder of a run: it has neither {FILE} nor {EVENTS}")
    if not runs:
        raise UsageError(f"there is no run '{name}': {folder.resolve()} holds no runs")
    names = [run.path.name for run in runs[:10]]
    close = nearest(str(name), names)
    guess = f" Did you mean '{close}'?" if close else ""
    raise UsageError(f"unknown run '{name}'.{guess} The latest: {', '.join(names)}.", hint="See: phalanx runs")


def with_located_sources(recipe: Recipe) -> Recipe:
    """Return a recipe whose model.pretrained and data.tokenizer are absolute paths: ranks may run in another folder.

    Repositories of the Hub are downloaded.
    What `pretrained` names may also be a run; "last" is the last one now, before the new one begins.
    """
    model, data = dict(recipe.model), dict(recipe.data)
    if isinstance(source := model.get("pretrained"), str):
        path = _of_user(source)
        try:
            model["pretrained"] = str(path.resolve() if path.exists() else find_run(source).path.resolve())
        except UsageError as error:
            raise UsageError(
                f"model.pretrained = '{source}' is not a path, and {error}",
                hint="Give a run, a folder, or hf://ORG/NAME for a model of the Hugging Face Hub.",
            ) from None
    if isinstance(tokenizer := data.get("tokenizer"), str):
        data["tokenizer"] = str(_of_user(tokenizer, "tokenizer").resolve())
    if isinstance(root := data.get("root"), str) and root.startswith("hf://"):
        data["root"] = str(feature("hub")(root, "data"))
    return replace(recipe, model=model, data=data)


def _of_user(place: str, purpose: str = "model") -> Path:
    """Return the path that a user has written, or that of a repository of the Hub."""
    path: Path = feature("hub")(place, purpose) if place.startswith("hf://") else Path(place).expanduser()
    return path


def with_kept_files(recipe: Recipe, kept_files: Path) -> Recipe:
    """Return a recipe whose model's folder is the run's own copy of it, where the folder is not there any more."""
    folder = str(recipe.model["name"])
    if not Path(folder).is_absolute() or Path(folder).exists() or not kept_files.is_dir():
        return recipe
    data = {key: str(kept_files) if value == folder else value for key, value in recipe.data.items()}
    model = {key: value for key, value in recipe.model.items() if key != "weights"}
    return replace(recipe, model={**model, "name": str(kept_files)}, data=data)
