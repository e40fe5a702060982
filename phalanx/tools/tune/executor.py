"""Where trials run: the interface of an executor, this machine's processes as one, and how many run at once."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.config import DistributedConfig
from phalanx.config.option import limited
from phalanx.errors import EXIT_PREEMPTED, PhalanxError, UsageError, error_line, first_line
from phalanx.host.gpus import count_gpus
from phalanx.host.processes import SignalInbox
from phalanx.launch import LaunchResult, launch
from phalanx.launch.error_file import read_record
from phalanx.observe.guard import Guard, Streams, say_to_user
from phalanx.observe.trial_control import CONTROL, TrialControl
from phalanx.run.preflight import check_packages
from phalanx.run.spec import launch_spec
from phalanx.tools.tune.schedulers import Points
from phalanx.tools.tune.trainable import Trainable
from phalanx.tools.tune.trial import RESUMES_AFTER, Trial
from phalanx.world.mesh import plan_layout

_OUT_OF_MEMORY = {"OutOfMemoryError", "MemoryError"}
_KILLED = 137


@dataclass(frozen=True)
class Ending:
    """How a trial's run ended."""

    exit_code: int
    cause: str = ""
    """Why it failed; empty where it did not."""

    @property
    def stopped_on_request(self) -> bool:
        """Whether it stopped because it was asked to."""
        return self.exit_code == EXIT_PREEMPTED


@dataclass(frozen=True)
class Slot:
    """Room for one trial."""

    number: int
    gpus: tuple[int, ...] = ()

    def environment(self) -> dict[str, str]:
        """Return the variable that lets the trial see only its GPUs."""
        if not self.gpus:
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else None
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] if names else str(gpu) for gpu in self.gpus)}


@dataclass(frozen=True)
class Slots:
    """All slots, and the compute threads per rank."""

    slots: tuple[Slot, ...]
    threads_per_rank: int | None
    summary: str


@limited(trials_per_gpu={"minimum": 1}, parallel={"minimum": 1}, num_gpus={"minimum": 1})
def plan_slots(
    config: DistributedConfig,
    *,
    num_gpus: int | None = None,
    trials_per_gpu: int = 1,
    parallel: int | None = None,
    gpus_here: int | None = None,
) -> Slots:
    """Divide this machine into slots; `parallel` sets how many run at once."""
    here = count_gpus() if gpus_here is None else gpus_here
    ranks = config.total_ranks or 1
    if config.device == "cpu" or here == 0:
        return _on_cpu(config, ranks, parallel, asked_gpus=num_gpus)
    if num_gpus is not None and num_gpus > here:
        raise UsageError(
            f"num_gpus = {num_gpus}, but this machine has {here} GPU{'s' * (here > 1)}",
            hint=f"Write num_gpus={here}, or search on a Ray cluster that has them: engine='ray', address='ray://...'.",
        )
    usable = num_gpus or here
    if ranks > usable:
        raise UsageError(f"a trial of {ranks} ranks needs {ranks} GPUs, but {usable} are there")
    most = usable // ranks * trials_per_gpu
    count = parallel or most
    if count > most:
        raise UsageError(
            f"parallel = {count} trials at once need {count * ranks} GPUs, but {usable} are there",
            hint=f"Write parallel={most}, or let trials share GPUs: trials_per_gpu={-(-count * ranks // usable)}.",
        )
    groups = usable // ranks  # consecutive slots have different GPUs: the first trials spread over all of them
    slots = tuple(Slot(n, tuple(range(n % groups * ranks, (n % groups + 1) * ranks))) for n in range(count))
    return Slots(slots, config.threads_per_rank, slots_text(count, f"on {usable} GPU{'s' * (usable > 1)}", ranks))


def _on_cpu(config: DistributedConfig, ranks: int, parallel: int | None, asked_gpus: int | None) -> Slots:
    cores = len(os.sched_getaffinity(0))
    count = parallel or max(1, cores // ranks)
    threads = config.threads_per_rank
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, cores // (count * ranks))
    missing = " (no GPU was found)" if asked_gpus else ""
    return Slots(
        tuple(Slot(number) for number in range(count)),
        threads,
        slots_text(count, f"on {cores} CPU core{'s' * (cores > 1)}{missing}", ranks),
    )


def slots_text(count: int, where: str, ranks: int) -> str:
    """Say how many trials run at once, and where."""
    ranks_each = f", {ranks} ranks each" if ranks > 1 else ""
    return f"{count} trial{'s' * (count > 1)} at once {where}{ranks_each}"


@dataclass(frozen=True)
class TrialStart:
    """A trial, and what it needs to run."""

    trial: Trial
    slot: Slot
    points: Points | None
    """The iterations at which it waits for a verdict."""
    env: Mapping[str, str]
    """Variables for its ranks, added to those of the process that starts them."""
    signals: SignalInbox
    """Stop requests for it; closed by the caller."""
    wake: Callable[[], None] = lambda: None
    """Called where the trial has new events."""


class Executor(ABC):
    """Runs trials in slots. Points, verdicts, record and table belong to the search, wherever its trials run."""

    def __init__(self, subject: Trainable, slots: Slots) -> None:
        self.subject = subject
        self.slots = slots.slots
        self.threads_per_rank = slots.threads_per_rank
        self.summary = slots.summary

    @abstractmethod
    def run(self, start: TrialStart) -> Ending:
        """Run a trial to its end, and return how it ended; called in a separate thread per trial."""


class LocalExecutor(Executor):
    """Runs trials as launches of this process."""

    def run(self, start: TrialStart) -> Ending:
        """Run a trial to its end."""
        return run_trial(self.subject, start, self.threads_per_rank)


class TrialConsole:
    """Shows nothing: a trial's output is in its logs, and its events only wake the thread that follows it."""

    def __init__(self, trial: Trial, wake: Callable[[], None]) -> None:
        self._notices = trial.folder / "launcher.log"
        self._guard = Guard(str(self._notices), say_to_user)
        self._wake = wake
        self.streams = Streams()

    def rank_output(self, rank: int, label: str, text: str, *, err: bool = False) -> None:
        """Do nothing: the log has it."""

    def handle(self, event: dict[str, Any]) -> None:
        """Wake the follower where the trial's events.jsonl has new metrics."""
        if event.get("event") in ("epoch", "metrics", "run_ended"):
            self._wake()

    def notice(self, text: str) -> None:
        """Write the launcher's messages to the trial's folder."""

        def keep() -> None:
            with self._notices.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")

        self._guard.attempt(keep)


def control_of(trial: Trial, points: Points | None) -> TrialControl | None:
    """Return the file through which a trial receives its scheduler's verdicts."""
    if points is None:
        return None
    return TrialControl(trial.folder.absolute() / "control.json", points.at, points.first, points.every)


def run_trial(subject: Trainable, start: TrialStart, threads_per_rank: int | None) -> Ending:
    """Start the trial's ranks, wait for their end, and return how it ended; errors are returned, not raised."""
    trial, slot = start.trial, start.slot
    trial.folder.mkdir(parents=True, exist_ok=True)
    try:
        parts = subject.parts(trial)
        config = parts.config
        if threads_per_rank is not None:
            config = config.with_trusted(threads_per_rank=threads_per_rank)
        layout = plan_layout(config, len(slot.gpus))
        check_packages(config)
        extra = {"PHALANX_TRIAL": str(trial.number), "PHALANX_DEVICE": layout.device, **slot.environment()}
        extra[RESUMES_AFTER] = str(trial.resumes_after)
        if (control := control_of(trial, start.points)) is not None:
            extra[CONTROL] = control.to_text()
        env = {**start.env, **parts.env, **extra}
        spec = launch_spec(config, layout, parts.target, trial.folder / "logs", env=env)
        return explain(launch(spec, TrialConsole(trial, start.wake), start.signals), trial)
    except PhalanxError as error:
        return Ending(error.exit_code, str(error.message))


def explain(result: LaunchResult, trial: Trial) -> Ending:
    """Return a launch's end with its cause as one sentence, equal for equal causes."""
    code, failure = result.exit_code, result.failure
    if failure is None:
        return Ending(code, "" if code in (0, EXIT_PREEMPTED) else f"ended with exit code {code}")
    record = None if failure.rank is None else read_record(trial.folder / "logs", failure.rank)
    if record is None:
        return Ending(code, f"out of memory, or killed: a rank {failure.cause}" if code == _KILLED else failure.cause)
    text = first_line(record["message"])
    if record["type"] in _OUT_OF_MEMORY:
        return Ending(code, f"out of memory: {text}")
    # Without a traceback it is a mistake that its message explains.
    return Ending(code, error_line(record["type"], text) if record["traceback"] else text)
