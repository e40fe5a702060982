"""The engine that needs no cluster: trials on this machine, watched from one thread, each verdict given in order."""

from __future__ import annotations

import functools
import math
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from phalanx.errors import PreemptedError, UsageError
from phalanx.observe.control import TrialControl
from phalanx.tune.objective import Objective
from phalanx.tune.pool import Pool
from phalanx.tune.record import Record
from phalanx.tune.runner import Ending, gate_of, nonfinite, run_trial
from phalanx.tune.schedulers import Points, Scheduler, decide
from phalanx.tune.slots import Slots
from phalanx.tune.space import SearchSpace
from phalanx.tune.suggest import Search
from phalanx.tune.tracking import NoTracking, Tracking
from phalanx.tune.trainable import Trainable
from phalanx.tune.trial import State, Trial


class SearchView(Protocol):
    """Where the search is shown."""

    def show(self, trials: Sequence[Trial]) -> None:
        """Show how the trials stand."""

    def notice(self, text: str) -> None:
        """Say something."""


@dataclass(frozen=True)
class SearchPlan:
    """Everything that a search is made of."""

    subject: Trainable
    space: SearchSpace
    objective: Objective
    search: Search
    slots: Slots
    folder: Path
    num_samples: int
    seed: int = 0
    tracking: Tracking = field(default_factory=NoTracking)
    mode: str | None = None
    """Whether less or more of the metric is better, where that was said."""

    @property
    def total(self) -> int:
        """How many trials there will be."""
        return self.num_samples if self.search.size is None else min(self.num_samples, self.search.size)


class SearchEngine(ABC):
    """Starts trials, follows them, and records how they ended. What runs next is the subclass's affair."""

    points: Points | None = None

    def __init__(self, plan: SearchPlan, record: Record, view: SearchView) -> None:
        self.plan = plan
        self.record = record
        self.view = view
        self.trials = record.trials()
        self._told_to_stop: signal.Signals | None = None

    def run(self) -> list[Trial]:
        """Search to the end; an interruption leaves a record from which the search can go on."""
        run = functools.partial(
            run_trial, self.plan.subject, points=self.points, threads_per_rank=self.plan.slots.threads_per_rank
        )  # fmt: skip
        with Pool(self.plan.slots.places, run) as pool:
            while True:
                if self._told_to_stop is None:
                    self.fill(pool)
                if not pool.running:
                    break
                self._take_signals(pool.wait(), pool)
                self._follow(pool)
                self.view.show(self.trials)
        if self._told_to_stop is not None:
            self._leave()
        return self.trials

    @abstractmethod
    def fill(self, pool: Pool) -> None:
        """Start what may be started now."""

    def judge(self) -> None:  # noqa: B027 - not every engine has any
        """Give the verdicts that can be given now."""

    @abstractmethod
    def outcome(self, trial: Trial, ending: Ending) -> State:
        """Return how a trial stands whose run ended well."""

    def start(self, trial: Trial, pool: Pool, *, stop_at: int | None = None) -> None:
        """Start a trial, or start it again; `stop_at`: the iteration after which it is to leave."""
        trial.state = State.RUNNING
        trial.run_status = ""
        trial.folder.mkdir(parents=True, exist_ok=True)
        gate = gate_of(trial, self.points)
        if gate is not None and stop_at is not None:
            gate.stop_at(stop_at)
        elif gate is not None:
            gate.let_through(trial.iteration)
        pool.start(trial, env=self.plan.tracking.environment(trial))

    def close_trial(self, trial: Trial) -> None:
        """Record how a trial ended."""
        self.record.close_trial(trial)
        self.plan.tracking.close_trial(trial)

    def _follow(self, pool: Pool) -> None:
        for trial in pool.running:
            trial.read_events()
        for trial, ending in pool.ended():
            self._end(trial, ending)
        self.judge()

    def _end(self, trial: Trial, ending: Ending) -> None:
        trial.read_events()
        self._check_reached(trial)
        interrupted = self._told_to_stop is not None and ending.exit_code != 0
        if interrupted and trial.stopped_at is None:
            trial.state = State.PAUSED
        elif ending.cause:
            trial.state, trial.cause = State.FAILED, ending.cause
        else:
            trial.state = self.outcome(trial, ending)
            if ending.was_told_to and trial.state is State.FINISHED:
                trial.state, trial.cause = State.FAILED, "told to stop by somebody else (SIGTERM)"
            self._check_metric(trial)
        if trial.state.is_final:
            self.close_trial(trial)
            if trial.state is not State.FINISHED:  # a bad trial's weights are nobody's
                shutil.rmtree(trial.checkpoints, ignore_errors=True)

    def _check_reached(self, trial: Trial) -> None:
        """Refuse to search over what the script sets itself: every trial would be the same."""
        overruled = self.plan.subject.overruled(trial)
        if overruled:
            told = ", ".join(f"{name} (it was {value!r})" for name, value in overruled.items())
            raise UsageError(
                f"trial {trial.number}: the script sets {told} itself, and that wins",
                hint="Take these arguments out of the script's own call: they come from the search.",
            )

    def _check_metric(self, trial: Trial) -> None:
        """Refuse a search for what no trial measures; one that alone lacks it, or has no number, has failed."""
        if self.plan.objective.settle(trial.returned, self.plan.mode):
            self.record.begin_again(self.trials, besides=trial)
            better = "more" if self.plan.objective.mode == "max" else "less"
            self.view.notice(f"metric: {self.plan.objective.metric}, the only one returned; {better} is better")
        objective, value = self.plan.objective, trial.value(self.plan.objective)
        if value is None and trial.state is State.FINISHED:
            if not self._is_measured(besides=trial):
                raise objective.missing(trial.last, f"trial {trial.number}")
            trial.state, trial.cause = State.FAILED, str(objective.missing(trial.last, "the trial").message)
        if value is not None and not math.isfinite(value):
            trial.state, trial.cause = State.FAILED, nonfinite(objective.metric, value, trial.iteration)

    def _is_measured(self, besides: Trial) -> bool:
        """Whether another trial has measured the metric, or one that the search began with still may."""
        began_with = self.trials[: len(self.plan.slots.places)]
        return any(trial.value(self.plan.objective) is not None for trial in self.trials) or any(
            trial is not besides and not trial.state.is_final for trial in began_with
        )

    def _take_signals(self, numbers: list[signal.Signals], pool: Pool) -> None:
        for number in numbers:
            if number == signal.SIGUSR1:
                continue
            if self._told_to_stop is None:
                self._told_to_stop = number
                running = len(pool.running)
                self.view.notice(f"{number.name}: stopping {running} trial{'s' * (running > 1)} (again to kill)")
                pool.stop(signal.SIGTERM)
            else:
                pool.stop(signal.SIGINT)

    def _leave(self) -> None:
        done = sum(trial.state.is_final for trial in self.trials)
        said = f"stopped after {done} of {self.plan.total} trials; nothing that was finished is lost"
        hint = f"To go on: the same command with --study-dir {self.plan.folder} --resume (resume=True in Python)."
        if self._told_to_stop is signal.SIGINT:
            self.view.notice(f"{said}\n  {hint}")
            raise KeyboardInterrupt
        raise PreemptedError(said, hint=hint)


class IndependentTrials(SearchEngine):
    """Trials that each run by themselves, some of them given up on the way."""

    def __init__(self, plan: SearchPlan, record: Record, view: SearchView, scheduler: Scheduler) -> None:
        super().__init__(plan, record, view)
        self._scheduler = scheduler
        self.points = scheduler.points
        self.judge()

    def fill(self, pool: Pool) -> None:
        """Start the interrupted first, then the next numbers."""
        while pool.has_room:
            halted = next((trial for trial in self.trials if trial.state is State.PAUSED), None)
            if halted is not None:
                self.start(halted, pool)
            elif len(self.trials) < self.plan.total and self._may_ask(len(self.trials)):
                trial = self.record.open_trial(self.plan.search.point(len(self.trials), self._known()))
                self.trials.append(trial)
                self.start(trial, pool)
            else:
                return

    def _known(self) -> list[Trial]:
        """Return the trials from which the next point may be learnt: never one that might still run elsewhere."""
        return self.trials[: max(0, len(self.trials) - len(self.plan.slots.places) + 1)]

    def _may_ask(self, number: int) -> bool:
        return not self.plan.search.learns or all(trial.state.is_final for trial in self._known())

    def judge(self) -> None:
        """Let trials pass their points, or give them up, the lower numbers first."""
        for trial in self.trials:
            if not trial.state.is_final and trial.stopped_at is None and self.points is not None:
                self._judge(trial, self.points)

    def _judge(self, trial: Trial, points: Points) -> None:
        gate = gate_of(trial, points)
        assert gate is not None, "there are points, so there is a gate"
        goes_on = decide(trial, self.trials[: trial.number], self._scheduler, self.plan.objective)
        if goes_on is False:
            self._give_up(trial, gate)
        elif goes_on and trial.state is State.RUNNING and trial.iteration:
            gate.let_through(trial.iteration)

    def _give_up(self, trial: Trial, gate: TrialControl) -> None:
        if trial.state is State.RUNNING:
            gate.stop_at(trial.iteration)
        else:  # an interruption came between its report and the verdict
            trial.state = State.STOPPED
            self.close_trial(trial)

    def outcome(self, trial: Trial, ending: Ending) -> State:
        """A trial that was given up is stopped, unless the verdict came at its own end."""
        left_early = ending.was_told_to or trial.run_status == "stopped"
        return State.STOPPED if trial.stopped_at is not None and left_early else State.FINISHED
