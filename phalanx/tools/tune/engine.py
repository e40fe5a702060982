"""The search: starts trials in a pool, follows them by one thread, gives verdicts in order of their numbers."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import selectors
import shutil
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from phalanx.errors import PreemptedError, UsageError
from phalanx.host.processes import SignalInbox
from phalanx.tools.tune.executor import Ending, Executor, Slot, TrialStart, control_of
from phalanx.tools.tune.record import Record, Tracking
from phalanx.tools.tune.results import LiveTable, PlainTable
from phalanx.tools.tune.schedulers import Points, Scheduler, decide
from phalanx.tools.tune.space import Search, SearchSpace
from phalanx.tools.tune.trainable import Trainable
from phalanx.tools.tune.trial import Objective, State, Trial

_POLL_SECONDS = 0.5


class Pool:
    """Runs trials in the free slots of an executor. `wait` returns when one has new events, or a signal has come."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._free = list(executor.slots)
        self._running: dict[int, tuple[Trial, SignalInbox, threading.Thread]] = {}
        self._ended: queue.SimpleQueue[tuple[Trial, Slot, Ending | BaseException]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._signals = SignalInbox()

    def __enter__(self) -> Pool:
        self._signals.__enter__()
        self._selector.register(self._signals, selectors.EVENT_READ)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Stop everything, also after an error."""
        self.stop(signal.SIGINT)
        self.stop(signal.SIGINT)
        for _, _, thread in list(self._running.values()):
            thread.join()
        self._selector.close()
        self._signals.__exit__(kind, error, frames)
        os.close(self._wake_read)
        os.close(self._wake_write)

    @property
    def has_room(self) -> bool:
        """Whether a trial can be started."""
        return bool(self._free)

    @property
    def running(self) -> list[Trial]:
        """The trials under way, by number."""
        return [self._running[number][0] for number in sorted(self._running)]

    def start(self, trial: Trial, points: Points | None, env: Mapping[str, str]) -> None:
        """Run a trial in a free slot."""
        signals = SignalInbox()
        start = TrialStart(trial, self._free.pop(0), points, env, signals, self._wake)
        thread = threading.Thread(target=self._work, args=(start,), name=f"trial-{trial.number}")
        self._running[trial.number] = (trial, signals, thread)
        thread.start()

    def _work(self, start: TrialStart) -> None:
        began = time.monotonic()
        ending: Ending | BaseException
        try:
            ending = self._executor.run(start)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            ending = error
        finally:
            start.signals.close()
        start.trial.seconds += time.monotonic() - began
        self._ended.put((start.trial, start.slot, ending))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: it wakes already
            os.write(self._wake_write, b"!")

    def wait(self) -> list[signal.Signals]:
        """Wait until a trial has new events; return the signals that this process received."""
        self._selector.select(_POLL_SECONDS)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        return self._signals.take()

    def ended(self) -> list[tuple[Trial, Ending]]:
        """Return the trials that have ended since the last call, by number."""
        pairs: list[tuple[Trial, Any]] = []
        while not self._ended.empty():
            trial, slot, ending = self._ended.get()
            self._running.pop(trial.number)[2].join()
            self._free.append(slot)
            self._free.sort(key=lambda free: free.number)
            pairs.append((trial, ending))
        for _, ending in pairs:
            if isinstance(ending, BaseException):
                raise ending
        return sorted(pairs, key=lambda pair: pair[0].number)

    def stop(self, number: signal.Signals) -> None:
        """Ask every trial to stop; SIGINT twice kills."""
        for _, signals, _ in self._running.values():
            signals.post(number)


@dataclass(frozen=True)
class SearchPlan:
    """Everything that a search is made of."""

    subject: Trainable
    space: SearchSpace
    objective: Objective
    search: Search
    executor: Executor
    folder: Path
    num_samples: int
    seed: int = 0
    tracking: Tracking = field(default_factory=Tracking)
    mode: str | None = None
    """Whether less or more of the metric is better, where that was given."""

    @property
    def total(self) -> int:
        """The number of trials."""
        return self.num_samples if self.search.size is None else min(self.num_samples, self.search.size)


class SearchEngine(ABC):
    """Starts trials, follows them, and records how they ended. Subclasses decide what runs next."""

    points: Points | None = None

    def __init__(self, plan: SearchPlan, record: Record, view: PlainTable | LiveTable) -> None:
        self.plan = plan
        self.record = record
        self.view = view
        self.trials = record.trials()
        self._stop_signal: signal.Signals | None = None

    def run(self) -> list[Trial]:
        """Search to the end; an interruption leaves a record from which the search can be resumed."""
        with Pool(self.plan.executor) as pool:
            while True:
                if self._stop_signal is None:
                    self.fill(pool)
                if not pool.running:
                    break
                self._handle_signals(pool.wait(), pool)
                for trial in pool.running:
                    trial.read_events()
                for trial, ending in pool.ended():
                    self._end(trial, ending)
                self.judge()
                self.view.show(self.trials)
        if self._stop_signal is not None:
            self._raise_stopped(self._stop_signal)
        return self.trials

    @abstractmethod
    def fill(self, pool: Pool) -> None:
        """Start the trials that may start now."""

    def judge(self) -> None:  # noqa: B027 - not every engine has verdicts
        """Give the verdicts that are known now."""

    @abstractmethod
    def outcome(self, trial: Trial, ending: Ending) -> State:
        """Return the state of a trial whose run ended without an error."""

    def start(self, trial: Trial, pool: Pool, *, stop_at: int | None = None) -> None:
        """Start a trial, or start it again; `stop_at`: the iteration after which it must stop."""
        trial.state = State.RUNNING
        trial.run_status = ""
        trial.folder.mkdir(parents=True, exist_ok=True)
        control = control_of(trial, self.points)
        if control is not None and stop_at is not None:
            control.stop_at(stop_at)
        elif control is not None:
            control.let_through(trial.iteration)
        pool.start(trial, self.points, self.plan.tracking.environment(trial))

    def close_trial(self, trial: Trial) -> None:
        """Record how a trial ended."""
        self.record.close_trial(trial)
        self.plan.tracking.close_trial(trial)

    def _end(self, trial: Trial, ending: Ending) -> None:
        trial.read_events()
        self._check_reached(trial)
        interrupted = self._stop_signal is not None and ending.exit_code != 0
        if interrupted and trial.stopped_at is None:
            trial.state = State.PAUSED
        elif ending.cause:
            trial.state, trial.cause = State.FAILED, ending.cause
        else:
            trial.state = self.outcome(trial, ending)
            if ending.stopped_on_request and trial.state is State.FINISHED:
                trial.state, trial.cause = State.FAILED, "stopped by another program (SIGTERM)"
            self._check_metric(trial)
        if trial.state.is_final:
            self.close_trial(trial)
            if trial.state is not State.FINISHED:  # its weights are of no use
                shutil.rmtree(trial.checkpoints, ignore_errors=True)

    def _check_reached(self, trial: Trial) -> None:
        """Raise where the script itself sets what is searched: every trial would be the same."""
        overruled = self.plan.subject.overruled(trial)
        if overruled:
            values = ", ".join(f"{name} (it was {value!r})" for name, value in overruled.items())
            raise UsageError(
                f"trial {trial.number}: the script sets {values} itself, and that wins",
                hint="Remove these arguments from the script: they come from the search.",
            )

    def _check_metric(self, trial: Trial) -> None:
        """Raise where no trial measures the metric; a single trial without a finite value has failed."""
        if self.plan.objective.settle(trial.returned, self.plan.mode):
            self.record.rewrite(self.trials, ending=trial)
            better = "more" if self.plan.objective.mode == "max" else "less"
            self.view.notice(f"metric: {self.plan.objective.metric}, the only one returned; {better} is better")
        objective, value = self.plan.objective, trial.value(self.plan.objective)
        if value is None and trial.state is State.FINISHED:
            if not self._is_measured(ending=trial):
                raise objective.missing(trial.last, f"trial {trial.number}")
            trial.state, trial.cause = State.FAILED, str(objective.missing(trial.last, "the trial").message)
        if value is not None and not math.isfinite(value):
            became = "NaN" if math.isnan(value) else "infinite"
            trial.state, trial.cause = (
                State.FAILED,
                f"{objective.metric} became {became} at iteration {trial.iteration}",
            )

    def _is_measured(self, ending: Trial) -> bool:
        """Whether another trial has measured the metric, or one that the search began with still may."""
        first = self.trials[: len(self.plan.executor.slots)]
        return any(trial.value(self.plan.objective) is not None for trial in self.trials) or any(
            trial is not ending and not trial.state.is_final for trial in first
        )

    def _handle_signals(self, numbers: list[signal.Signals], pool: Pool) -> None:
        for number in numbers:
            if number == signal.SIGUSR1:
                continue
            if self._stop_signal is None:
                self._stop_signal = number
                running = len(pool.running)
                self.view.notice(f"{number.name}: stopping {running} trial{'s' * (running > 1)} (again to kill)")
                pool.stop(signal.SIGTERM)
            else:
                pool.stop(signal.SIGINT)

    def _raise_stopped(self, number: signal.Signals) -> None:
        done = sum(trial.state.is_final for trial in self.trials)
        text = f"stopped after {done} of {self.plan.total} trials; nothing that was finished is lost"
        hint = f"To resume: the same command with --study-dir {self.plan.folder} --resume (resume=True in Python)."
        if number is signal.SIGINT:
            self.view.notice(f"{text}\n  {hint}")
            raise KeyboardInterrupt
        raise PreemptedError(text, hint=hint)


class IndependentTrials(SearchEngine):
    """Independent trials; a scheduler may stop some of them early."""

    def __init__(self, plan: SearchPlan, record: Record, view: PlainTable | LiveTable, scheduler: Scheduler) -> None:
        super().__init__(plan, record, view)
        self._scheduler = scheduler
        self.points = scheduler.points
        self.judge()

    def fill(self, pool: Pool) -> None:
        """Start interrupted trials first, then the next numbers."""
        while pool.has_room:
            halted = next((trial for trial in self.trials if trial.state is State.PAUSED), None)
            if halted is not None:
                self.start(halted, pool)
                continue
            # Never the result of a trial that might still run in another slot: the points would depend on speed.
            earlier = self.trials[: max(0, len(self.trials) - len(self.plan.executor.slots) + 1)]
            waits = self.plan.search.learns and not all(trial.state.is_final for trial in earlier)
            if len(self.trials) >= self.plan.total or waits:
                return
            trial = self.record.open_trial(self.plan.search.point(len(self.trials), earlier))
            self.trials.append(trial)
            self.start(trial, pool)

    def judge(self) -> None:
        """Let trials continue at their points, or stop them, the lower numbers first."""
        for trial in self.trials:
            control = control_of(trial, self.points)
            if trial.state.is_final or trial.stopped_at is not None or control is None:
                continue
            continues = decide(trial, self.trials[: trial.number], self._scheduler, self.plan.objective)
            if continues and trial.state is State.RUNNING and trial.iteration:
                control.let_through(trial.iteration)
            elif continues is False and trial.state is State.RUNNING:
                control.stop_at(trial.iteration)
            elif continues is False:  # an interruption came between its report and the verdict
                trial.state = State.STOPPED
                self.close_trial(trial)

    def outcome(self, trial: Trial, ending: Ending) -> State:
        """Return STOPPED for a trial that was stopped, unless the verdict came when it had ended."""
        stopped = ending.stopped_on_request or trial.run_status == "stopped"
        return State.STOPPED if trial.stopped_at is not None and stopped else State.FINISHED
