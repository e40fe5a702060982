"""Search on Ray Tune: Ray places the trials on its cluster; each runs and is judged as on the local engine."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.engines.ray.address import check_address
from phalanx.engines.ray.cluster import check_resources, open_cluster
from phalanx.engines.ray.tune.record import NUMBER, marking_callback, number_of
from phalanx.engines.ray.tune.table import show_callback, shown_on
from phalanx.engines.ray.tune.trial import ITERATION, Work, pack, run_in_worker
from phalanx.errors import UsageError
from phalanx.tools.tune.objective import Objective
from phalanx.tools.tune.results import Results
from phalanx.tools.tune.schedulers import make_scheduler
from phalanx.tools.tune.search import DEFAULT_SAMPLES, SearchRequest, conclude, study_folder
from phalanx.tools.tune.space import SearchSpace
from phalanx.tools.tune.suggest import make_search
from phalanx.tools.tune.table import LiveTable, PlainTable, open_table
from phalanx.tools.tune.tracking import Tracking, open_tracking
from phalanx.tools.tune.trainable import Trainable
from phalanx.tools.tune.trial import Trial

EXPERIMENT = "ray"
"""Ray's own folder within that of the search."""


def check_ray() -> None:
    """Refuse to search where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("engine = 'ray' needs Ray, which is not installed", hint="Run: pip install 'phalanx[ray]'")


def search(subject: Trainable, space: SearchSpace, objective: Objective, request: SearchRequest) -> Results:
    """Run a search by Ray Tune, as `tune.search.search` does on local ranks."""
    check_ray()
    if request.address is not None:  # before a folder is made
        check_address(request.address)
    size = make_search("grid", space, 0, objective).size if request.search == "grid" else None
    asked = request.num_samples or size or DEFAULT_SAMPLES
    total = asked if size is None else min(asked, size)
    folder = study_folder(request, subject.name, mark=f"{EXPERIMENT}/tuner.pkl")
    tracking = open_tracking(subject.resolved.config, subject.name, objective, folder)
    table = open_table(objective, progress=subject.resolved.config.progress)
    trials: list[Trial] = []
    results = None
    try:
        try:
            table.notice(f"{total} trials of {subject.name} by Ray Tune; {folder}")
            table.progress.begin(total)
            trials = run_on_ray(subject, space, objective, request, folder, total, table, tracking)
        finally:
            table.close(trials)
        for trial in trials:
            tracking.close_trial(trial)
        results = conclude(trials, space, objective, subject, folder, table)
    finally:
        tracking.close(results)
    return results


def run_on_ray(
    subject: Trainable,
    space: SearchSpace,
    objective: Objective,
    request: SearchRequest,
    folder: Path,
    total: int,
    table: PlainTable | LiveTable,
    tracking: Tracking,
) -> list[Trial]:
    """Run the trials by Ray Tune and return them."""
    if request.resume:
        total = max(total, sum(1 for _ in folder.glob("trials/*")))  # it may be asked for fewer than it had
    work = _work(subject, space, objective, request, folder, total, tracking)
    numbers = _unfinished(work, total)
    if len(numbers) < total:
        table.notice(f"{total - len(numbers)} of them are done already")
    if numbers:
        needed = {"CPU": float(subject.resolved.config.total_ranks or 1)}
        is_population = request.scheduler == "pbt"
        at_once = total if is_population else request.trials or 1
        num_cpus = max(len(os.sched_getaffinity(0)), needed["CPU"] * at_once)
        with open_cluster(request.address, num_cpus=num_cpus, notice=table.notice) as cluster:
            if subject.resolved.config.device != "cpu" and any(node.get("GPU") for node in cluster.nodes()):
                needed["GPU"] = needed["CPU"] / request.trials_per_gpu
            # A population needs all members at once.
            check_resources(cluster, needed, total if is_population else 1, what="trials")
            tuner = _tuner(work, request, folder, numbers, needed)
            with _quiet(), shown_on(table, work):
                rays = tuner.fit()._experiment_analysis.trials
    trials = [work.trial(number) for number in range(total)]
    if request.scheduler == "pbt" and numbers:
        for one in rays:  # members have other points by now
            trials[number_of(one.trial_id, one.config)].params = work.params(one.config)
    if unfinished := _unfinished(work, total):
        table.notice(
            f"stopped after {total - len(unfinished)} of {total} trials; nothing that was finished is lost\n"
            f"  To go on: the same command with --study-dir {folder} --resume (resume=True in Python)."
        )
        raise KeyboardInterrupt
    return trials


def _unfinished(work: Work, total: int) -> list[int]:
    """Return the trials without a record of their end; Ray itself counts those that it stopped as ended."""
    return [number for number in range(total) if not work.trial(number).state.is_final]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Ray's own table and logs, which print every error twice, with its own frames."""
    logger, variable = logging.getLogger("ray.tune"), "RAY_AIR_NEW_OUTPUT"
    level, before = logger.level, os.environ.get(variable)
    logger.setLevel(logging.CRITICAL)
    os.environ[variable] = "0"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about Ray's own settings, which are not the user's
            yield
    finally:
        logger.setLevel(level)
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _work(
    subject: Trainable,
    space: SearchSpace,
    objective: Objective,
    request: SearchRequest,
    folder: Path,
    total: int,
    tracking: Tracking,
) -> Work:
    seed = subject.resolved.config.seed
    points: tuple[dict[str, Any], ...] = ()
    if request.search != "optuna":
        method = make_search(request.search, space, seed, objective)
        points = tuple(method.point(number, []) for number in range(total))
    return Work(
        subject, space, objective, str(folder), points,
        scheduler=make_scheduler(request.scheduler, eta=request.eta, grace=request.grace),
        interval=request.interval if request.scheduler == "pbt" else None,
        threads_per_rank=subject.resolved.config.threads_per_rank or 1,
        tracking=tracking,
    )  # fmt: skip


def _tuner(work: Work, request: SearchRequest, folder: Path, numbers: list[int], needed: dict[str, float]) -> Any:
    """Return Ray's search for these trials.

    A resumed search is a new one for Ray, with the trials that are left, in order: Ray would first restart those that
    reported last, and with fewer slots they would wait for the verdicts on lower numbers for ever. Only a population,
    whose members all run at once, is restored, because Ray holds what was exchanged.
    """
    from ray import tune

    from phalanx.engines.ray.tune.search import LearntPoints  # imports Ray

    bare = functools.partial(run_in_worker, packed=pack(work))
    bare.__name__ = "trial"  # type: ignore[attr-defined]
    trainable = tune.with_resources(bare, needed)
    learns, is_population = request.search == "optuna", request.scheduler == "pbt"
    every = tune.grid_search(list(range(len(work.points))) if is_population else numbers)
    space = {"point" if is_population else NUMBER: every} if not learns else {}
    if request.resume and is_population:
        return tune.Tuner.restore(str(folder / EXPERIMENT), trainable, resume_unfinished=True, param_space=space)
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(
            metric=work.objective.metric,
            mode=work.objective.mode,
            scheduler=_scheduler(work, request),
            search_alg=LearntPoints(work, numbers, _at_once(needed, request)) if learns else None,
            num_samples=len(numbers) if learns else 1,
            max_concurrent_trials=_at_once(needed, request),
        ),
        run_config=tune.RunConfig(
            name=EXPERIMENT,
            storage_path=str(folder),
            verbose=0,
            callbacks=[show_callback(work), marking_callback(work.folder)],
            checkpoint_config=tune.CheckpointConfig(num_to_keep=3),
        ),
    )


def _at_once(needed: dict[str, float], request: SearchRequest) -> int | None:
    """Return how many trials run at once; None: as many as fit."""
    if request.scheduler == "pbt":
        return None
    if request.trials is None and request.num_gpus is not None and "GPU" in needed:
        return max(1, int(request.num_gpus / needed["GPU"] + 1e-9))
    return request.trials


def _scheduler(work: Work, request: SearchRequest) -> Any:
    """Return Ray's scheduler for a population; in any other search the trials themselves decide, by Phalanx's rules."""
    if request.scheduler != "pbt":
        return None
    from ray.tune import schedulers

    rng = random.Random(work.subject.resolved.config.seed)

    def explore(config: dict[str, Any]) -> dict[str, Any]:
        """Perturb with the space's conditions; members are compared in step, so the calls come in a fixed order."""
        return {**config, "params": work.space.perturbed(work.params(config), rng, request.mutate)}

    return schedulers.PopulationBasedTraining(
        time_attr=ITERATION, perturbation_interval=request.interval, custom_explore_fn=explore, synch=True
    )
