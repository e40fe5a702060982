"""A Python function as a trial: pickled here, called in the trial's ranks, its result reported like any metric."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import UsageError
from phalanx.observe.events import MetricsReported
from phalanx.observe.sinks import JsonlSink
from phalanx.tune.reporting import as_number
from phalanx.tune.trial import REPORTED
from phalanx.world.env import read_rank_env

if TYPE_CHECKING:
    from collections.abc import Callable


def write_call(path: Path, function: Callable[..., Any], params: dict[str, Any], metric: str) -> None:
    """Pickle the call; functions of scripts and notebooks travel by value."""
    import cloudpickle

    try:
        path.write_bytes(cloudpickle.dumps((function, params, metric)))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise UsageError(
            f"train_fn cannot be sent to the trials: {error}",
            hint="Open files, locks and data loaders inside the function, not outside of it.",
        ) from error


def run_file(payload: str) -> None:
    """In a rank of a trial: call the function, and report what it returns."""
    function, params, metric = pickle.loads(Path(payload).read_bytes())
    returned = function(params)
    env = read_rank_env()
    if returned is None or (env is not None and env.rank != 0):
        return
    values = _as_metrics(returned, metric)
    events = JsonlSink(Path(os.environ["PHALANX_RUN_DIR"]) / "events.jsonl")
    events.handle(MetricsReported(0, 0, REPORTED, values, ends_epoch=True, rank=0))
    events.close()


def _as_metrics(returned: Any, metric: str) -> dict[str, float]:
    if isinstance(returned, Mapping):
        if isinstance(returned.get(metric), str):
            raise UsageError(f"train_fn returned {metric} = {returned[metric]!r}, which is text, not a number")
        numbers = {str(name): value for name, value in returned.items() if not isinstance(value, str)}
        return {name: as_number(name, value) for name, value in numbers.items()}
    try:
        return {metric: float(returned)}
    except (TypeError, ValueError):
        raise UsageError(
            f"train_fn returned a {type(returned).__name__}",
            hint="Return a dict of metrics, such as {'loss': 0.3}, or the metric itself as a number.",
        ) from None
