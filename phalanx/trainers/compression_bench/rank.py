"""The benchmark's runs, as a rank executes them."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from phalanx.comm.compress.base import ring_bytes
from phalanx.comm.compress.measure import settings_of
from phalanx.comm.throttle import emulated_link
from phalanx.config import DistributedConfig
from phalanx.loop.forward import implied_loss
from phalanx.loop.hooks import Callback, StepInfo
from phalanx.loop.task import TrainTask
from phalanx.recipes import load_recipe
from phalanx.trainers.compression_bench.plan import Case, Request
from phalanx.trainers.job import Job, run_job
from phalanx.trainers.recipe import recipe_parts
from phalanx.world.env import read_rank_env
from phalanx.world.seed import seed_everything

QUIET: dict[str, Any] = {
    "progress": False,
    "tensorboard": False,
    "tensorboard_dir": None,
    "checkpoint_frequency": None,
    "checkpoint_dir": None,
    "epochs": None,
}
"""What surrounds a real run and would blur the clock."""


class Clock(Callback):
    """Notes when each step ended, and its loss."""

    def __init__(self) -> None:
        self.curve: list[tuple[float, float]] = []
        self._began = 0.0

    def on_fit_start(self, trainer: Any) -> None:
        """Start."""
        self._began = time.perf_counter()

    def on_step_end(self, trainer: Any, info: StepInfo) -> None:
        """Note a step."""
        loss = info.loss
        self.curve.append((time.perf_counter() - self._began, loss))


def run_cases(payload: str) -> None:
    """Run the cases one after the other; the first rank leaves each result beside the request."""
    path = Path(payload)
    body = json.loads(path.read_text(encoding="utf-8"))
    request = Request(**{**body, "cases": [Case(**case) for case in body["cases"]]})
    env = read_rank_env()
    for case in request.cases:
        result = run_case(case, request, path.parent)
        if env is None or env.rank == 0:
            (path.parent / f"{case.name}.json").write_text(json.dumps(result), encoding="utf-8")


def run_case(case: Case, request: Request, folder: Path) -> dict[str, Any]:
    """Train a recipe's first steps under a compressor; return times, losses and bytes."""
    recipe = load_recipe(case.recipe)
    own = settings_of(case.compressor, request.settings)
    settings = {**recipe.settings, **QUIET, "device": "cpu", "max_steps": request.steps, "log_every_n_steps": 10**6}
    config = DistributedConfig(**{**settings, "compression": case.compressor, **own})
    seed_everything(config.seed)
    model, train, _ = recipe_parts(recipe, None)
    clock = Clock()
    task = TrainTask(model, train, loss_fn=None if recipe.sample else implied_loss, callbacks=[clock], name=case.recipe)
    rate = request.emulated_bytes_per_second
    run_dir = folder / f"run-{case.name}"
    with nullcontext() if rate is None else emulated_link(rate):
        history = run_job(Job("fit", task, config, run_dir), in_place=True).history
    assert history is not None, "fit returns one"
    shutil.rmtree(run_dir, ignore_errors=True)
    env = read_rank_env()
    gradient = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    plain = len(clock.curve) * ring_bytes(gradient, 1 if env is None else env.world_size)
    sent = plain if history.sent_bytes is None else history.sent_bytes
    return {"curve": clock.curve, "sent_bytes": sent, "plain_bytes": plain}
