"""Follow a run on Ray from the driver: output, events, losses, signals; and where each rank runs."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.diagnosis import RankExit, explain, find_first_cause
from phalanx.engines.ray.cluster import RayCluster
from phalanx.engines.ray.fit_order import RayMessage
from phalanx.errors import EXIT_PREEMPTED, EXIT_USAGE, UsageError
from phalanx.host.processes import SignalInbox
from phalanx.launch.error_file import record_path
from phalanx.launch.failure import FailureReport
from phalanx.launch.launcher_loop import MOMENTS, SUCCESS_CODES, LauncherLoop, Reminder, duration_text, stopped
from phalanx.launch.output import LineSplitter, RankConsole, log_path, log_tail
from phalanx.launch.spec import CallTarget, LaunchResult, LaunchSpec
from phalanx.observe.guard import Guard
from phalanx.observe.heartbeat import HeartbeatBoard

_POLL_SECONDS = 0.2
_DEATH_LINES = 4


@dataclass(frozen=True)
class RayRun:
    """A run that was started on a cluster: its controller actor, its future result, and what it was asked for."""

    cluster: RayCluster
    controller: Any
    result: Any
    workers: int
    resources: dict[str, float]
    start_timeout: float | None
    began: float


@dataclass
class WorkerLocation:
    """The node of a rank, its heartbeat file there, and the last step that it reported."""

    host: str
    heartbeats: Path
    step: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether the heartbeats can be read on this machine."""
        return self.host == socket.gethostname() and self.heartbeats.exists()

    def last_step(self, rank: int) -> int | None:
        """Return the last step: by the heartbeats where they can be read here, else by the last message."""
        if not self.is_here:
            return self.step
        with closing(HeartbeatBoard(self.heartbeats)) as board:
            beat = board.read(rank)
        return beat.step if beat else self.step


class RayFollower(LauncherLoop):
    """Runs once. Messages and signals are polled for: Ray has no descriptor to wait on."""

    def __init__(self, spec: LaunchSpec, console: RankConsole, inbox: SignalInbox, run: RayRun) -> None:
        super().__init__(spec, console, inbox)
        self._run = run
        self._reminder: Reminder | None = Reminder(run.began, (3.0, *MOMENTS))
        self._doing = "waiting for Ray Train to start"
        self._attempt = -1
        self._world_size = run.workers
        self._lines = LineSplitter()
        self._folder = Guard(f"writing to {spec.log_dir.parent}", console.notice)
        self._locations: dict[int, WorkerLocation] = {}
        self._records: dict[int, dict[str, Any]] = {}
        self._ends: dict[int, tuple[int, str]] = {}
        self._failure: FailureReport | None = None
        self._ended = False
        self._given_up = False

    def follow(self) -> LaunchResult:
        """Follow the run until it, or Ray itself, has ended."""
        import ray

        try:
            self._follow()
            if self._ended:
                return self._result(ray.get(self._run.result))
            ray.get(self._run.controller.abort.remote())
            return self._result("")
        except (ray.exceptions.RayError, ConnectionError) as error:
            return LaunchResult(1, self._attempt + 1, self._without_ray(str(error)))
        finally:
            self._forget_locations()
            self._selector.close()

    def _wait(self) -> None:
        import ray

        self._ended = bool(ray.wait([self._run.result], timeout=0)[0])
        # Ranks end only after their last message has arrived: once the result is there, no more will come.
        while messages := ray.get(self._run.controller.take.remote(0.0 if self._ended else _POLL_SECONDS)):
            for message in messages:
                self._handle(message)
            if not self._ended:
                break
        if not self._ended:
            self._on_signals()

    def _without_ray(self, error: str) -> FailureReport:
        if "No module named 'phalanx'" in error:
            raise UsageError(
                f"{self._run.cluster.name} does not have Phalanx.",
                hint="Install it on every node of the cluster, in the environment that Ray runs in.",
            )
        return FailureReport(cause=f"lost {self._run.cluster.name}: {_in_short(error)}", exit_code=1)

    # --- messages --------------------------------------------------------------------------------------------------

    def _handle(self, message: RayMessage) -> None:
        """Handle a message by its first key: `output` by `_handle_output`, and so on."""
        getattr(self, f"_handle_{next(iter(message))}")(message)

    def _handle_output(self, message: RayMessage) -> None:
        rank: int = message["rank"]
        self._handle_log({"log": message["output"], "rank": rank})
        if rank == 0 or self._spec.console_ranks == "all":
            for line in self._lines.split(rank, message["output"]):
                self._console.rank_output(rank, self._spec.label(rank), line)

    def _handle_log(self, message: RayMessage) -> None:
        self._append(log_path(self._spec.log_dir, message["rank"]), message["log"])

    def _append(self, path: Path, data: bytes) -> None:
        def append() -> None:
            with path.open("ab") as file:
                file.write(data)

        self._folder.attempt(append)

    def _handle_event(self, message: RayMessage) -> None:
        self._reminder = None  # from here on the ranks report progress
        event = message["event"]
        self._console.handle(event)
        if message.get("keep") and event["event"] not in ("joining", "joined"):
            line = json.dumps(event, separators=(",", ":")) + "\n"
            self._append(self._spec.log_dir.parent / "events.jsonl", line.encode())

    def _handle_record(self, message: RayMessage) -> None:
        record = message["record"]
        self._records[record["rank"]] = record
        path = record_path(self._spec.log_dir, record["rank"])
        self._folder.attempt(lambda: path.write_text(json.dumps(record)))

    def _handle_placed(self, message: RayMessage) -> None:
        self._doing = f"waiting for {message['placed']} workers to import torch and to join"

    def _handle_begun(self, message: RayMessage) -> None:
        self._attempt, self._world_size = message["begun"], message["world_size"]
        if self._attempt > 0:
            why = f"{self._failure}\n" if self._failure is not None else ""
            self._console.notice(
                f"{why}restart {self._attempt} with {self._world_size} rank{'s' * (self._world_size > 1)}"
            )
        self._failure = None
        self._forget_locations()
        self._records.clear()
        self._ends.clear()
        for rank in range(self._run.workers):
            record_path(self._spec.log_dir, rank).unlink(missing_ok=True)

    def _handle_location(self, message: RayMessage) -> None:
        self._locations[message["location"]] = WorkerLocation(message["host"], Path(message["board"]))

    def _handle_at(self, message: RayMessage) -> None:
        if message["rank"] in self._locations:
            self._locations[message["rank"]].step = message["at"]

    def _forget_locations(self) -> None:
        """Remove the folders of killed ranks of this machine, and forget all ranks."""
        for location in self._locations.values():
            if location.is_here:
                shutil.rmtree(location.heartbeats.parent.parent, ignore_errors=True)
        self._locations.clear()

    def _handle_lost(self, message: RayMessage) -> None:
        self._failure = self._explain(message["lost"])
        self._reminder = Reminder(time.monotonic(), (3.0, *MOMENTS))
        self._doing = "waiting for Ray to place the workers again"

    def _handle_ended(self, message: RayMessage) -> None:
        self._ends[message["rank"]] = message["ended"], message["host"]

    def _handle_files(self, message: RayMessage) -> None:
        """Write the files that a rank made on another node next to the payload, where the caller reads them."""
        assert isinstance(self._spec.target, CallTarget), "only a call has a payload"
        folder = Path(self._spec.target.payload).parent
        for name, content in message["files"].items():
            (folder / name).write_bytes(content)
        for name, size in message["left_out"].items():
            if not (folder / name).exists():  # a rank of this machine may have written it
                self._console.notice(f"{name} ({size >> 20} MB) on {message['host']} is too large to be sent back")

    # --- the end --------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        """Whether the run has ended, or has to be ended from here: a usage error, or a time limit that has passed."""
        if self._ended or self._given_up:
            return True
        if any(code == EXIT_USAGE for code, _ in self._ends.values()):
            self._failure = self._failure or self._explain({})
            return True
        limit = self._run.start_timeout
        if limit is not None and self._attempt < 0 and time.monotonic() - self._run.began > limit:
            why = f"no worker had started after {limit:g} s: {self._waiting()}."
            self._failure = FailureReport(cause=why, exit_code=1)
            return True
        return False

    def _result(self, error: str) -> LaunchResult:
        for rank, line in self._lines.rest():
            self._console.rank_output(rank, self._spec.label(rank), f"{line}\n")
        attempts = self._attempt + 1
        codes = [self._ends[rank][0] for rank in sorted(self._ends)]
        if self._requested is not None:
            outcome = stopped(self._requested, codes, "" if codes or self._attempt >= 0 else self._doing)
            return LaunchResult(outcome.exit_code, attempts, outcome.failure)
        failure = self._failure
        if failure is None and error:
            failure = self._explain({}) if self._records else FailureReport(cause=_in_short(error), exit_code=1)
        if failure is not None:
            return LaunchResult(failure.exit_code, attempts, failure)
        return LaunchResult(EXIT_PREEMPTED if EXIT_PREEMPTED in codes else 0, attempts)

    def _explain(self, lost: dict[int, str]) -> FailureReport:
        """Find the rank that failed first: by its error record where there is one, else by what Ray reports."""
        badly = {rank for rank, (code, _) in self._ends.items() if code not in SUCCESS_CODES}
        exits = [self._exit_of(rank) for rank in sorted({*self._records, *badly, *lost})]
        guilty = find_first_cause(exits)
        if guilty.record is None and guilty.rank not in badly:
            return self._lost_rank(guilty.rank, describe_death(lost[guilty.rank]))
        silent = set(range(self._world_size)) - {ended.rank for ended in exits}
        if guilty.lost_peer and silent:  # all that reported only lost a peer, so it is one that did not report
            return self._lost_rank(min(silent), "it left no error: its process was killed, or its node was lost")
        failure = explain(
            guilty,
            label=self._spec.label(guilty.rank),
            host=guilty.record["host"] if guilty.record else self._ends[guilty.rank][1],
            step=self._step(guilty.rank),
            killed_for_memory=False,
            log=log_path(self._spec.log_dir, guilty.rank),
        )
        return replace(failure, others_stopped=self._world_size - 1)

    def _lost_rank(self, rank: int, why: str) -> FailureReport:
        return FailureReport(
            cause=f"was lost: {why}",
            exit_code=128 + signal.SIGKILL,
            rank=rank,
            label=self._spec.label(rank),
            host=self._locations[rank].host if rank in self._locations else "",
            step=self._step(rank),
            others_stopped=self._world_size - 1,
            logs=str(log_path(self._spec.log_dir, rank)),
        )

    def _step(self, rank: int) -> int | None:
        return self._locations[rank].last_step(rank) if rank in self._locations else None

    def _exit_of(self, rank: int) -> RankExit:
        record = self._records.get(rank)
        code = record["exit_code"] if record is not None else self._ends.get(rank, (-signal.SIGKILL, ""))[0]
        return RankExit(rank, code, time.time(), record, log_tail(self._spec.log_dir, rank))

    # --- signals and reminders ------------------------------------------------------------------------------------

    def _stop_ranks(self, number: signal.Signals, grace: float) -> None:
        super()._stop_ranks(number, grace if self._attempt >= 0 else 0.0)

    def _signal_ranks(self, number: int) -> None:
        self._run.controller.ask_to_stop.remote(signal.Signals(number).name)

    def _kill_ranks(self) -> None:
        self._given_up = True

    def _check(self) -> None:
        now = time.monotonic()
        if self._reminder is not None and self._reminder.is_due(now):
            self._console.notice(f"{self._waiting()} for {duration_text(now - self._reminder.began)}")

    def _waiting(self) -> str:
        free = self._run.cluster.free()
        there = ", ".join(f"{free.get(name, 0.0):g} {name}" for name in self._run.resources)
        return f"{self._doing} (free at the moment: {there})"


_DEATHS = (
    ("node has died", "its node was lost"),
    ("out of memory", "its node ran out of memory, and Ray killed it"),
    ("memory pressure", "its node ran out of memory, and Ray killed it"),
    ("worker process has died", "its process was killed: by another process, or because memory ran out"),
)
"""Parts of Ray's messages about a dead worker, and what they mean."""


def describe_death(text: str) -> str:
    """Return in short how a worker died, from Ray's message."""
    lowered = text.lower()
    for mark, meaning in _DEATHS:
        if mark in lowered:
            return meaning
    return next((line.strip() for line in text.splitlines() if line.strip()), "Ray gives no reason")


def _in_short(error: str) -> str:
    return "\n".join(error.strip().splitlines()[:_DEATH_LINES])
