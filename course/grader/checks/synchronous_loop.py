"""Grade train() of template_trainer.py against a simulation of all ranks in one process."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks.all_reduce import HANG_SECONDS, check_waited
from grader.exercise import Attempt, Mistake
from grader.ranks import Answer

LOOP = "Write the synchronous loop"


Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Job:
    """A training to be graded: the parts of all steps and ranks."""

    seed: int
    parts: list[list[Pair]]
    """By step and rank."""
    columns: int = 1
    """Of the targets."""

    def model(self, rank: int) -> nn.Module:
        """Return the model with the first weights of a rank."""
        torch.manual_seed(self.seed + rank)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, self.columns)).double()

    @staticmethod
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_job(seed: int, sizes: list[list[int]], columns: int = 1) -> Job:
    """Draw the data of a job whose step s has sizes[s][r] samples on rank r."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for step in sizes:
        inputs = [torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in step]
        noise = [torch.randn(size, columns, generator=generator, dtype=torch.float64) for size in step]
        parts.append(
            [(x, x.sum(1, keepdim=True) + 2 * rank + e) for rank, (x, e) in enumerate(zip(inputs, noise, strict=True))]
        )
    return Job(seed, parts, columns)


def rank_train(module: ModuleType, rank: int, world: int, job: Job) -> dict[str, Any]:
    """Train this rank's parts."""
    model = job.model(rank)
    batches = [step[rank] for step in job.parts]
    # An iterator, which has no length and is read once, as a loader's; the loss is any function of the caller's.
    losses = module.train(model, job.optimizer(model), nn.functional.mse_loss, iter(batches))
    return {"losses": losses, "weights": flat(model), "training": model.training}


def flat(model: nn.Module) -> Tensor:
    """Return all weights in one vector."""
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def simulate(job: Job, weighting: str = "samples", *, zero: bool = True, broadcast: bool = True) -> dict[str, Any]:
    """Train all ranks in this process, and return weights by rank, losses by step, losses after the update.

    `weighting` says how the gradients of the ranks are put together: by samples (right), by ranks, as a sum of the
    means, as a sum over the samples, by samples and divided again, or each rank alone.
    """
    world = len(job.parts[0])
    first = job.model(0)
    models = [copy.deepcopy(first) if broadcast else job.model(rank) for rank in range(world)]
    optimizers = [job.optimizer(model) for model in models]
    means: list[list[float]] = []
    after: list[float] = []
    kept: list[list[Tensor]] = [[torch.zeros_like(param) for param in first.parameters()] for _ in models]
    for step in job.parts:
        counts = [len(inputs) for inputs, _ in step]
        found = [mean_gradient(model, pair) for model, pair in zip(models, step, strict=True)]
        means.append([loss for loss, _ in found])
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            factors = rank_factors(weighting, rank, counts)
            for number, param in enumerate(model.parameters()):
                grad = torch.zeros_like(param) if zero else kept[rank][number]
                for factor, (_, grads) in zip(factors, found, strict=True):
                    grad = grad + factor * grads[number]
                kept[rank][number] = grad
                param.grad = kept[rank][number].clone()
            optimizer.step()
        again = [mean_gradient(models[0], pair)[0] * count for pair, count in zip(step, counts, strict=True)]
        after.append(sum(again) / sum(counts))
    return {"weights": [flat(model) for model in models], "means": means, "after": after}


def rank_factors(weighting: str, rank: int, counts: list[int]) -> list[float]:
    """Return the factor of each rank's mean gradient in the update of `rank`."""
    world, total = len(counts), sum(counts)
    return {
        "samples": [count / total for count in counts],
        "ranks": [1 / world] * world,
        "sum": [1.0] * world,
        "sample sums": [float(count) for count in counts],
        "divided twice": [count / total / world for count in counts],
        "alone": [float(other == rank) for other in range(world)],
        "weighted alone": [world * count / total * (other == rank) for other, count in enumerate(counts)],
    }[weighting]


def mean_gradient(model: nn.Module, pair: Pair) -> tuple[float, list[Tensor]]:
    """Return the mean loss and its gradient; zeros for an empty part."""
    params = list(model.parameters())
    if not len(pair[0]):
        return 0.0, [torch.zeros_like(param) for param in params]
    loss = nn.functional.mse_loss(model(pair[0]), pair[1])
    return loss.item(), list(torch.autograd.grad(loss, params))


ALONE = "each rank trained on its own part alone: average the gradients after backward() and before optimizer.step()"
EXPLAINED = (
    ({"broadcast": False}, "the ranks began with different weights: broadcast rank 0's before the first step"),
    ({"weighting": "alone"}, ALONE),
    ({"weighting": "weighted alone"}, ALONE),
    ({"zero": False}, "gradients of earlier steps are still in .grad: clear them before each backward()"),
    (
        {"weighting": "ranks"},
        "every rank counts alike although the parts have different lengths: weight each rank's mean by its samples",
    ),
    ({"weighting": "sum"}, "the gradients of the ranks are summed and not averaged"),
    ({"weighting": "sample sums"}, "the gradient is the sum over the samples: divide by the samples of all ranks"),
    (
        {"weighting": "divided twice"},
        "the gradient is too small by the number of ranks: average_gradients divides by it as well",
    ),
)


def grade_loop(attempt: Attempt) -> None:
    """Check weights and losses with parts of different lengths, then with empty parts."""
    draw = random.Random(attempt.seed())
    even = [[4, 4], [4, 4]] + [[draw.randint(4, 6), draw.randint(1, 2)] for _ in range(3)]
    job = make_job(attempt.seed(), even)
    check_training(job, attempt.run(rank_train, 2, (job,), timeout=HANG_SECONDS))
    empty = [[3, 2, 2], [2, 0, 2], [draw.randint(1, 4), 0, 0], [0, 2, draw.randint(1, 3)], [0, 0, 1]]
    job = make_job(attempt.seed(), empty, columns=3)
    try:
        answers = attempt.run(rank_train, 3, (job,), timeout=HANG_SECONDS)
    except Mistake as mistake:
        raise Mistake(f"{explain_empty(str(mistake))} What was seen: {mistake}", see=LOOP) from mistake
    check_training(job, answers)


def explain_empty(failure: str) -> str:
    """Return what an empty part can have to do with the failure of a run."""
    empty = (
        "In this run the part of rank 1 is empty in step 1. Such a rank has no loss, but must make every collective "
    )
    if "SIGABRT" not in failure:
        return f"{empty}call of the step."
    return (
        f"{empty}call of the step, with tensors of the same size and dtype as those of the other ranks. gloo ends a "
        "process where they differ: rank 1 leaves out a call, so that its next one meets another call of the others, "
        "or it brings another tensor, such as a float32 zero where the others bring a float64 loss."
    )


def check_training(job: Job, answers: list[Answer]) -> None:
    """Raise a Mistake unless all ranks have the weights and losses of one process on the global batches."""
    steps, sizes = len(job.parts), [[len(inputs) for inputs, _ in step] for step in job.parts]
    where = f"{len(answers)} ranks, samples by step and rank {sizes}"
    check_waited(answers)
    for answer in answers:
        losses = answer.value["losses"]
        if not isinstance(losses, list) or len(losses) != steps:
            raise Mistake(f"{where}: train should return {steps} losses, one per step; it returned {losses}.", see=LOOP)
        if not all(type(loss) is float for loss in losses):
            raise Mistake(
                f"{where}: train returned {losses[0]!r:.60} among the losses; they should be floats: a tensor in a "
                "list keeps its memory, and perhaps its graph.",
                see=LOOP,
            )
        if not answer.value["training"]:
            raise Mistake(f"{where}: train() left the model in eval mode: dropout would be off.", see=LOOP)
        if not all(math.isfinite(loss) for loss in losses) or not answer.value["weights"].isfinite().all():
            raise Mistake(
                f"{where}: losses or weights of rank {answer.rank} are nan: the mean over an empty part is nan, and "
                "nan times 0 is nan. Leave out forward and backward for an empty part.",
                see=LOOP,
            )
    right = simulate(job)
    found = [answer.value["weights"] for answer in answers]
    if not all(close(mine, expected) for mine, expected in zip(found, right["weights"], strict=True)):
        raise Mistake(f"{where}: {explain_weights(job, found)}.", see=LOOP)
    check_losses(where, sizes, [answer.value["losses"] for answer in answers], right)


def close(found: Tensor, expected: Tensor) -> bool:
    """Return whether two float64 vectors agree to 10 digits."""
    return torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


def explain_weights(job: Job, found: list[Tensor]) -> str:
    """Say which mistake gives these weights."""
    for options, text in EXPLAINED:
        expected = simulate(job, **options)["weights"]
        if all(close(mine, guess) for mine, guess in zip(found, expected, strict=True)):
            return text
    first = flat(job.model(0))
    if all(close(mine, first) for mine in found):
        return "the weights did not move: the gradients are cleared after backward(), or step() is missing"
    ranks = [rank for rank, mine in enumerate(found) if not close(mine, found[0])]
    error = float((found[0] - simulate(job)["weights"][0]).abs().max())
    if ranks:
        return f"the weights of rank {ranks[0]} differ from those of rank 0 after training"
    return f"the weights differ by {error:.2g} from those of one process that trains on the whole batches"


def check_losses(where: str, sizes: list[list[int]], found: list[list[float]], right: dict[str, Any]) -> None:
    """Raise a Mistake unless all ranks return the means over the samples."""
    pairs = list(zip(sizes, right["means"], strict=True))
    expected = [sum(n * loss for n, loss in zip(*pair, strict=True)) / sum(pair[0]) for pair in pairs]
    by_ranks = [sum(means) / len(means) for _, means in pairs]
    for rank, losses in enumerate(found):
        guesses = [
            (expected, ""),
            ([means[rank] for _, means in pairs], "are those of its own part: average them over the ranks"),
            (by_ranks, "are means over the ranks: weight each rank's loss by its samples"),
            ([sum(means) for _, means in pairs], "are the sums of the ranks' losses"),
            (
                [value * sum(n) for value, (n, _) in zip(expected, pairs, strict=True)],
                "are sums over samples, not means",
            ),
            (right["after"], "are taken after the update: keep the loss of the forward pass before it"),
        ]
        for values, text in guesses:
            if all(math.isclose(mine, value, rel_tol=1e-6) for mine, value in zip(losses, values, strict=True)):
                if text:
                    raise Mistake(f"{where}: the weights are right, but the losses of rank {rank} {text}.", see=LOOP)
                break
        else:
            raise Mistake(f"{where}: rank {rank} returned the losses {losses}, expected {expected}.", see=LOOP)
