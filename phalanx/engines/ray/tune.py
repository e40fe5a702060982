"""Trials of a search on a Ray cluster: an actor per trial, placed by Ray with the CPUs and GPUs of its ranks.

The search itself runs in the process that started it. Every node sees the study's folder: reports and verdicts pass
through the trial's files there, as on one node.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from phalanx.engines.ray.cluster import check_resources, open_cluster
from phalanx.engines.ray.follow import describe_death
from phalanx.errors import EXIT_PREEMPTED, UsageError
from phalanx.host.processes import SignalInbox
from phalanx.tools.tune.executor import Ending, Executor, Slot, Slots, TrialStart, run_trial, slots_text
from phalanx.tools.tune.trainable import Trainable

if TYPE_CHECKING:
    from phalanx.tools.tune.search import SearchRequest

_POLL_SECONDS = 0.1


@contextmanager
def open_executor(subject: Trainable, request: SearchRequest, notice: Callable[[str], None]) -> Iterator[Executor]:
    """Connect to the cluster of a search, or start a local Ray for it."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("engine = 'ray' needs Ray, which is not installed", hint="Run: pip install 'phalanx[ray]'")
    config = subject.resolved.config
    ranks = config.total_ranks or 1
    needed = {"CPU": float(ranks)}
    num_cpus = max(len(os.sched_getaffinity(0)), ranks * (request.parallel or 1))
    with open_cluster(request.address, num_cpus=num_cpus, notice=notice) as cluster:
        if config.device != "cpu" and any(node.get("GPU") for node in cluster.nodes()):
            needed["GPU"] = ranks / request.trials_per_gpu
        count = check_resources(cluster, needed, noun="trials")
        if request.num_gpus is not None and "GPU" in needed:
            count = min(count, max(1, int(request.num_gpus / needed["GPU"] + 1e-9)))
        count = min(count, request.parallel or count)
        slots = tuple(Slot(number) for number in range(count))
        summary = slots_text(count, f"on {cluster.name}", ranks)
        yield RayExecutor(subject, Slots(slots, config.threads_per_rank or 1, summary), needed)


class RayExecutor(Executor):
    """Runs each trial in an actor; one that Ray cannot place at once waits for resources."""

    def __init__(self, subject: Trainable, slots: Slots, needed: dict[str, float]) -> None:
        super().__init__(subject, slots)
        self._needed = needed

    def run(self, start: TrialStart) -> Ending:
        """Run a trial to its end; stop requests are passed on to it."""
        import cloudpickle
        import ray

        work = self.subject, start.trial, start.points, dict(start.env), self.threads_per_rank
        # DEFAULT: not in the placement group of a Tune trial that this process may belong to.
        options = {"max_concurrency": 2, "scheduling_strategy": "DEFAULT"}
        resources = {"num_cpus": self._needed["CPU"], "num_gpus": self._needed.get("GPU", 0.0)}
        actor: Any = ray.remote(TrialActor).options(**options, **resources).remote(sys.path, os.getcwd())
        placed, result = actor.ready.remote(), actor.run.remote(cloudpickle.dumps(work))
        try:
            while not ray.wait([result], timeout=_POLL_SECONDS)[0]:
                for number in start.signals.take():
                    if not ray.wait([placed], timeout=0)[0]:
                        return Ending(EXIT_PREEMPTED)
                    actor.post.remote(int(number))
                start.wake()  # the trial's events are written on another node: the search looks for them
            ending: Ending = ray.get(result)
            return ending
        except ray.exceptions.RayActorError as error:
            return Ending(1, f"its worker was lost: {describe_death(str(error))}")
        except ray.exceptions.RayTaskError as error:
            return Ending(1, (str(error).strip().splitlines() or ["its worker failed"])[-1])
        finally:
            ray.kill(actor)


class TrialActor:
    """Runs one trial on a node of the cluster; finds modules and relative paths as the search's process does."""

    def __init__(self, path: list[str], folder: str) -> None:
        sys.path += [entry for entry in path if entry not in sys.path]
        os.chdir(folder)
        self._signals = SignalInbox()

    def ready(self) -> None:
        """Return once the actor has been placed."""

    def run(self, packed: bytes) -> Ending:
        """Run the trial to its end."""
        import ray

        subject, trial, points, env, threads_per_rank = pickle.loads(packed)
        slot = Slot(0, tuple(range(len(ray.get_gpu_ids()))))
        return run_trial(subject, TrialStart(trial, slot, points, env, self._signals), threads_per_rank)

    def post(self, number: int) -> None:
        """Pass a stop request on to the trial, as the signal that the search's process received."""
        self._signals.post(signal.Signals(number))
