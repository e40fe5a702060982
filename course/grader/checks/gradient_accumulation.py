"""Grade template_gradient_accumulation.py; parts are in accumulate_over_ranks.py, recompute.py and precision.py."""

from __future__ import annotations

import math
import random
import weakref
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks.accumulate_over_ranks import grade_over_ranks
from grader.checks.gradients import Pair, first_match, flat_gradient
from grader.checks.precision import grade_loss_scaling, grade_master_weights
from grader.checks.recompute import grade_recompute
from grader.exercise import Attempt, Exercise, Mistake

TEMPLATE = "phase2_advanced/template_gradient_accumulation.py"
ACCUMULATE = "Accumulate gradients over micro-batches"
OVER_RANKS = "Accumulate over micro-batches and ranks"
RECOMPUTE = "Recompute activations instead of saving them"
SCALING = "Scale the loss and skip overflows"
MASTERS = "Keep master weights in float32"


# accumulate ----------------------------------------------------------------------------------------------------------


class SavedBytes:
    """Count the bytes that autograd keeps for the backward pass, weights left out."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
        self.live = 0
        self.peak = 0

    def pack(self, tensor: Tensor) -> Any:
        """Count a tensor that is saved."""
        holder = _Holder(tensor)
        if tensor.untyped_storage().data_ptr() not in self.weights:
            size = tensor.numel() * tensor.element_size()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(holder, self.free, size)
        return holder

    def free(self, size: int) -> None:
        """Count a tensor that is given up."""
        self.live -= size


class _Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def make_model(seed: int) -> nn.Module:
    """Return a small model in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def make_micro_batches(seed: int, sizes: list[int]) -> list[Pair]:
    """Draw micro-batches of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(size, 5, generator=generator, dtype=torch.float64) for size in sizes]
    return [(part, part.sum(1, keepdim=True) + number) for number, part in enumerate(inputs)]


def call_accumulate(module: ModuleType, seed: int, sizes: list[int]) -> dict[str, Any]:
    """Accumulate with gradients of an earlier step in place, and watch what is saved."""
    model, pieces = make_model(seed), make_micro_batches(seed, sizes)
    lengths: list[int] = []
    model.register_forward_hook(lambda _, inputs, __: lengths.append(len(inputs[0])))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    saved = SavedBytes(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda holder: holder.tensor):
        loss = module.accumulate(model, nn.functional.mse_loss, pieces)
    single = SavedBytes(model)
    largest = max(pieces, key=lambda pair: len(pair[0]))
    with torch.autograd.graph.saved_tensors_hooks(single.pack, lambda holder: holder.tensor):
        nn.functional.mse_loss(model(largest[0]), largest[1])
    kind = type(loss).__name__
    return {
        "grad": flat_gradient(model),
        "loss": float(loss),
        "kind": kind,
        "lengths": lengths[:-1],
        "peak": saved.peak / single.peak,
    }


def grade_accumulate(attempt: Attempt) -> None:
    """Check the gradient, the loss and the memory for micro-batches of different lengths."""
    draw = random.Random(attempt.seed())
    sizes = [5, 5, draw.randint(2, 4), draw.randint(3, 5), 1]
    seed = attempt.seed()
    seen = attempt.call(call_accumulate, seed, sizes)
    where = f"Micro-batches of {sizes} samples"
    means = [mean_gradient(make_model(seed), pair) for pair in make_micro_batches(seed, sizes)]
    if seen["grad"] is None:
        raise Mistake(f"{where}: a parameter has no gradient afterwards: the sum must stay in .grad.", see=ACCUMULATE)
    check_lengths(where, sizes, seen["lengths"])
    mistakes = [explain_gradient(sizes, seen["grad"], [grad for _, grad in means]), explain_peak(seen["peak"])]
    if any(mistakes):
        raise Mistake(f"{where}: {'. Besides, '.join(filter(None, mistakes))}.", see=ACCUMULATE)
    check_mean_loss(where, sizes, seen, [loss for loss, _ in means])


def mean_gradient(model: nn.Module, pair: Pair) -> tuple[float, Tensor]:
    """Return the mean loss of one micro-batch and its gradient."""
    loss = nn.functional.mse_loss(model(pair[0]), pair[1])
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([grad.flatten() for grad in grads])


def check_lengths(where: str, sizes: list[int], lengths: list[int]) -> None:
    """Raise a Mistake unless each micro-batch went through the model once."""
    if lengths == sizes:
        return
    if max(lengths, default=0) >= sum(sizes):
        text = "the whole batch goes through the model at once: this needs the memory that accumulation saves"
    elif lengths == sizes[:-1]:
        text = "the last micro-batch is lost"
    elif sum(lengths) > sum(sizes):
        text = f"the model sees batches of {lengths}: each micro-batch should go through it once"
    else:
        text = f"the model sees batches of {lengths}"
    raise Mistake(f"{where}: {text}.", see=ACCUMULATE)


def explain_peak(peak: float) -> str:
    """Return nothing if autograd kept one micro-batch at a time, otherwise what it kept."""
    if peak <= 1.5:
        return ""
    return (
        f"at its peak, autograd keeps {peak:.1f} times the activations of the largest micro-batch: the graphs of "
        "several micro-batches are alive. Call backward() for each of them before the next forward pass"
    )


def explain_gradient(sizes: list[int], found: Tensor, grads: list[Tensor]) -> str:
    """Return nothing if the gradient is the one of the whole batch, otherwise which mistake gives it."""
    total, count = sum(sizes), len(sizes)
    right = weighted(grads, [size / total for size in sizes])
    last = sizes[-1] / total
    guesses = [
        (weighted(grads, [1.0] * count), f"the means of the {count} micro-batches are summed, not scaled"),
        (
            weighted(grads, [1 / count] * count),
            "every micro-batch counts alike: weight each by its samples, as a short one has fewer",
        ),
        (right + 1, "the gradients of the step before are still in it: clear them once, before the loop"),
        (grads[-1] * last, "only the last micro-batch counts: the gradients are cleared inside the loop"),
        (weighted(grads, [float(size) for size in sizes]), "this is the sum over the samples: divide by their number"),
        (weighted(grads, [size / sizes[0] for size in sizes]), "weights are relative to the first micro-batch"),
        (
            weighted(grads, [size / total / count for size in sizes]),
            "the gradient is divided by the micro-batches, too",
        ),
        (weighted(grads, [1 / total] * count), "each mean is divided by all samples without its own number of samples"),
        (torch.zeros_like(found), "the gradient is zero: it is cleared at the end"),
        (torch.ones_like(found), "the gradient did not change: backward() is not called"),
    ]
    if torch.allclose(found, right, rtol=1e-10, atol=1e-12):
        return ""
    return first_match(found, guesses) or f"the gradient differs by {float((found - right).abs().max()):.2g}"


def weighted(values: list[Tensor], weights: list[float]) -> Tensor:
    """Return the weighted sum."""
    return sum((weight * value for weight, value in zip(weights, values, strict=True)), torch.zeros_like(values[0]))


def check_mean_loss(where: str, sizes: list[int], seen: dict[str, Any], means: list[float]) -> None:
    """Raise a Mistake unless the returned loss is the float mean over all samples."""
    right = sum(size * mean for size, mean in zip(sizes, means, strict=True)) / sum(sizes)
    if seen["kind"] != "float":
        raise Mistake(f"{where}: accumulate returned a {seen['kind']}; return a float (item()).", see=ACCUMULATE)
    if math.isclose(seen["loss"], right, rel_tol=1e-6):
        return
    texts = {
        sum(means) / len(means): "it is the mean of the means: weight by samples",
        sum(means): "it is the sum of the means",
        means[-1]: "it is the loss of the last micro-batch",
        means[-1] * sizes[-1] / sum(sizes): "it is the part of the last micro-batch",
        right * sum(sizes): "it is the sum over the samples",
    }
    text = next((text for value, text in texts.items() if math.isclose(seen["loss"], value, rel_tol=1e-6)), "")
    raise Mistake(f"{where}: the returned loss is {seen['loss']:.4f}, expected {right:.4f}: {text}.", see=ACCUMULATE)


EXERCISES = (
    Exercise(
        name="accumulate",
        title=ACCUMULATE,
        template=TEMPLATE,
        target="accumulate",
        points=10,
        grade=grade_accumulate,
    ),
    Exercise(
        name="accumulate-over-ranks",
        title=OVER_RANKS,
        template=TEMPLATE,
        target="accumulation_step",
        points=10,
        grade=grade_over_ranks,
        forbidden=("torch.nn.parallel.DistributedDataParallel",),
    ),
    Exercise(
        name="recompute",
        title=RECOMPUTE,
        template=TEMPLATE,
        target="recompute",
        points=15,
        grade=grade_recompute,
        forbidden=("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint_sequential"),
    ),
    Exercise(
        name="loss-scaling",
        title=SCALING,
        template=TEMPLATE,
        target="LossScaler",
        points=15,
        grade=grade_loss_scaling,
        forbidden=("torch.amp.GradScaler", "torch.cuda.amp.GradScaler"),
    ),
    Exercise(
        name="master-weights",
        title=MASTERS,
        template=TEMPLATE,
        target="MasterWeights",
        points=15,
        grade=grade_master_weights,
    ),
)
