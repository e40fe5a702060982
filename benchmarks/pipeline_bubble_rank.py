"""One rank of pipeline_bubble.py: a row of units that each take a fixed time, trained under one schedule.

Started by pipeline_bubble.py under `phalanx train --script`; the first rank writes what all ranks measured.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

import phalanx

_WARM_STEPS = 2


class Wait(torch.autograd.Function):
    """Takes some time forward and some backward, and hands on what it gets."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        """Wait."""
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Wait."""
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class Unit(nn.Module):
    """A layer that takes `seconds` forward, and as long for the gradient of its input and for that of its weight."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take the time."""
        moved: torch.Tensor = Wait.apply(x, self.seconds, self.seconds) + Wait.apply(self.weight, 0.0, self.seconds)
        return moved


class Busy:
    """Adds up the time that a rank spends in passes; the rest of a step it waits for others."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            setattr(PipelineStage, name, self._timed(getattr(PipelineStage, name)))

    def _timed(self, method: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - began

        return run


def main() -> None:
    """Train a few steps and report the share of the time in which ranks stood idle."""
    request = json.loads(sys.argv[1])
    ranks, count = request["ranks"], request["microbatches"]
    settings = {"pipeline_parallel": ranks, "pipeline_schedule": request["schedule"], "microbatches": count}
    busy = Busy()
    with phalanx.Formation(device="cpu", **settings) as formation:
        model = nn.Sequential(*(Unit(request["seconds"]) for _ in range(2 * ranks)))
        wrapped, optimizer = formation.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = torch.zeros(count, 4), torch.zeros(count, 4)
        spans = []
        for step in range(_WARM_STEPS + request["steps"]):
            if step == _WARM_STEPS:
                busy.seconds = 0.0
            dist.barrier()
            began = time.perf_counter()
            formation.train_batch(wrapped, batch, nn.functional.mse_loss)
            spans.append(time.perf_counter() - began)
            optimizer.step()
            optimizer.zero_grad()
        longest = formation.reduce(sum(spans[_WARM_STEPS:]), "max").item()
        mean_busy = formation.reduce(busy.seconds).item()
        if formation.is_main:
            Path(request["answer"]).write_text(
                json.dumps({"step": longest / request["steps"], "busy": mean_busy / longest})
            )


main()
