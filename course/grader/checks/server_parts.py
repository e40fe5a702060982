"""What the graders of the parameter servers share: a training problem, workers that note what they see, messages."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from grader.exercise import Mistake
from grader.ranks import Answer

RATE = 0.25
WAITS = "Each send needs its receive: a worker pulls once before its first step, then pushes and pulls once per step"


def start_of(seed: int, size: int) -> Tensor:
    """Return the server's first weights."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient_of(weights: Tensor, worker: int, step: int) -> Tensor:
    """Return the gradient of one worker at one step: different for each, and not linear, so that order counts."""
    return torch.sin((worker + 1) * weights) + 0.1 * (step + 1) * worker


class Worker:
    """The gradient function of one rank; it notes the weights it was called with, and when."""

    def __init__(self, rank: int, pause: float = 0.0, first_pause: float = 0.0) -> None:
        self.rank, self.pause, self.first_pause = rank, pause, first_pause
        self.seen: list[Tensor] = []
        self.steps: list[int] = []
        self.times: list[float] = []

    def __call__(self, weights: Tensor, step: int) -> Tensor:
        """Return the gradient."""
        self.times.append(time.monotonic())
        if self.rank == 0:
            raise RuntimeError("the server called gradient(): only workers have data")
        self.seen.append(weights.clone())
        self.steps.append(step)
        time.sleep(self.pause if step else self.pause + self.first_pause)
        return gradient_of(weights, self.rank, step)


def begin(seed: int, size: int, rank: int) -> Tensor:
    """Return the weights that a rank begins with: only those of the server count."""
    return start_of(seed, size) if rank == 0 else torch.full((size,), 1e6 * rank, dtype=torch.float64)


def check_peers(answers: Sequence[Answer], steps: int, see: str) -> None:
    """Raise unless workers talk to the server alone, with as many messages as they need."""
    for answer in answers[1:]:
        for call in answer.calls:
            if call.peer not in (0, None):
                raise Mistake(f"worker {answer.rank} exchanges with rank {call.peer} (line {call.line}): a worker "
                              "talks to the server alone", see)  # fmt: skip
        pulls = sum("recv" in call.kind for call in answer.calls)
        if answer.messages != steps or pulls != steps + 1:
            raise Mistake(
                f"worker {answer.rank} made {answer.messages} pushes and {pulls} pulls in {steps} steps; it should be "
                f"{steps} pushes and {steps + 1} pulls, one of them before the first step",
                see,
            )


def check_worker_inputs(answers: Sequence[Answer], seed: int, size: int, steps: int, see: str) -> None:
    """Raise unless each worker began with the server's weights and counted its steps from 0."""
    first = start_of(seed, size)
    for answer in answers[1:]:
        seen, numbers = answer.value["seen"], answer.value["steps"]
        if numbers != list(range(steps)):
            raise Mistake(f"worker {answer.rank} computed gradients for the steps {numbers}, not 0 to {steps - 1}", see)
        if not torch.equal(seen[0], first):
            raise Mistake(
                f"worker {answer.rank} computed its first gradient at its own weights: only the server's count, so it "
                "must pull before the first step",
                see,
            )
        for step in range(1, steps):
            if torch.equal(seen[step], seen[step - 1]):
                raise Mistake(
                    f"worker {answer.rank} computed the gradients of steps {step - 1} and {step} at the same weights: "
                    "what it pulls must be the weights with its push in them, and must go into the tensor that it uses",
                    see,
                )


def close(one: Tensor, two: Tensor) -> bool:
    """Say whether two tensors are equal to ten digits."""
    return torch.allclose(one, two, rtol=1e-10, atol=1e-10)
