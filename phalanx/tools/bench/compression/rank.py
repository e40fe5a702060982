"""What a rank runs in `phalanx bench compression`: training runs, or measurements of step and link."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from phalanx.comm.compress import ring_bytes
from phalanx.comm.exchange import emulated_link
from phalanx.config import DistributedConfig
from phalanx.loop.forward import decide_forward, implied_loss
from phalanx.loop.hooks import Callback, StepInfo
from phalanx.loop.task import TrainTask
from phalanx.recipes import load_recipe
from phalanx.tools.bench.compression.advise import settings_of
from phalanx.trainers.job import Job, run_job
from phalanx.trainers.recipe_parts import recipe_parts
from phalanx.world.env import read_rank_env
from phalanx.world.seed import seed_everything
from phalanx.world.world import join_world, leave_world

QUIET: dict[str, Any] = {
    "console": "plain",
    "tensorboard": False,
    "checkpoint_frequency": None,
    "checkpoint_dir": None,
    "epochs": None,
}
"""Logging and checkpoints would disturb the timing."""


class Clock(Callback):
    """Records the time and the loss of each step."""

    def __init__(self) -> None:
        self.curve: list[tuple[float, float]] = []
        self._began = 0.0

    def on_fit_start(self, trainer: Any) -> None:
        """Start."""
        self._began = time.perf_counter()

    def on_step_end(self, trainer: Any, info: StepInfo) -> None:
        """Record a step."""
        self.curve.append((time.perf_counter() - self._began, info.loss))


def run_cases(payload: str) -> None:
    """Run the cases one after the other; the first rank writes each result next to the request."""
    path = Path(payload)
    request = json.loads(path.read_text(encoding="utf-8"))
    env = read_rank_env()
    for recipe, compressor in request["cases"]:
        run_dir = path.parent / f"run-{recipe}-{compressor}"
        with nullcontext() if request["rate"] is None else emulated_link(request["rate"]):
            result = _run_case(recipe, compressor, request, run_dir, 1 if env is None else env.world_size)
        shutil.rmtree(run_dir, ignore_errors=True)
        if env is None or env.rank == 0:
            (path.parent / f"{recipe}-{compressor}.json").write_text(json.dumps(result), encoding="utf-8")


def _run_case(name: str, compressor: str, request: dict[str, Any], run_dir: Path, ranks: int) -> dict[str, Any]:
    """Train a recipe's first steps under a compressor; return times, losses and bytes."""
    recipe = load_recipe(name)
    settings = {**recipe.settings, **QUIET, "device": "cpu", "max_steps": request["steps"], "log_every_n_steps": 10**6}
    own = settings_of(compressor, request["settings"])
    config = DistributedConfig(**{**settings, "compression": compressor, **own})
    seed_everything(config.seed)
    model, train, *_ = recipe_parts(recipe)
    clock = Clock()
    task = TrainTask(model, train, loss_fn=None if recipe.sample else implied_loss, callbacks=[clock], name=name)
    history = run_job(Job("fit", task, config, run_dir), in_place=True).history
    assert history is not None, "fit returns one"
    gradient = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    plain = len(clock.curve) * ring_bytes(gradient, ranks)
    sent = plain if history.sent_bytes is None else history.sent_bytes
    return {"sent_bytes": sent, "plain_bytes": plain, "curve": clock.curve}


_STEPS = 12
_SMALL, _LARGE = 256, 8_000_000
"""Bytes of the messages that show latency and rate."""


def run_probe(payload: str) -> None:
    """Measure each recipe's step and the link; the first rank writes the numbers next to the request."""
    path = Path(payload)
    body = json.loads(path.read_text(encoding="utf-8"))
    config = DistributedConfig(**QUIET, device="cpu")
    world = join_world(config)
    found: dict[str, Any] = {"link": _measure_link(world.world_size), "recipes": {}}
    for name in body["recipes"]:
        dist.barrier()  # all ranks compute at the same time, as they do in training
        found["recipes"][name] = _measure_step(name)
    if world.is_main:
        (path.parent / "probe.json").write_text(json.dumps(found), encoding="utf-8")
    leave_world(world)


def _measure_link(ranks: int) -> dict[str, float]:
    """Measure latency and rate, from two message sizes."""
    small, large = (_timed(partial(dist.all_reduce, torch.zeros(size // 4))) for size in (_SMALL, _LARGE))
    sent = 2 * (ranks - 1) * _LARGE / ranks
    return {"bytes_per_second": sent / max(large - small, 1e-9), "latency_s": small / (2 * (ranks - 1))}


def _timed(job: Callable[[], Any], rounds: int = 7) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        job()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def _measure_step(name: str) -> dict[str, Any]:
    """Time forward, backward and the optimizer on this rank's batch, with nothing sent."""
    recipe = load_recipe(name)
    seed_everything(0)
    model, train, *_ = recipe_parts(recipe)
    batch = next(iter(DataLoader(train, batch_size=recipe.settings["batch_size"], collate_fn=default_collate)))
    forward = decide_forward(model, None if recipe.sample else implied_loss, batch)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        torch.autograd.backward(forward.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    shapes = [list(parameter.shape) for parameter in model.parameters()]
    return {"compute_s": _timed(step, _STEPS), "shapes": shapes}
