"""The exercises of monitoring; metrics and stragglers are graded here, profiler and compression in compression.py."""

from __future__ import annotations

import gc
import time
import weakref
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from grader.checks.compression import grade_compression, grade_profiler
from grader.checks.saving import ask, reported
from grader.exercise import Attempt, Exercise, Mistake

TEMPLATE = "phase4_production/template_monitoring.py"
METRICS = "One report for all ranks"
SLOW = "Name the slow rank, not those that wait"
NAMES = ("seconds", "loss")


class Watched(torch.Tensor):
    """A tensor that counts how often its value is asked for."""

    reads = 0

    def _read(self, name: str, *args: Any) -> Any:
        Watched.reads += 1
        return getattr(self.as_subclass(torch.Tensor), name)(*args)

    def item(self) -> Any:
        """Count."""
        return self._read("item")

    def tolist(self) -> Any:
        """Count."""
        return self._read("tolist")

    def numpy(self, *args: Any) -> Any:
        """Count."""
        return self._read("numpy")

    def cpu(self, *args: Any) -> Any:
        """Count."""
        return self._read("cpu")

    def __float__(self) -> float:
        return self._read("__float__")  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        return self._read("__bool__")  # type: ignore[no-any-return]


class Graph(torch.autograd.Function):
    """An operation whose part of the graph can be seen to live."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, token: Any) -> torch.Tensor:
        """Return the value."""
        context.token = token
        return value * 1.0

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient."""
        return gradients[0], None


class Token:
    """Lives as long as a graph."""


def grade_metrics(attempt: Attempt) -> None:
    """Grade `metrics-over-ranks`."""
    seed = attempt.seed()
    for answer in attempt.run(rank_adds, 2, (seed,)):
        if answer.calls:
            line = answer.calls[0].line
            raise Mistake(
                f"add() called {answer.calls[0].kind} (line {line}): a step must not communicate for metrics. Keep the "
                "values, and let reduce() send them together",
                METRICS,
            )
        _check_adds(answer.value)
    try:
        answers = attempt.run(rank_reduces, 3, (seed,), timeout=8.0)
    except Mistake as mistake:
        if "SIGABRT" not in str(mistake):
            raise
        reason = "ranks have other numbers of steps, and what they give to one collective must have one shape"
        raise Mistake(f"{str(mistake).rstrip('.')}: {reason}. Fill up to the capacity", METRICS) from None
    for answer in answers:
        if len(answer.calls) != 2:
            kinds = [call.kind for call in answer.calls]
            raise Mistake(
                f"two reports made {len(kinds)} calls ({', '.join(kinds)}): one collective per report is enough",
                METRICS,
            )
        for interval in range(2):
            for name in NAMES:
                found, who = answer.value[interval][name], f"rank {answer.rank}, {name}"
                _name_mistake(found, seed, interval, name, answer.rank)
                _compare_summary(found, _rows(seed, interval, name), who)


def _name_mistake(found: dict[str, float], seed: int, interval: int, name: str, rank: int) -> None:
    """Raise where a report is what a known mistake gives."""
    rows, own = _rows(seed, interval, name), _rows(seed, interval, name, rank)
    last = {each: [row for row in rows if row[2] == each][-1][1] for each in range(3)}
    both = rows + (_rows(seed, 0, name) if interval else [])
    known = {
        f"the report of rank {rank} holds the steps of this rank only: gather those of all ranks": own,
        "every step has the value of the last step of its rank: the caller uses the tensor again, so keep a copy": [
            (samples, last[each], each) for samples, _, each in rows
        ],
        "the second report still holds the steps of the first: begin a new interval": both,
    }
    right = _moments(rows)
    for text, mistaken in known.items():
        wrong = _moments(mistaken)
        if wrong != right and all(abs(found[field] - wrong[field]) < 1e-5 for field in wrong):
            raise Mistake(f"{name}: {text}", METRICS)


def _moments(rows: list[tuple[int, float, int]]) -> dict[str, float]:
    values = [value for _, value, _ in rows]
    mean = sum(samples * value for samples, value, _ in rows) / sum(samples for samples, _, _ in rows)
    return {"mean": mean, "minimum": min(values), "maximum": max(values)}


def _check_adds(value: dict[str, Any]) -> None:
    if value["reads"]:
        raise Mistake(
            f"add() asked for the value of a tensor {value['reads']} times in 5 steps (item(), float(), cpu()): on a "
            "GPU each of these waits until all work that is queued is done. Keep the tensors until reduce()",
            METRICS,
        )
    if value["alive"]:
        raise Mistake(
            "the graph of a loss lives after add(): keep loss.detach(), or the memory of every step is kept", METRICS
        )


def rank_adds(module: ModuleType, rank: int, world: int, seed: int) -> dict[str, Any]:
    """Add tensors that count reads, and look whether their graph is let go."""
    window = module.MetricWindow(NAMES, 8)
    tokens, weight = [], torch.ones((), requires_grad=True)
    Watched.reads = 0
    for _ in range(5):
        token = Token()
        tokens.append(weakref.ref(token))
        loss = Graph.apply(weight, token)
        window.add(4, loss=loss.as_subclass(Watched), seconds=0.1)
        del loss, token
    gc.collect()
    return {"reads": Watched.reads, "alive": sum(token() is not None for token in tokens)}


def _rows(seed: int, interval: int, name: str, rank: int | None = None) -> list[tuple[int, float, int]]:
    """Return (samples, value, rank) of every step of an interval, of one rank or of all."""
    found = []
    for each in range(3) if rank is None else [rank]:
        generator = torch.Generator().manual_seed(seed + 17 * each + 3 * interval + len(name))
        steps = 3 + (seed + each + interval) % 4
        values = torch.rand(steps, generator=generator) + (0.3 * each - 2.0 if name == "loss" else 0.0)
        samples = torch.randint(1, 30, (steps,), generator=torch.Generator().manual_seed(seed + each + interval))
        found += [(int(count), float(value), each) for count, value in zip(samples, values, strict=True)]
    return found


def rank_reduces(module: ModuleType, rank: int, world: int, seed: int) -> list[dict[str, Any]]:
    """Report two intervals with other numbers of steps on each rank; the loss is in a buffer that is used again."""
    window, buffer, reports = module.MetricWindow(NAMES, 16), torch.zeros(()), []
    for interval in range(2):
        rows = {name: _rows(seed, interval, name, rank) for name in NAMES}
        for (samples, loss, _), (_, seconds, _) in zip(rows["loss"], rows["seconds"], strict=True):
            buffer.fill_(loss)
            window.add(samples, loss=buffer, seconds=seconds)
        found = window.reduce()
        fields = ("mean", "minimum", "maximum", "rank", "p50", "p95")
        reports.append({name: {field: float(getattr(found[name], field)) for field in fields} for name in found})
    return reports


def _compare_summary(found: dict[str, float], rows: list[tuple[int, float, int]], who: str) -> None:
    values = torch.tensor([value for _, value, _ in rows], dtype=torch.float64)
    samples = torch.tensor([count for count, _, _ in rows], dtype=torch.float64)
    ranks = torch.tensor([rank for _, _, rank in rows])
    own = {
        "minimum": values.min().item(),
        "maximum": values.max().item(),
        "rank": float(ranks[values.argmax()]),
        "p50": values.quantile(0.5).item(),
        "p95": values.quantile(0.95).item(),
        "mean": ((values * samples).sum() / samples.sum()).item(),
    }
    plain = values.mean().item()
    of_means = sum(values[ranks == rank].mean().item() for rank in range(3)) / 3
    if min(abs(found["mean"] - plain), abs(found["mean"] - of_means)) < 1e-5 < abs(plain - own["mean"]):
        raise Mistake(
            f"{who}: the mean is {found['mean']:.4f}, the mean of the steps; weighted by samples it is "
            f"{own['mean']:.4f}. A batch of 3 samples must not count as much as one of 30",
            METRICS,
        )
    words = {
        "minimum": "the smallest value of all steps of all ranks",
        "maximum": "the largest value of all steps of all ranks",
        "rank": "the rank that had the largest value",
        "p50": "the median over the steps of all ranks, as torch.quantile gives it",
        "p95": "95% of the values of all ranks are below it, as torch.quantile gives it",
        "mean": "the sum of value times samples over all ranks, divided by the sum of samples, of this interval only",
    }
    for field, right in own.items():
        if not abs(found[field] - right) < 1e-5:
            raise Mistake(f"{who}: {field} is {found[field]:.4f}; it should be {right:.4f}: {words[field]}", METRICS)


def grade_stragglers(attempt: Attempt) -> None:
    """Grade `find-stragglers`."""
    ask(attempt, judgement, attempt.seed(), see=SLOW)
    slow = attempt.seed() % 3
    for answer in attempt.run(rank_straggler, 3, (slow,)):
        calls = len(answer.calls) - 7  # the barriers of the steps
        if calls != 3:
            raise Mistake(f"7 steps and 3 reports made {calls} calls; one per report is enough", SLOW)
        first, second, third = answer.value
        if first["ranks"] != [slow] or not first["lost"] > 0.02:
            raise Mistake(
                f"on real ranks, rank {slow} computes 200 ms and the others 60 ms per step; rank {answer.rank} reports "
                f"{first}: measure compute() and communicate() apart, each around its call",
                SLOW,
            )
        for name, found, culprit in (("second", second, (slow + 1) % 3), ("third", third, (slow + 2) % 3)):
            if found["ranks"] != [culprit]:
                raise Mistake(
                    f"in the {name} interval rank {culprit} is slow, and {found['ranks']} is named: each report begins "
                    "a new interval",
                    SLOW,
                )


def rank_straggler(module: ModuleType, rank: int, world: int, slow: int) -> list[dict[str, Any]]:
    """Report three intervals; in each another rank is slow."""
    watch, reports = module.StragglerWatch(), []
    for culprit, steps in ((slow, 4), ((slow + 1) % 3, 1), ((slow + 2) % 3, 2)):
        for _ in range(steps):
            watch.step(lambda: time.sleep(0.2 if rank == culprit else 0.06), dist.barrier)  # noqa: B023 (called at once)
        found = watch.report()
        reports.append({"ranks": list(found.ranks), "lost": found.lost})
    return reports


def transfers(steps: int) -> torch.Tensor:
    """Return how long the communication itself takes in each step."""
    return 0.004 + 0.002 * torch.linspace(0, 1, steps) ** 2


def _judged(module: ModuleType, compute: torch.Tensor) -> Any:
    waiting = compute.amax(0) - compute + transfers(compute.shape[1])
    return module.StragglerWatch(factor=1.3).judge(compute, waiting)


@reported
def judgement(module: ModuleType, seed: int) -> None:
    """Judge tables of times: one slow rank, none, a single slow step, one fast rank, several slow ranks."""
    generator = torch.Generator().manual_seed(seed)
    ranks, steps = 7, 11
    calm = 0.1 + 0.01 * torch.rand(ranks, steps, generator=generator)
    slow = seed % ranks
    table = calm.clone()
    table[slow] *= 1.8
    found = _judged(module, table)
    waits = [rank for rank in range(ranks) if rank != slow]
    if set(found.ranks) & set(waits):
        raise Mistake(
            f"rank {slow} computes 1.8 times as long as the others, and ranks {found.ranks} are named: the ranks with "
            "much waiting time wait for the slow one. Judge by compute time"
        )
    if found.ranks != [slow]:
        raise Mistake(
            f"rank {slow} computes 1.8 times as long as the others, and {found.ranks} is named; factor is 1.3"
        )
    if (found := _judged(module, calm)).ranks:
        raise Mistake(f"all ranks are equal within 10%, and {found.ranks} is named: there is not always a straggler")
    once = calm.clone()
    once[slow, 3] = 5.0
    if (found := _judged(module, once)).ranks:
        raise Mistake(
            f"one single step of rank {slow} took 5 s, and it is named: a mean follows one outlier, a median does not"
        )
    fast = calm.clone()
    fast[slow] *= 0.4
    if (found := _judged(module, fast)).ranks:
        raise Mistake(
            f"rank {slow} is faster than the others, and {found.ranks} are named: compare with the median rank"
        )
    _several(module, calm)
    _check_numbers(_judged(module, table), table, [slow])
    _even(module, seed)
    _near_the_limit(module, slow)


def _even(module: ModuleType, seed: int) -> None:
    """Judge an even number of ranks and of steps: the median is the mean of the two in the middle."""
    ranks, steps = 4, 2
    table = torch.tensor([[0.10, 0.12], [0.11, 0.11], [0.19, 0.17], [0.20, 0.28]])
    place = torch.randperm(ranks, generator=torch.Generator().manual_seed(seed))
    table = table[place]
    usual = table.mean(1)
    slow = [rank for rank in range(ranks) if usual[rank] > 1.3 * (0.11 + 0.18) / 2]
    found = _judged(module, table)
    if found.ranks != slow or not abs(found.slowdown.get(slow[0], 0.0) - 0.24 / 0.145) <= 0.005:
        raise Mistake(
            f"{ranks} ranks, {steps} steps, with the usual compute times {[round(x, 3) for x in usual.tolist()]}: rank "
            f"{slow} takes {0.24 / 0.145:.3f} times the median 0.145; you name {found.ranks} with {found.slowdown}. "
            "For an even number the median is the mean of the two in the middle (torch.quantile(0.5)); torch.median "
            "takes the lower one"
        )


def _near_the_limit(module: ModuleType, slow: int) -> None:
    for times, named in ((1.27, []), (1.34, [slow])):
        table = torch.full((7, 5), 0.1)
        table[slow] *= times
        if (found := _judged(module, table)).ranks != named:
            raise Mistake(
                f"rank {slow} computes {times} times as long as the others, factor=1.3: {found.ranks} is named, it "
                f"should be {named}"
            )


def _check_numbers(found: Any, table: torch.Tensor, slow: list[int]) -> None:
    usual = table.quantile(0.5, dim=1)
    right = {rank: round((usual[rank] / usual.quantile(0.5)).item(), 2) for rank in slow}
    if set(found.slowdown) != set(right) or any(abs(found.slowdown[rank] - right[rank]) > 0.02 for rank in right):
        raise Mistake(
            f"slowdown is {found.slowdown}; it should be {right}: for each rank that is named, and for no other, how "
            "many times the usual compute time of all it takes"
        )
    others = [rank for rank in range(len(table)) if rank not in slow]
    lost = (table.amax(0) - table[others].amax(0)).mean().item()
    if not abs(found.lost - lost) <= 1e-4:
        raise Mistake(
            f"lost is {found.lost:.4f} s per step; it is {lost:.4f}: in each step, the slowest of all minus the "
            "slowest of the ranks that are not named, and of that the mean over steps"
        )
    transfer = transfers(table.shape[1]).mean().item()
    if not abs(found.transfer - transfer) <= 1e-4:
        raise Mistake(
            f"transfer is {found.transfer:.4f} s per step; it is {transfer:.4f}, a mean over the steps: the rank that "
            "comes last waits for no other, so the smallest waiting time of a step is the communication itself"
        )


def _several(module: ModuleType, calm: torch.Tensor) -> None:
    table = calm.clone()
    table[[1, 4, 5]] *= torch.tensor([[1.5], [1.6], [2.5]])
    found = _judged(module, table)
    if sorted(found.ranks) != [1, 4, 5]:
        raise Mistake(
            f"ranks 1, 4 and 5 of 7 compute 1.5 to 2.5 times as long as the others, and {sorted(found.ranks)} are "
            "named: compare each rank with the median of the ranks, which slow ranks do not move"
        )
    _check_numbers(found, table, [1, 4, 5])


EXERCISES = (
    Exercise(
        name="metrics-over-ranks",
        title="One report for all ranks",
        template=TEMPLATE,
        target="MetricWindow",
        points=10,
        grade=grade_metrics,
    ),
    Exercise(
        name="find-stragglers",
        title="Name the slow rank, not those that wait",
        template=TEMPLATE,
        target="StragglerWatch",
        points=10,
        grade=grade_stragglers,
    ),
    Exercise(
        name="profile-step",
        title="See where a step spends its time",
        template=TEMPLATE,
        target="StepProfiler",
        points=10,
        grade=grade_profiler,
        forbidden=("torch.profiler.profile",),
    ),
    Exercise(
        name="compress-gradients",
        title="Send less, lose nothing",
        template=TEMPLATE,
        target="GradientCompressor",
        points=15,
        grade=grade_compression,
    ),
)
