"""What each rank executes: a job of a trainer, or a recipe of the command line."""

from __future__ import annotations

import json
import pickle
import signal
from pathlib import Path
from typing import Any

import phalanx.strategies.ring_ddp  # noqa: F401 - most runs need it: the fork server imports it once for all ranks
from phalanx.config import DistributedConfig
from phalanx.features import feature
from phalanx.recipes import Recipe
from phalanx.runs.result import JobResult, write_result
from phalanx.trainers.job import Job
from phalanx.world.env import read_rank_env


def run_job_file(payload: str) -> None:
    """Run a pickled job; the first rank of each node writes its result next to it."""
    path = Path(payload)

    def load() -> Any:
        with path.open("rb") as file:
            return pickle.load(file)

    job = load()
    if isinstance(job, Job):
        job.renew = load
    try:
        result = job.run()
    except Exception as error:
        if (partial := getattr(error, "partial_result", None)) is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends all ranks after the first that failed
            write_result(partial, path.parent)
        raise
    env = read_rank_env()
    if env is None or env.local_rank == 0:
        write_result(result, path.parent)
    if isinstance(result, JobResult) and result.stopped is not None:
        raise result.stopped


def run_recipe_file(payload: str) -> None:
    """Run a recipe from a JSON file that holds the recipe, the checked settings and the run's folder."""
    request = json.loads(Path(payload).read_text(encoding="utf-8"))
    config = DistributedConfig.trusted(request["config"])
    feature("recipe")(Recipe(**request["recipe"]), config, Path(request["run_dir"]), checked=True)
