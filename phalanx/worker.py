"""What each rank executes: a job of a trainer, or a recipe of the command line."""

from __future__ import annotations

import json
import pickle
import signal
from functools import partial
from pathlib import Path
from typing import Any

import phalanx.strategies.ring_ddp  # noqa: F401 - most runs need it: the fork server imports it once for all ranks
from phalanx.config import DistributedConfig
from phalanx.features import feature
from phalanx.recipes import Recipe
from phalanx.run.job import Job
from phalanx.run.result import JobResult, write_result
from phalanx.speed import CompileWatch  # noqa: F401 - likewise
from phalanx.world.env import read_rank_env


def run_job(file: str) -> None:
    """Run the job in a file; the first rank of each node writes a result that is to go back next to it."""
    path = Path(file)
    job = _read_job(path)
    if isinstance(job, Job):
        job.renew = partial(_read_job, path)
    try:
        result = job.run()
    except Exception as error:
        if (partial_result := getattr(error, "partial_result", None)) is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends all ranks after the first that failed
            write_result(partial_result, path.parent)
        raise
    env = read_rank_env()
    if job.sends_back and (env is None or env.local_rank == 0):
        write_result(result, path.parent)
    if isinstance(result, JobResult) and result.stopped is not None:
        raise result.stopped


def _read_job(path: Path) -> Any:
    """Return the job in a file: a pickled one, or that of a recipe, its checked settings and the run's folder."""
    if path.suffix != ".json":
        with path.open("rb") as file:
            return pickle.load(file)
    sent = json.loads(path.read_text(encoding="utf-8"))
    config = DistributedConfig.trusted(sent["config"])
    return feature("recipe")(Recipe(**sent["recipe"]), config, Path(sent["run_dir"]), checked=True)
