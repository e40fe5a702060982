"""Grade the all-reduces of template_trainer.py (root, exchange, tree) and the measurement of their cost."""

from __future__ import annotations

import math
import statistics
import time
import timeit
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grader.exercise import Attempt, Mistake
from grader.ranks import Answer

HANG_SECONDS = 20.0
FIRST_DTYPE = "float64"
"""Type of the first tensor that is reduced. The second one is float32, so the type says to which a call belongs."""
BASE = 16.0
"""Rank r brings BASE**r times the same numbers: the digits of the result say how often each rank is in it."""


def check_waited(answers: list[Answer]) -> None:
    """Raise a Mistake for a call that was started and never waited for."""
    for answer in answers:
        for call in answer.calls:
            if call.end is None:
                raise Mistake(
                    f"Rank {answer.rank} starts {call.kind} in line {call.line} and never waits for it: the tensor may "
                    "still change while it is used. Call wait() on what it returns."
                )


def numbers(seed: int) -> Tensor:
    """Return small integers as float64; the shape depends on the seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 9, (3 + seed % 5, 7), generator=generator).double()


def noise(seed: int, rank: int) -> Tensor:
    """Return float32 numbers whose sum depends on the order of addition."""
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.randn(999, generator=generator) * 10.0 ** (rank - 2)


def rank_reduce(module: ModuleType, rank: int, world: int, name: str, seed: int, late: float) -> tuple[Tensor, Tensor]:
    """Reduce integers, then floats; the last rank comes late."""
    first, second = numbers(seed) * BASE**rank, noise(seed, rank)
    reduce = getattr(module, name)
    if rank == world - 1:
        time.sleep(late)
    reduce(first)
    reduce(second)
    return first, second


def run_reduce(attempt: Attempt, world: int, see: str) -> list[Answer]:
    """Run an all-reduce on `world` ranks and check the values."""
    seed = attempt.seed()
    name = attempt.exercise.target
    try:
        answers = attempt.run(rank_reduce, world, (name, seed, 0.1), timeout=HANG_SECONDS)
    except Mistake as mistake:
        raise Mistake(explain_hang(str(mistake), world), see=see) from mistake
    check_waited(answers)
    for answer in answers:
        check_digits(answer, world, seed, see)
    expected = torch.stack([noise(seed, rank).double() for rank in range(world)]).sum(0)
    for answer in answers:
        if not torch.allclose(answer.value[1].double(), expected, rtol=1e-4, atol=1e-4):
            raise Mistake(
                f"Rank {answer.rank} of {world}: the first sum was right, the second is not: a tensor is changed while "
                "it is still being sent, or used before it has arrived. wait() for the requests first.",
                see=see,
            )
        if not torch.equal(answer.value[1], answers[0].value[1]):
            raise Mistake(
                f"Rank {answer.rank} and rank 0 have sums that differ in the last bits: floating-point addition "
                "depends on the order. Add in the same order on all ranks, or the weights drift apart.",
                see=see,
            )
    return answers


def explain_hang(text: str, world: int) -> str:
    """Put the reason in front of a report of ranks that wait."""
    if text.count("waits in send") == world:
        return (
            "Every rank waits in send: a send waits until its receiver receives, and no rank receives. Start the sends "
            f"with isend, or let some ranks receive first. What was seen: {text}"
        )
    if "ended (SIG" in text:
        return f"{world} ranks: a message goes to a rank that does not exist, or the two sides differ in size. {text}"
    if "waits in" in text:
        return f"{world} ranks: a message has no partner: each send needs one recv on the other rank. {text}"
    return text


def check_digits(answer: Answer, world: int, seed: int, see: str) -> None:
    """Raise a Mistake unless each rank is in the result exactly once."""
    found, base = answer.value[0], numbers(seed)
    ratio = found / base
    where = f"Rank {answer.rank} of {world}"
    whole = int(ratio.flatten()[0]) if ratio.isfinite().all() else -1
    if whole < 0 or not torch.equal(found, base * whole):
        raise Mistake(f"{where}: {explain_mixed(found, base, answer.rank, world)}", see=see)
    counts = [whole // 16**rank % 16 for rank in range(world)]
    if counts == [1] * world:
        return
    own = [int(rank == answer.rank) for rank in range(world)]
    if counts == own:
        raise Mistake(
            f"{where} still holds its own tensor only: the sum must be in the tensor that was given.", see=see
        )
    parts = [f"rank {rank}'s tensor {count} times" for rank, count in enumerate(counts) if count > 1]
    lost = [f"rank {rank}" for rank, count in enumerate(counts) if not count]
    text = f"{where}: its result holds " + ", ".join(parts) if parts else f"{where}: its result"
    text += (" and" if parts else "") + (f" misses {', '.join(lost)}" if lost else "")
    raise Mistake(f"{text.removesuffix(' and')}. Each rank should be in the sum exactly once.", see=see)


def explain_mixed(found: Tensor, base: Tensor, rank: int, world: int) -> str:
    """Say what a result is that is not a sum of whole tensors."""
    total = sum(BASE**other for other in range(world))
    if torch.allclose(found, base * total / world):
        return "the result is the mean over the ranks; an all-reduce returns the sum."
    places = (found != base * total).nonzero()
    return f"{len(places)} of {found.numel()} entries are wrong, the first at {places[0].tolist()}."


def check_messages(answers: list[Answer], allowed: list[int], total: int, see: str) -> None:
    """Raise a Mistake unless the ranks send `total` messages for the first tensor, and rank r at most allowed[r]."""
    sends = [sum(call.is_send and call.dtype == FIRST_DTYPE for call in answer.calls) for answer in answers]
    size = max((call.bytes for answer in answers for call in answer.calls if call.dtype == FIRST_DTYPE), default=0)
    for rank, count in enumerate(sends):
        if count > allowed[rank]:
            raise Mistake(
                f"{len(answers)} ranks: rank {rank} sends {count} messages, {allowed[rank]} are enough. Messages by "
                f"rank: {sends}, {size} bytes each at most.",
                see=see,
            )
    if sum(sends) != total:
        raise Mistake(f"{len(answers)} ranks send {sum(sends)} messages {sends}; it should be {total}.", see=see)


def grade_root(attempt: Attempt) -> None:
    """Check values and messages of the all-reduce through rank 0."""
    see = "All-reduce through one root"
    for world in (4, 2):
        answers = run_reduce(attempt, world, see)
        check_messages(answers, [world - 1] + [1] * (world - 1), 2 * (world - 1), see)
        astray = [call for answer in answers[1:] for call in answer.calls if call.is_send and call.peer]
        if astray:
            raise Mistake(
                f"A rank sends to rank {astray[0].peer} (line {astray[0].line}): here every message goes to rank 0 or "
                "comes from it.",
                see=see,
            )


def grade_exchange(attempt: Attempt) -> None:
    """Check values, equal bits and messages of the exchange."""
    see = "All-reduce by exchange with everyone"
    for world in (4, 2):
        answers = run_reduce(attempt, world, see)
        check_messages(answers, [world - 1] * world, world * (world - 1), see)


def grade_tree(attempt: Attempt) -> None:
    """Check values and messages of the tree on a power of two and on odd numbers of ranks."""
    see = "All-reduce along a tree"
    for world in (4, 5, 3):
        answers = run_reduce(attempt, world, see)
        most = math.ceil(math.log2(world))
        check_messages(answers, [most] * world, 2 * (world - 1), see)
        received = [
            sum("recv" in call.kind and call.dtype == FIRST_DTYPE for call in answer.calls) for answer in answers
        ]
        if max(received) > most:
            raise Mistake(
                f"{world} ranks receive {received} messages; in a tree no rank receives more than {most}.", see
            )


# measure-all-reduce --------------------------------------------------------------------------------------------------

FIRST_CALL, OUTLIER, SKEW = 0.050, 0.025, 0.008
"""Seconds: the first call of a size is longer by this, one later call by this, and rank 1 prepares for this long."""
REPEATS = 5
SIZES = [100_000, 400_000, 700_000, 1_000_000]
CLOCKS = ("perf_counter", "monotonic", "time")
COMPUTE_CLOCKS = ("process_time", "thread_time")
SYNCHRONIZING = ("barrier", "allreduce", "allgather", "broadcast")


class Clock:
    """A clock that only the network of the grader moves: measurements have no noise and take no time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.busy = False

    def read(self) -> float:
        """Return the seconds; each look takes a microsecond."""
        self.now += 1e-6
        return self.now

    def meet(self) -> None:
        """Wait for the latest rank: all ranks continue at its time."""
        if self.busy:
            return
        self.busy = True
        latest = torch.tensor([self.now], dtype=torch.float64)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX)
        self.now = latest.item()
        self.busy = False

    def install(self, module: ModuleType) -> None:
        """Take the place of the clocks of Python, and let collective calls of the learner wait for the latest rank."""
        for name in CLOCKS + COMPUTE_CLOCKS:
            read = self.read if name in CLOCKS else float
            for place in (time, module):
                if callable(getattr(place, name, None)):
                    setattr(place, name, read)
                if callable(getattr(place, f"{name}_ns", None)):
                    setattr(place, f"{name}_ns", lambda read=read: int(1e9 * read()))
        timeit.default_timer = self.read
        for method in SYNCHRONIZING:
            setattr(dist.ProcessGroup, method, self.met(getattr(dist.ProcessGroup, method)))

    def met(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the process group that waits for the latest rank first."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.meet()
            return real(*args, **kwargs)

        return call


class Link:
    """A network with a known cost: an all-reduce takes alpha + beta * bytes on the slowest rank."""

    def __init__(self, rank: int, alpha: float, beta: float, clock: Clock, outlier: int, alternate: bool) -> None:
        self.rank, self.alpha, self.beta, self.clock = rank, alpha, beta, clock
        self.outlier, self.alternate = outlier, alternate
        self.calls: Counter[int] = Counter()

    def seconds(self, size: int) -> float:
        """Return the seconds of a call on this rank: one rank, always rank 0 or each in turn, needs half as long."""
        fast = self.calls[size] % 2 if self.alternate else 0
        return (self.alpha + self.beta * size) * (0.5 if self.rank == fast else 1.0)

    def all_reduce(self, tensor: Tensor) -> None:
        """Wait for the other ranks, then as long as the network takes."""
        size = tensor.numel() * tensor.element_size()
        extra = {self.outlier: OUTLIER, 0: FIRST_CALL}.get(self.calls[size], 0.0)
        seconds = self.seconds(size) + extra
        self.calls[size] += 1
        self.clock.meet()
        self.clock.now += seconds

    def prepare(self, size: int) -> Tensor:
        """Return a tensor of `size` bytes; rank 1 takes longer for it."""
        self.clock.now += SKEW if self.rank == 1 else 0.0
        return torch.zeros(size // 4)


def rank_measure(
    module: ModuleType, rank: int, world: int, alpha: float, beta: float, repeats: int, outlier: int, alternate: bool
) -> dict[str, Any]:
    """Measure an artificial network, in which the call number `outlier` of each size is slow (0: none)."""
    clock = Clock()
    clock.install(module)
    link = Link(rank, alpha, beta, clock, outlier, alternate)
    cost = module.measure_all_reduce(link.all_reduce, link.prepare, list(SIZES), repeats=repeats)
    return {"alpha": float(cost.alpha), "beta": float(cost.beta), "calls": dict(link.calls)}


def guesses(alpha: float, beta: float) -> list[tuple[float, float, str]]:
    """Return what typical mistakes find for alpha and beta, with a text for each; the right answer comes first."""
    seconds = [alpha + beta * size for size in SIZES]
    through_zero = sum(s * t for s, t in zip(SIZES, seconds, strict=True)) / sum(size**2 for size in SIZES)
    return [
        (alpha, beta, ""),
        (
            alpha + SKEW,
            beta,
            "the time that a rank waits for the late one is in it: put a barrier before the clock starts",
        ),
        (
            alpha + (FIRST_CALL + OUTLIER) / (REPEATS + 1),
            beta,
            "the slow first call of each size is in it: make one call that does not count",
        ),
        (alpha + FIRST_CALL / REPEATS, beta, "the slow first call of each size is in it: make one that does not count"),
        (alpha + FIRST_CALL, beta, "only the slow first call of each size is measured"),
        (alpha + OUTLIER / REPEATS, beta, "one slow call of five moves the mean: take the median or the minimum"),
        (alpha + OUTLIER, beta, "the slowest call counts: take the median or the minimum over the calls"),
        (alpha / 2, beta / 2, "these are the times of rank 0 alone: the slowest rank counts (ReduceOp.MAX)"),
        (alpha * 0.75, beta * 0.75, "this is the mean over the ranks: the slowest rank counts (ReduceOp.MAX)"),
        (alpha * 1.5, beta * 1.5, "the times of the ranks are summed: the slowest rank counts (ReduceOp.MAX)"),
        (alpha * REPEATS + OUTLIER, beta * REPEATS, "these are the seconds of all repeats together: divide"),
        (alpha, beta * 4, "beta is per element: a float32 has 4 bytes, and sizes are bytes"),
        (alpha, beta / 4, "beta is too small by 4: sizes are bytes already"),
        (beta, alpha, "alpha and beta are exchanged: the slope is beta, the intercept alpha"),
        (alpha, 1 / beta, "beta is bytes per second: it should be seconds per byte"),
        (0.0, through_zero, "alpha is 0: the line need not go through zero; fit slope and intercept"),
        (min(seconds), beta, "alpha is the time of the smallest size, which has a payload as well"),
        (statistics.mean(seconds), 0.0, "the cost does not depend on the size: is prepare called with each size?"),
        (0.0, 0.0, "nothing was measured: process_time counts computing and not waiting; use time.perf_counter"),
        (alpha * 1000, beta * 1000, "the unit is milliseconds: it should be seconds"),
    ]


def grade_measure(attempt: Attempt) -> None:
    """Check the fitted cost on a network that the grader slows down by a known amount."""
    alpha, beta = attempt.random.uniform(0.004, 0.006), attempt.random.uniform(8e-9, 12e-9)
    see = "Measure and predict the cost of an all-reduce"
    answers = attempt.run(rank_measure, 2, (alpha, beta, REPEATS, 3, False), timeout=HANG_SECONDS)
    check_calls(answers, REPEATS)
    if text := explain_cost(answers, alpha, beta):
        raise Mistake(text, see=see)
    others = (
        (3, 1, False, "one of three calls is slow, and it moves the result. Is the slow first"
         " call among those that the median is taken of?"),
        (4, 0, True, "the ranks are slow in turn. The seconds of one call are those of its slowest rank: take the "
         "maximum over the ranks for each call, and the median over the calls then"),
    )  # fmt: skip
    for repeats, outlier, alternate, reason in others:
        answers = attempt.run(rank_measure, 2, (alpha, beta, repeats, outlier, alternate), timeout=HANG_SECONDS)
        check_calls(answers, repeats)
        if text := explain_cost(answers, alpha, beta, known=False):
            raise Mistake(f"With repeats={repeats}: {text} Here {reason}", see=see)


def check_calls(answers: list[Answer], repeats: int) -> None:
    """Raise a Mistake unless each size was measured, and not too often."""
    calls = answers[0].value["calls"]
    unknown = sorted(set(calls) - set(SIZES))
    missing = sorted(set(SIZES) - set(calls))
    if missing:
        raise Mistake(f"No all_reduce had {missing[0]} bytes; sizes that were seen: {sorted(calls)}. Use every size.")
    if unknown:
        raise Mistake(f"An all_reduce had {unknown[0]} bytes, which is not one of the sizes: prepare takes bytes.")
    most = max(calls.values())
    if most > repeats + 2:
        raise Mistake(f"A size was measured {most} times; with repeats={repeats} it should be {repeats + 2} at most.")


def explain_cost(answers: list[Answer], alpha: float, beta: float, known: bool = True) -> str:
    """Return which mistake the costs look like, if it is one of the `known` ones, or nothing if they are right."""
    found: list[tuple[float, float]] = [(answer.value["alpha"], answer.value["beta"]) for answer in answers]
    if not all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(*found, strict=True)):
        return (
            f"Rank 0 returns alpha = {1000 * found[0][0]:.2f} ms, rank 1 {1000 * found[1][0]:.2f} ms: each uses its "
            "own clock. Agree on the slowest rank (ReduceOp.MAX)."
        )

    def distance(guess: tuple[float, float, str]) -> float:
        latency = abs(found[0][0] - guess[0]) / max(abs(guess[0]), 0.1 * alpha)
        return latency + abs(found[0][1] - guess[1]) / max(abs(guess[1]), 0.1 * beta)

    best = min(guesses(alpha, beta), key=distance)
    if not best[2] and distance(best) < 0.05:
        return ""
    text = (
        f"A call takes {1000 * alpha:.2f} ms + {1e9 * beta:.2f} ns per byte on this network; you found "
        f"alpha = {1000 * found[0][0]:.2f} ms, beta = {1e9 * found[0][1]:.2f} ns"
    )
    return f"{text}: {best[2]}." if known and best[2] and distance(best) < 0.1 else f"{text}."
