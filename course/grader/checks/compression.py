"""Grading of the step profiler and of gradient compression."""

from __future__ import annotations

import time
import tracemalloc
from types import ModuleType
from typing import Any

import torch

from grader.checks.saving import ask, reported
from grader.exercise import Attempt, Mistake

PROFILE = "See where a step spends its time"
COMPRESS = "Send less, lose nothing"


class Clock:
    """A clock that the grader moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def grade_profiler(attempt: Attempt) -> None:
    """Grade `profile-step`."""
    ask(attempt, profiler, attempt.seed(), see=PROFILE)


@reported
def profiler(module: ModuleType, seed: int) -> None:
    """Profile steps on a clock of the grader, then measure what the profiler costs."""
    _parts(module, 1.0 + seed % 5)
    _nested(module)
    _exceptions(module)
    _cost(module)


def _steps(module: ModuleType, plan: list[list[tuple[str, float]]]) -> dict[str, float]:
    clock = Clock()
    profile = module.StepProfiler(clock)
    for step in plan:
        with profile.step():
            for name, seconds in step:
                if name:
                    with profile.part(name):
                        clock.now += seconds
                else:
                    clock.now += seconds
        clock.now += 50.0  # between steps
    return profile.summary()


def _expect(found: Any, expected: dict[str, float], reasons: dict[str, str]) -> None:
    if not isinstance(found, dict):
        raise Mistake(f"summary() returned {found!r}; it should be a dict from the part to seconds per step")
    for name, seconds in expected.items():
        if name not in found:
            raise Mistake(f"summary() has no {name!r}: {reasons.get(name, 'it was a part of the step')}")
        if not abs(found[name] - seconds) <= 1e-6:
            raise Mistake(
                f"summary() gives {found[name]:g} s for {name!r}, {seconds:g} s is right: {reasons.get(name, '')}"
            )
    if extra := set(found) - set(expected):
        raise Mistake(f"summary() has parts that were not in the steps: {sorted(extra)}")


def _parts(module: ModuleType, unit: float) -> None:
    plan = [
        [("data", unit), ("forward", 2 * unit), ("", unit)],
        [("data", 3 * unit), ("forward", 4 * unit), ("", unit)],
    ]
    expected = {"data": 2 * unit, "forward": 3 * unit, "other": unit, "step": 6 * unit}
    between = "the mean over steps, from the begin to the end of each, without the time between steps"
    other = "the time of the step that is in none of its parts"
    _expect(_steps(module, plan), expected, {"step": between, "other": other, "data": "the mean over the steps"})
    found = _steps(module, [[("forward", unit), ("forward", unit), ("forward", unit)]])
    _expect(
        found, {"forward": 3 * unit, "other": 0.0, "step": 3 * unit}, {"forward": "a part that comes 3 times adds up"}
    )
    found = _steps(module, [[("save", 8.0), ("data", 1.0)]] + [[("data", 1.0)]] * 3)
    rare = "it was in one of 4 steps, and the parts must add up to the mean step: divide by all steps"
    _expect(found, {"save": 2.0, "data": 1.0, "other": 0.0, "step": 3.0}, {"save": rare})


def _nested(module: ModuleType) -> None:
    clock = Clock()
    profile = module.StepProfiler(clock)
    for _ in range(2):
        with profile.step():
            with profile.part("backward"):
                clock.now += 2.0
                with profile.part("communication"):
                    clock.now += 3.0
                    with profile.part("wait"):
                        clock.now += 4.0
                clock.now += 1.0
                with profile.part("communication"):
                    clock.now += 0.5
    once = "time inside an inner part counts for the inner part alone, or the parts add up to more than the step"
    expected = {"backward": 3.0, "communication": 3.5, "wait": 4.0, "other": 0.0, "step": 10.5}
    _expect(profile.summary(), expected, dict.fromkeys(("backward", "communication", "step", "other"), once))
    again = "summary() was called a second time: it tells what was measured, and changes nothing"
    _expect(profile.summary(), expected, dict.fromkeys(expected, again))
    profile = module.StepProfiler(clock)
    with profile.step():
        with profile.part("block"):
            clock.now += 1.0
            for seconds in (2.0, 3.0):
                with profile.part("block"):
                    clock.now += seconds
                    with profile.part("attention"):
                        clock.now += 1.0
            clock.now += 1.0
    expected = {"block": 7.0, "attention": 2.0, "other": 0.0, "step": 9.0}
    own = "a part may be inside one of its own name, as blocks in blocks are: both add what they took themselves"
    _expect(profile.summary(), expected, dict.fromkeys(("block", "step"), own))


def _exceptions(module: ModuleType) -> None:
    clock = Clock()
    profile = module.StepProfiler(clock)
    try:
        with profile.step():
            with profile.part("forward"):
                with profile.part("attention"):
                    clock.now += 7.0
                    raise KeyError("in the model")
    except KeyError:
        pass
    else:
        raise Mistake("an exception in a part was swallowed: it must reach the training loop")
    with profile.step():
        try:
            with profile.part("data"):
                clock.now += 1.0
                raise KeyError("a bad file, which the loop skips")
        except KeyError:
            clock.now += 2.0
        with profile.part("forward"):
            clock.now += 3.0
    counted = "a step that an exception ended is not counted, and leaves nothing behind"
    reasons = dict.fromkeys(("forward", "step", "other"), counted) | {
        "data": "a part ends where an exception leaves it"
    }
    _expect(profile.summary(), {"step": 6.0, "data": 1.0, "forward": 3.0, "other": 2.0}, reasons)


def _cost(module: ModuleType) -> None:
    profile = module.StepProfiler()
    began = time.perf_counter()
    for _ in range(200):
        with profile.step():
            for name in ("data", "forward", "backward", "communication", "optimizer"):
                with profile.part(name):
                    pass
    cost = (time.perf_counter() - began) / 1200
    if cost > 1e-4:
        raise Mistake(f"one part costs {cost * 1e6:.0f} µs: a profiler that is always on may cost some microseconds")
    tracemalloc.start()
    for _ in range(2000):
        with profile.step():
            with profile.part("forward"):
                pass
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if grown > 50_000:
        raise Mistake(f"2,000 steps made the profiler grow by {grown:,} bytes: keep sums, not a record of every step")


def grade_compression(attempt: Attempt) -> None:
    """Grade `compress-gradients`."""
    ask(attempt, top_k, attempt.seed(), see=COMPRESS)
    _grade_average(attempt)
    ask(attempt, convergence, see=COMPRESS)
    ask(attempt, quantization, attempt.seed(), see=COMPRESS)


@reported
def top_k(module: ModuleType, seed: int) -> None:
    """Check which entries are sent and what is kept."""
    torch.manual_seed(seed)
    for fraction, other in ((0.1, (57,)), (0.25, (3, 2, 3))):
        _compressed(module, fraction, torch.zeros(other))


def _compressed(module: ModuleType, fraction: float, other: torch.Tensor) -> None:
    compressor = module.GradientCompressor(fraction)
    left = {"weight": torch.zeros(20, 30), "other": torch.zeros(20, 30), "bias": torch.zeros(4), "odd": other}
    for _ in range(3):
        for name in left:
            gradient = torch.randn(left[name].shape)
            given, total = gradient.clone(), gradient + left[name]
            values, indices = compressor.compress(name, gradient)
            if not torch.equal(gradient, given):
                raise Mistake("compress() changed the gradient that it was given: work on a copy")
            gradient.zero_()  # as zero_grad() does after the step
            _check_names(compressor, name, given, left, values, indices)
            left[name] = _check_kept(compressor, name, total, values, indices, fraction)


def _check_names(
    compressor: Any, name: str, given: torch.Tensor, left: dict[str, torch.Tensor], values: Any, indices: Any
) -> None:
    """Raise where the residual of another name was added."""
    kept = compressor.residuals.get(name)
    for other, rest in left.items():
        if other != name and kept is not None and rest.shape == given.shape and bool(rest.any()):
            sent = torch.zeros(given.numel()).index_add_(0, indices.long(), values.float()).view_as(given)
            if torch.allclose(sent + kept, given + rest, atol=1e-5):
                raise Mistake(
                    f"the residual of {other!r} was added to the gradient of {name!r}: keep one for each name"
                )


def _check_kept(
    compressor: Any, name: str, total: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, fraction: float
) -> torch.Tensor:
    """Compare what is sent and what is kept with gradient plus residual."""
    count = max(1, int(total.numel() * fraction))
    if len(values) == 0:
        raise Mistake(
            f"nothing of the {total.numel()} entries of {name!r} is sent: {fraction:.0%} of {total.numel()} is less "
            "than 1, send at least one entry"
        )
    if len(values) != count:
        exact = total.numel() * fraction
        rounded = f": {exact:g}, rounded down" if exact != count and exact > 1 else ""
        raise Mistake(
            f"{len(values)} of the {total.numel()} entries of {name!r} are sent; with fraction={fraction} it is "
            f"{count}{rounded}"
        )
    sent = torch.zeros(total.numel())
    sent[indices.long()] = values.float()
    kept = compressor.residuals.get(name)
    if kept is None or not bool(kept.any()):
        raise Mistake("what is not sent is lost: residuals[name] must keep it for the next gradient")
    if kept.shape != total.shape:
        raise Mistake(f"residuals[{name!r}] has the shape {tuple(kept.shape)}, the gradient {tuple(total.shape)}")
    both = sent.view_as(total) + kept
    if not torch.allclose(both, total, atol=1e-5):
        twice = torch.allclose(kept, total, atol=1e-5)
        raise Mistake(
            "entries that were sent are still in the residual: they will be sent twice"
            if twice
            else f"sent plus residual differs by {(both - total).abs().max():.3f} from the gradient plus the residual "
            "of the step before: each entry is either sent, with what was kept of it, or kept"
        )
    largest = total.abs().flatten().topk(count).values.min()
    if values.abs().min() < largest - 1e-5:
        raise Mistake(
            f"an entry of size {values.abs().min():.3f} is sent where {largest:.3f} is kept: compare absolute values"
        )
    return kept.clone()


def _grade_average(attempt: Attempt) -> None:
    seed, world, size, fraction = attempt.seed(), 3, 5000, 0.01
    answers = attempt.run(rank_average, world, (seed, size, fraction))
    for step in range(2):
        expected = _mean_of_sent(seed, world, size, fraction, step)
        for answer in answers:
            found = answer.value[step]
            if not isinstance(found, torch.Tensor):
                raise Mistake(f"average() returned {found!r:.80}; it should return the mean, a tensor", COMPRESS)
            if found.shape != expected.shape:
                raise Mistake(
                    f"average() returned the shape {tuple(found.shape)} for a gradient {tuple(expected.shape)}"
                )
            if torch.allclose(found, expected * world, atol=1e-5):
                raise Mistake(f"average() returns the sum over {world} ranks: divide by their number", COMPRESS)
            if not torch.allclose(found, expected, atol=1e-5):
                wrong = int(((found - expected).abs() > 1e-5).sum())
                raise Mistake(
                    f"rank {answer.rank}: average() is wrong in {wrong} of {size} entries. It is the sum of the "
                    "entries that each rank sent, at the places that this rank sent, divided by the number of ranks; "
                    "where two ranks sent one place, both count",
                    COMPRESS,
                )
    needed = 2 * 2 * 4 * int(size * fraction)  # of two gradients: values and places, 4 bytes each
    limit = needed * 5 // 4  # lengths and frames of messages
    for answer in answers:
        sent = sum(call.bytes for call in answer.calls)
        if sent > limit:
            raise Mistake(
                f"rank {answer.rank} put {sent:,} bytes on the wire for two gradients of {size * 4:,} bytes with "
                f"fraction={fraction}; {needed:,} are enough: send values and places, 4 bytes each (torch.float32, "
                "torch.int32), not the whole gradient, no 8-byte places and no pickled tensors",
                COMPRESS,
            )


def _gradient(seed: int, rank: int, step: int, size: int) -> torch.Tensor:
    shared = torch.randn(size, generator=torch.Generator().manual_seed(seed + 100 + step)) ** 3
    own = torch.randn(size, generator=torch.Generator().manual_seed(seed + rank + 10 * step))
    return (shared + own).view(-1, 50)


def rank_average(
    module: ModuleType, rank: int, world: int, seed: int, size: int, fraction: float
) -> list[torch.Tensor]:
    """Average two gradients."""
    compressor = module.GradientCompressor(fraction)
    return [compressor.average("weight", _gradient(seed, rank, step, size)) for step in range(2)]


def _mean_of_sent(seed: int, world: int, size: int, fraction: float, last: int) -> torch.Tensor:
    """Return the mean that the ranks should have after a number of steps, computed rank by rank."""
    total = torch.zeros(size)
    for rank in range(world):
        rest = torch.zeros(size)
        for step in range(last + 1):
            rest = rest + _gradient(seed, rank, step, size).flatten()
            bound = rest.abs().topk(int(size * fraction)).values.min()
            sent = torch.where(rest.abs() >= bound, rest, 0.0)
            rest = rest - sent
        total += sent
    return (total / world).view(-1, 50)


@reported
def convergence(module: ModuleType) -> None:
    """Descend where one coordinate is noise that is always the largest."""
    compressor, place = module.GradientCompressor(0.1), torch.full((10,), 5.0)
    for step in range(400):
        gradient = place.clone()
        gradient[0] = 20.0 if step % 2 else -20.0
        values, indices = compressor.compress("x", gradient)
        place[indices.long()] -= 0.02 * values
    if place[1:].abs().max() > 1.0:
        raise Mistake(
            f"400 steps of descent end at {place[1:].abs().max():.1f}, which should be near 0: small entries never go"
        )


@reported
def quantization(module: ModuleType, seed: int) -> None:
    """Check range, error and mean of int8 values."""
    torch.manual_seed(seed)
    gradient, encode, decode = (
        torch.randn(6, 50) * 3,
        module.GradientCompressor.quantize,
        module.GradientCompressor.dequantize,
    )
    gradient[2, 7] = -1.5 * gradient.abs().max()  # the largest entry is negative
    values, scale = encode(gradient)
    if values.dtype != torch.int8 or values.shape != gradient.shape:
        raise Mistake(
            f"quantize() returned {values.dtype} {tuple(values.shape)}; it should be int8 {tuple(gradient.shape)}"
        )
    step = gradient.abs().max().item() / 127
    error = (decode(values, scale) - gradient).abs().max().item()
    if error > 1.01 * step:
        raise Mistake(
            f"dequantize(quantize(x)) differs from x by {error:.3f}; one of the 127 steps to the largest entry is "
            f"{step:.4f}, and no entry should be off by more: check the scale, and the largest entries"
        )
    wrong = (127 * scale.item() / gradient.abs().max().item() - 1) if gradient.abs().max() else 0.0
    if wrong < -0.002:
        raise Mistake(
            f"the scale is {scale.item():.5f}, the largest entry divided by {gradient.abs().max() / scale:.1f}: int8 "
            "goes to 127 only, so the largest entry cannot be written. The scale is the largest absolute value over 127"
        )
    mean = sum(decode(*encode(gradient)) for _ in range(300)) / 300
    bias = (mean - gradient).abs().max().item()
    if bias > 0.25 * step:
        raise Mistake(
            f"over 300 quantizations the mean of an entry is off by {bias / step:.2f} steps: rounding to the nearest "
            "is wrong in the same way each time. Round up with the probability of the fraction, so the mean is right"
        )
    _check_largest(encode)
    zero = decode(*encode(torch.zeros(5)))
    if not torch.equal(zero, torch.zeros(5)):
        raise Mistake(f"a gradient of zeros comes back as {zero.tolist()}: its scale is 0, do not divide by it")


def _check_largest(encode: Any) -> None:
    """Quantize enough equal entries that a random number just below 1 is among those added to them."""
    gradient = torch.full((4_000_000,), 3.0)
    values, _ = encode(gradient)
    turned = int((values < 0).sum())
    if turned:
        raise Mistake(
            f"{turned} of {len(gradient):,} entries, all equal and positive, became {values.min().item()}: 127 plus a "
            "random number just below 1 is 128 after rounding, and 128 as int8 is -128. Clamp to -127 and 127 before "
            "you convert"
        )
