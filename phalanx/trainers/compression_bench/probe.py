"""What the adviser asks of this machine: how long a step computes, and how fast the ranks' link is."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from phalanx.config import DistributedConfig
from phalanx.loop.forward import decide_forward, implied_loss
from phalanx.recipes import load_recipe
from phalanx.trainers.compression_bench.rank import QUIET
from phalanx.trainers.recipe import recipe_parts
from phalanx.world.seed import seed_everything
from phalanx.world.world import join_world, leave_world

if TYPE_CHECKING:
    from collections.abc import Callable

_STEPS = 12
_SMALL, _LARGE = 256, 8_000_000
"""Bytes of the messages that show latency and rate."""


def run_probe(payload: str) -> None:
    """Measure each recipe's step and the link; the first rank leaves the numbers beside the request."""
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
    """Two message sizes tell the two numbers apart."""
    small, large = (_timed(partial(_add_up, size)) for size in (_SMALL, _LARGE))
    sent = 2 * (ranks - 1) * _LARGE / ranks
    return {"bytes_per_second": sent / max(large - small, 1e-9), "latency_s": small / (2 * (ranks - 1))}


def _add_up(nbytes: int) -> None:
    dist.all_reduce(torch.zeros(nbytes // 4))


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
    model, train, _ = recipe_parts(recipe, None)
    batch = next(iter(DataLoader(train, batch_size=recipe.settings["batch_size"], collate_fn=default_collate)))
    forward = decide_forward(model, None if recipe.sample else implied_loss, batch)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        torch.autograd.backward(forward.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    shapes = [list(parameter.shape) for parameter in model.parameters()]
    return {"compute_s": _timed(step, _STEPS), "shapes": shapes}
