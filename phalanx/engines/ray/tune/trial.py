"""A trial on Ray: Phalanx's runner inside Ray Tune's worker, which also decides whether the trial continues.

All machines see the study's folder, so each worker reads there what earlier trials reported. A verdict waits for the
trials with lower numbers, as on the local engine, so it does not depend on which trial runs faster.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.engines.ray.tune.record import NUMBER, folder_of, forget_end, note_end, number_of, read_point, read_up
from phalanx.errors import TrialFailedError
from phalanx.host.signals import SignalInbox
from phalanx.tools.tune.objective import Objective
from phalanx.tools.tune.population import copy_checkpoints
from phalanx.tools.tune.runner import Ending, control_of, nonfinite, run_trial
from phalanx.tools.tune.schedulers import Points, Scheduler, decide, undecided
from phalanx.tools.tune.slots import Slot
from phalanx.tools.tune.space import SearchSpace
from phalanx.tools.tune.tracking import Tracking
from phalanx.tools.tune.trainable import Trainable
from phalanx.tools.tune.trial import State, Trial


class TrialDecider:
    """Lets one trial pass its points, or stops it."""

    def __init__(self, trial: Trial, scheduler: Scheduler, objective: Objective, folder: str) -> None:
        assert scheduler.points is not None, "there is no judge without points"
        gate = control_of(trial, scheduler.points)
        assert gate is not None, "there are points, so there is a gate"
        self._trial, self._scheduler, self._objective = trial, scheduler, objective
        self._gate = gate
        self._others = [Trial(number, {}, folder_of(folder, number)) for number in range(trial.number)]
        self._gate.let_through(trial.iteration)

    def judge(self) -> None:
        """Decide at the current point, if that is possible now."""
        trial = self._trial
        if undecided(trial, self._scheduler, self._objective):
            # The others' verdicts first, lower numbers first: reports after one that gives up do not count.
            for other in self._others:
                read_up(other)
                if not other.state.is_final and other.stopped_at is None:
                    decide(other, self._others[: other.number], self._scheduler, self._objective)
        goes_on = decide(trial, self._others, self._scheduler, self._objective)
        if goes_on is False:
            self._gate.stop_at(trial.iteration)
        elif goes_on and trial.iteration:
            self._gate.let_through(trial.iteration)


ITERATION, ENDED = "iteration", "ended"
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Work:
    """What every trial's worker needs to know."""

    subject: Trainable
    space: SearchSpace
    objective: Objective
    folder: str
    points: tuple[dict[str, Any], ...]
    """The trials' points where they are known beforehand."""
    scheduler: Scheduler = field(default_factory=Scheduler)
    """Decides which trials continue, except in population-based training, where Ray does."""
    interval: int | None = None
    """Population-based training: iterations between exchanges."""
    threads_per_rank: int | None = None
    tracking: Tracking = field(default_factory=Tracking)

    def params(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the point that Ray's config stands for."""
        if "params" in config:  # a member that took over another's
            return dict(config["params"])
        return self.point(config["point"] if "point" in config else config[NUMBER])

    def point(self, number: int) -> dict[str, Any]:
        """Return a trial's point, as it began; empty for one that has none yet."""
        if self.points:
            return dict(self.points[number])
        return read_point(self.folder, number, self.space) or {}

    def trial(self, number: int) -> Trial:
        """Return a trial as its folder describes it."""
        trial = Trial(number, self.point(number), folder_of(self.folder, number))
        read_up(trial)
        return trial


def pack(work: Work) -> dict[str, Any]:
    """Return what is sent to the workers: they find modules and relative paths as this process does."""
    import cloudpickle

    return {"work": cloudpickle.dumps(work), "path": list(sys.path), "folder": os.getcwd()}


def run_in_worker(config: dict[str, Any], packed: dict[str, Any]) -> None:
    """Run the trial as Ray Tune's function, and pass every report to Ray."""
    from ray import tune

    sys.path += [entry for entry in packed["path"] if entry not in sys.path]
    os.chdir(packed["folder"])
    work: Work = pickle.loads(packed["work"])
    began, number = time.monotonic(), number_of(tune.get_context().get_trial_id(), config)
    trial = Trial(number, work.params(config), folder_of(work.folder, number))
    trial.folder.mkdir(parents=True, exist_ok=True)
    forget_end(trial)
    trial.read_events()
    checkpoint = tune.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as found:
            copy_checkpoints(Path(found), trial.checkpoints)
    try:
        (_run_in_slices if work.interval is not None else _run_and_follow)(trial, work)
    except TrialFailedError as error:
        trial.state, trial.cause = State.FAILED, error.message
        raise
    finally:  # one that Ray takes back is unfinished
        trial.seconds = time.monotonic() - began
        if trial.state.is_final:
            note_end(trial)


def _run_and_follow(trial: Trial, work: Work) -> None:
    """Run the trial in one piece; at the points of its scheduler it waits for the verdict."""
    decider = None
    if work.scheduler.points is not None:
        decider = TrialDecider(trial, work.scheduler, work.objective, work.folder)
    known = set(trial.reports)
    running = _Running(trial, work, work.scheduler.points)
    try:
        while not running.wait():
            trial.read_events()
            if decider is not None and trial.stopped_at is None:
                decider.judge()
            _report_new(trial, work, known)
        _report_new(trial, work, known)
    except BaseException:
        running.stop()
        raise
    left_early = running.ending.stopped_on_request or trial.run_status == "stopped"
    if trial.stopped_at is not None and left_early:
        trial.state = State.STOPPED
    else:
        _close(trial, work, running.ending)


def _run_in_slices(trial: Trial, work: Work) -> None:
    """Run from one exchange to the next; at each, give Ray a checkpoint from which another trial may continue."""
    from ray import tune

    assert work.interval is not None, "a population has an interval"
    points = Points(None, 1, work.interval)
    gate = control_of(trial, points)
    assert gate is not None, "there are points, so there is a gate"
    while True:
        boundary = (trial.iteration // work.interval + 1) * work.interval
        gate.stop_at(boundary)
        trial.run_status = ""
        running = _Running(trial, work, points)
        try:
            while not running.wait():
                continue
        except BaseException:
            running.stop()
            raise
        trial.read_events()
        ending = running.ending
        if ending.cause or not (ending.stopped_on_request or trial.run_status == "stopped"):
            _close(trial, work, ending)
            return
        kept = tune.Checkpoint.from_directory(str(trial.checkpoints))
        tune.report(_metrics(trial, trial.iteration, work), checkpoint=kept)


def _report_new(trial: Trial, work: Work, known: set[int]) -> None:
    from ray import tune

    trial.read_events()
    for iteration in sorted(set(trial.reports) - known):
        known.add(iteration)
        metrics = _metrics(trial, iteration, work)
        if work.objective.metric in metrics:
            tune.report(metrics)


def _metrics(trial: Trial, iteration: int, work: Work) -> dict[str, Any]:
    found: dict[str, Any] = {**trial.reports[iteration], ITERATION: iteration, "steps": trial.steps}
    value = work.objective.value(trial.reports[iteration])
    return found if value is None else found | {work.objective.metric: value}


def _close(trial: Trial, work: Work, ending: Ending) -> None:
    """Report to Ray that the trial has finished, or raise its failure."""
    from ray import tune

    trial.read_events()
    if ending.cause:
        raise TrialFailedError(ending.cause)
    value = trial.value(work.objective)
    if value is None:
        raise TrialFailedError(work.objective.missing(trial.last, f"trial {trial.number}").message)
    if value != value or value in (float("inf"), float("-inf")):
        raise TrialFailedError(nonfinite(work.objective.metric, value, trial.iteration))
    last = {**trial.last, work.objective.metric: value, ITERATION: trial.iteration, "steps": trial.steps}
    tune.report({**last, ENDED: True})
    trial.state = State.FINISHED


class _Running:
    """A trial's launch in a separate thread: Ray must be able to stop its own thread."""

    def __init__(self, trial: Trial, work: Work, points: Points | None) -> None:
        self._signals = SignalInbox()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ending: Ending | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(trial, work, points), name="trial")
        self._thread.start()

    def _run(self, trial: Trial, work: Work, points: Points | None) -> None:
        import ray

        slot = Slot(0, tuple(range(len(ray.get_gpu_ids()))))
        try:
            self._ending = run_trial(
                work.subject, trial, slot, points=points, threads_per_rank=work.threads_per_rank,
                env=work.tracking.environment(trial),
                wake=lambda: self._bell.put(None), signals=self._signals,
            )  # fmt: skip
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            self._error = error
        finally:
            self._signals.close()
            self._bell.put(None)

    def wait(self) -> bool:
        """Wait for an event or half a second; return whether the trial has ended."""
        try:
            self._bell.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return False
        return not self._thread.is_alive() or self._ending is not None or self._error is not None

    def stop(self) -> None:
        """End the trial, and wait for its end."""
        self._signals.post(signal.SIGTERM)
        self._thread.join()

    @property
    def ending(self) -> Ending:
        """How the trial ended."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._ending is not None, "a launch either ends or raises"
        return self._ending
