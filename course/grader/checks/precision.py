"""Grade loss scaling and master weights of template_gradient_accumulation.py."""

from __future__ import annotations

import io
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks.all_reduce import HANG_SECONDS, check_waited
from grader.checks.gradients import NO_GRADIENT
from grader.checks.talk import run_explained
from grader.exercise import LIMIT_SECONDS, Attempt, Mistake

# loss-scaling --------------------------------------------------------------------------------------------------------

SCALING = "Scale the loss and skip overflows"
START, INTERVAL, MAX_NORM = 1024.0, 3, 1.0
SMALL, LARGE = 0.1, 3.0
INF, NAN = float("inf"), float("nan")
SCRIPT: list[tuple[float, float]] = [
    (SMALL, SMALL),
    (LARGE, SMALL),
    (SMALL, INF),
    (SMALL, LARGE),
    (LARGE, SMALL),
    (NAN, SMALL),
    (SMALL, SMALL),
    (SMALL, LARGE),
    (LARGE, SMALL),
    (SMALL, SMALL),
    (INF, INF),
    (SMALL, SMALL),
    (SMALL, -INF),
    (SMALL, SMALL),
    (LARGE, SMALL),
    (SMALL, SMALL),
    (SMALL, LARGE),
    (SMALL, SMALL),
    (SMALL, SMALL),
    (-INF, SMALL),
    (SMALL, NAN),
]
"""The size of the true gradients by step on ranks 0 and 1; inf and nan are in one of the two gradients."""
STARTS = (START, 1.0, 2.0**20)
Trace = list[tuple[bool, float, Tensor]]


def true_gradient(seed: int, rank: int, step: int) -> Tensor:
    """Return the gradients of both weights before scaling; in a bad step one element of one of them is inf or nan."""
    generator = torch.Generator().manual_seed(seed + 50 * rank + step)
    direction = torch.randn(4, generator=generator)
    size = SCRIPT[step][rank]
    if -INF < size < INF:
        return (direction / direction.norm() * size).repeat(2)
    both = (direction / direction.norm() * SMALL).repeat(2)
    both[(seed + step + 4 * (step % 2)) % 8] = size
    return both


def rank_scaling(module: ModuleType, rank: int, world: int, seed: int, start: float) -> dict[str, Any]:
    """Make all steps of the script; return what each did."""
    weights = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    scaler = module.LossScaler(start, growth_interval=INTERVAL)
    loss = torch.tensor(3.0, requires_grad=True)
    scaled = scaler.scale(loss)
    scaled.backward()
    trace: Trace = []
    for step in range(len(SCRIPT)):
        scaled_gradient = true_gradient(seed, rank, step) * scaler.current
        for weight, part in zip(weights, scaled_gradient.split(4), strict=False):  # the third one has no gradient
            weight.grad = part.clone()
        done = scaler.step(optimizer, weights, max_norm=MAX_NORM)
        trace.append((done, float(scaler.current), torch.cat([weight.detach().clone() for weight in weights[:2]])))
    return {"trace": trace, "scaled": scaled.item(), "slope": loss.grad.item() if loss.grad is not None else 0.0}


@dataclass(frozen=True)
class Rules:
    """How a loss scaler decides; the defaults are right, each other value is a mistake."""

    agree: bool = True
    count: str = "once"
    """How often an overflow on several ranks halves the scale, or which ranks must have one."""
    unscale: str = "first"
    clip: str = "after"
    sees_nan: bool = True
    sees_inf: bool = True
    skips: bool = True
    clips_overflow: bool = True
    """Where the update is made in spite of an overflow: whether its gradients are clipped."""
    backoff: float = 0.5
    growth: float = 2.0
    interval: int = INTERVAL
    resets_after_overflow: bool = True
    resets_after_growth: bool = True


MISTAKES = (
    (
        Rules(agree=False),
        "each rank decides alone: rank 1 skips and rank 0 updates. Agree by an all-reduce of the flag",
    ),
    (
        Rules(count="all"),
        "a step is skipped only if all ranks have an overflow. A flag that is 1 where all is finite must be reduced by "
        "MIN, one that is 1 where it is not, by MAX; the SUM of the first kind is above 0 if a single rank is well",
    ),
    (
        Rules(count="each"),
        "the scale is halved once for each rank with an overflow, as with a flag that is summed over the ranks: halve "
        "it once. ReduceOp.MAX gives a flag of 0 or 1",
    ),
    (Rules(unscale="never"), "the gradients are not divided by the scale before the update"),
    (
        Rules(clip="before"),
        "the gradients are clipped before they are divided by the scale: max_norm is for true gradients",
    ),
    (Rules(clip="never"), "the gradients are not clipped to max_norm"),
    (Rules(sees_nan=False), "a nan is not found: isfinite() is False for inf and for nan, isinf() for inf only"),
    (Rules(sees_inf=False), "an inf is not found: isfinite() is False for inf and for nan, isnan() for nan only"),
    (Rules(skips=False), "the update is made in spite of the overflow"),
    (Rules(skips=False, clips_overflow=False), "the update is made in spite of the overflow"),
    (Rules(backoff=1.0), "the scale is not reduced after an overflow"),
    (Rules(backoff=2.0), "the scale grows after an overflow: it should be halved"),
    (Rules(backoff=0.25), "the scale is halved more than once for one overflow"),
    (Rules(growth=1.0), "the scale never grows again"),
    (Rules(interval=1), "the scale grows after each good step: count growth_interval of them"),
    (Rules(interval=INTERVAL + 1), f"the scale grows after {INTERVAL + 1} good steps, one later than growth_interval"),
    (
        Rules(interval=INTERVAL - 1),
        f"the scale grows after {INTERVAL - 1} good steps, one earlier than growth_interval",
    ),
    (
        Rules(resets_after_overflow=False),
        "the count of good steps goes on after an overflow: growth_interval steps in a row are needed",
    ),
    (Rules(resets_after_growth=False), "the count of good steps does not begin anew after the scale has grown"),
    (Rules(unscale="late"), "the gradients are divided by the scale after it has changed"),
)


def simulate_scaling(seed: int, rules: Rules, start: float) -> list[Trace]:
    """Return the traces of both ranks under these rules."""
    scales, counts = [start, start], [0, 0]
    weights = [torch.zeros(8), torch.zeros(8)]
    traces: list[Trace] = [[], []]
    for step in range(len(SCRIPT)):
        grads = [true_gradient(seed, rank, step) * scales[rank] for rank in range(2)]
        bad = [
            bool((rules.sees_inf and grad.isinf().any()) or (rules.sees_nan and grad.isnan().any())) for grad in grads
        ]
        for rank in range(2):
            overflow = any(bad) if rules.agree else bad[rank]
            overflow = all(bad) if rules.count == "all" else overflow
            old = scales[rank]
            if overflow:
                scales[rank] *= rules.backoff ** (sum(bad) if rules.count == "each" else 1)
                counts[rank] = 0 if rules.resets_after_overflow else counts[rank]
            else:
                counts[rank] += 1
                if counts[rank] >= rules.interval:
                    scales[rank] *= rules.growth
                    counts[rank] = 0 if rules.resets_after_growth else counts[rank]
            done = not overflow or not rules.skips
            divisor = {"first": old, "never": 1.0, "late": scales[rank]}[rules.unscale]
            if done:
                weights[rank] = weights[rank] - clipped(
                    grads[rank], divisor, rules.clip if not overflow or rules.clips_overflow else "never"
                )
            traces[rank].append((not overflow, scales[rank], weights[rank].clone()))
    return traces


def clipped(grad: Tensor, divisor: float, clip: str) -> Tensor:
    """Return the unscaled gradient, clipped before, after or never."""

    def limit(value: Tensor) -> Tensor:
        return value * torch.clamp(MAX_NORM / (value.norm() + 1e-6), max=1.0)

    if clip == "before":
        return limit(grad) / divisor
    return limit(grad / divisor) if clip == "after" else grad / divisor


def grade_loss_scaling(attempt: Attempt) -> None:
    """Check a scripted series of good steps and overflows on two ranks, from three scales."""
    for start in STARTS:
        check_scaling(attempt, start)


def check_scaling(attempt: Attempt, start: float) -> None:
    """Check the series from one scale."""
    seed = attempt.seed()
    waits = (
        "One rank waits for a call that the other one does not make: every rank must make the all-reduce of the flag "
        "in every step, with an overflow or without."
    )
    errors = NO_GRADIENT | {"waits in": waits}
    answers = run_explained(
        attempt, rank_scaling, 2, (seed, start), waits=waits, errors=errors, timeout=HANG_SECONDS, see=SCALING
    )
    check_waited(answers)
    for answer in answers:
        if answer.value["scaled"] != 3 * start or answer.value["slope"] != start:
            raise Mistake(
                f"scale(loss) of a loss of 3.0 is {answer.value['scaled']}, its gradient {answer.value['slope']}; with "
                f"the scale {start:.0f} it should be {3 * start:.0f} and {start:.0f}.",
                see=SCALING,
            )
    traces = [answer.value["trace"] for answer in answers]
    right = simulate_scaling(seed, Rules(), start)
    place = first_difference(traces, right)
    if place is None:
        return
    rank, step = place
    seen, expected = traces[rank][step], right[rank][step]
    where = (
        f"Step {step} (size of the gradients {SCRIPT[step]}): rank {rank} returned {seen[0]}, scale {seen[1]:g}, "
        f"weight {seen[2][0]:.4f}; expected {expected[0]}, {expected[1]:g}, {expected[2][0]:.4f}"
    )
    for rules, text in MISTAKES:
        if first_difference(traces, simulate_scaling(seed, rules, start)) is None:
            raise Mistake(f"{where}: {text}.", see=SCALING)
    raise Mistake(f"{where}.", see=SCALING)


def first_difference(found: list[Trace], expected: list[Trace]) -> tuple[int, int] | None:
    """Return rank and step of the first difference of two traces, in the order of the steps."""
    for step in range(len(SCRIPT)):
        for rank in range(2):
            mine, other = found[rank][step], expected[rank][step]
            first, second = (torch.where(each[2].isfinite(), each[2], 1e9) for each in (mine, other))
            same = torch.allclose(first, second, rtol=1e-4, atol=1e-5)
            if bool(mine[0]) != other[0] or mine[1] != other[1] or not same:
                return rank, step
    return None


# master-weights ------------------------------------------------------------------------------------------------------

MASTERS = "Keep master weights in float32"
STEPS, RATE = 40, 4e-4


@dataclass(frozen=True)
class Keeping:
    """How weights are kept; the defaults are right, each other value is a mistake."""

    masters: bool = True
    """float32 copies, or updates of the bfloat16 weights."""
    refreshed: bool = False
    """Copies are made anew from the model before each step."""
    copied_back: bool = True
    stale: bool = False
    """A parameter without a gradient is updated with its last one."""
    summed: bool = False
    """Gradients of the copies add up over the steps."""


KEPT = (
    (Keeping(masters=False), "the small updates are lost: they are made in bfloat16. Update float32 copies"),
    (
        Keeping(refreshed=True),
        "the small updates are lost: the float32 copies are made anew from the rounded model in each step",
    ),
    (Keeping(copied_back=False), "the model does not move: copy the masters into it after the update"),
    (
        Keeping(stale=True),
        "a parameter without a gradient in a step moves with an old one: set the master's grad to None",
    ),
    (Keeping(summed=True), "the gradients of the masters add up over the steps: replace them"),
)


def start_weights(seed: int) -> list[Tensor]:
    """Return the weights of the model in bfloat16: two that train, one that is frozen."""
    generator = torch.Generator().manual_seed(seed)
    weights = [(1 + torch.rand(5, generator=generator)).bfloat16() for _ in range(3)]
    return [nn.Parameter(weight, requires_grad=number < 2) for number, weight in enumerate(weights)]


def step_gradient(seed: int, number: int, step: int) -> Tensor | None:
    """Return the gradient of a parameter in a step; the second parameter has one in every other step."""
    if number == 1 and step % 2:
        return None
    generator = torch.Generator().manual_seed(seed + 1000 * number + step)
    return (1 + torch.rand(5, generator=generator)).bfloat16()


def make_optimizer(tensors: list[Tensor]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(tensors, lr=RATE, momentum=0.9)


def keep(seed: int, keeping: Keeping) -> Tensor:
    """Return the weights of the model after all steps."""
    weights = start_weights(seed)[:2]
    copies = [weight.detach().clone().float() if keeping.masters else weight.detach() for weight in weights]
    optimizer = make_optimizer(copies)
    for step in range(STEPS):
        for number, (weight, copy) in enumerate(zip(weights, copies, strict=True)):
            grad = step_gradient(seed, number, step)
            if keeping.refreshed:
                copy.copy_(weight.detach())
            if grad is None and keeping.stale:
                continue
            if keeping.summed and copy.grad is not None and grad is not None:
                copy.grad += grad
            elif not (keeping.summed and grad is None):
                copy.grad = None if grad is None else grad.to(copy.dtype)
        optimizer.step()
        if keeping.copied_back:
            for weight, copy in zip(weights, copies, strict=True):
                weight.data.copy_(copy)
    return torch.cat([weight.detach() for weight in weights])


def call_masters(module: ModuleType, seed: int) -> dict[str, Any]:
    """Train, and train again with a save and a load in the middle."""
    weights = start_weights(seed)
    given: list[Tensor] = []

    def make(tensors: list[Tensor]) -> torch.optim.Optimizer:
        given.extend(tensors)
        return make_optimizer(tensors)

    keeper = module.MasterWeights(list(weights), make)
    train(keeper, weights, seed, range(STEPS // 2))
    stream = io.BytesIO()
    kept = keeper.state_dict()
    torch.save(kept, stream)
    saved = torch.cat([weight.detach().clone() for weight in weights[:2]])
    train(keeper, weights, seed, range(STEPS // 2, STEPS))
    stream.seek(0)
    loaded, continued = resume(module, seed, torch.load(stream, weights_only=False))
    weights[0].grad = torch.ones_like(weights[0])
    keeper.zero_grad()
    return {
        "given": [str(tensor.dtype) for tensor in given],
        "dtype": str(weights[0].dtype),
        "weights": torch.cat([weight.detach() for weight in weights[:2]]),
        "frozen": torch.equal(weights[2], start_weights(seed)[2]),
        "saved": saved,
        "loaded": loaded,
        "continued": continued,
        "kept": resume(module, seed, kept),
        "cleared": weights[0].grad is None or not weights[0].grad.any(),
    }


def resume(module: ModuleType, seed: int, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Load a state into new weights and make the second half of the steps; return the weights before and after."""
    weights = start_weights(seed + 1)
    keeper = module.MasterWeights(list(weights), make_optimizer)
    keeper.load_state_dict(state)
    loaded = torch.cat([weight.detach().clone() for weight in weights[:2]])
    train(keeper, weights, seed, range(STEPS // 2, STEPS))
    return loaded, torch.cat([weight.detach() for weight in weights[:2]])


def train(keeper: Any, weights: list[Tensor], seed: int, steps: range) -> None:
    """Make some steps with the gradients of the grader."""
    for step in steps:
        for number, weight in enumerate(weights[:2]):
            grad = step_gradient(seed, number, step)
            weight.grad = None if grad is None else grad.to(weight.dtype)
        keeper.step()


def grade_master_weights(attempt: Attempt) -> None:
    """Check small updates, missing gradients, the frozen parameter, and a save and load in the middle."""
    seed = attempt.seed()
    (answer,) = run_explained(
        attempt, call_masters, 0, (seed,), waits="", errors=NO_GRADIENT, timeout=LIMIT_SECONDS, see=MASTERS
    )
    seen = answer.value
    right = keep(seed, Keeping())
    if seen["dtype"] != "torch.bfloat16":
        raise Mistake(f"The weights of the model are {seen['dtype']} now: the model stays in bfloat16.", see=MASTERS)
    if not torch.equal(seen["weights"], right):
        text = f"the weights are {seen['weights'][:2].tolist()}..., expected {right[:2].tolist()}..."
        for keeping, guess in KEPT:
            if torch.equal(seen["weights"], keep(seed, keeping)):
                text = guess
        if "torch.bfloat16" in seen["given"]:
            text = "the optimizer got bfloat16 tensors: the small updates are lost. Give it float32 copies"
        raise Mistake(f"After {STEPS} updates of about {RATE} to {10 * RATE}: {text}.", see=MASTERS)
    check_frozen(seen)
    check_loaded(seen)


def check_frozen(seen: dict[str, Any]) -> None:
    """Raise a Mistake unless the frozen parameter is left alone and zero_grad works."""
    if len(seen["given"]) != 2 or not seen["frozen"]:
        raise Mistake(
            f"The optimizer got {len(seen['given'])} tensors; 2 of the 3 parameters train, the third has "
            "requires_grad=False: leave it out.",
            see=MASTERS,
        )
    if not seen["cleared"]:
        raise Mistake(
            "zero_grad() leaves the gradients of the model in place: backward() would add to those of the step before.",
            see=MASTERS,
        )


def check_loaded(seen: dict[str, Any]) -> None:
    """Raise a Mistake unless training continues exactly after a load."""
    if not torch.equal(seen["loaded"], seen["saved"]):
        raise Mistake(
            "After load_state_dict the model still has other weights than when state_dict was made: copy the masters "
            "into the model, too.",
            see=MASTERS,
        )
    if not torch.equal(seen["continued"], seen["weights"]):
        raise Mistake(
            "Training that is saved, loaded and continued ends with other weights than training in one go: the state "
            "must hold the float32 masters and the state of the optimizer, and load_state_dict must write into the "
            "tensors that the optimizer updates.",
            see=MASTERS,
        )
    loaded, continued = seen["kept"]
    if not torch.equal(loaded, seen["saved"]):
        what = "the masters: return copies of them"
    elif not torch.equal(continued, seen["weights"]):
        what = "the state of the optimizer: optimizer.state_dict() holds its own tensors, use copy.deepcopy"
    else:
        return
    raise Mistake(
        f"What state_dict() returned changes with the steps that follow, here {what}. A checkpoint that is written "
        "while training goes on would mix two steps.",
        see=MASTERS,
    )
