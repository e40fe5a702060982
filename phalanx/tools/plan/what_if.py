"""Plans for other clusters, goals and constraints, next to the one that was asked for: `--what-if`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from phalanx.errors import UsageError, unknown_name
from phalanx.observe.format import table
from phalanx.tools.plan import presets
from phalanx.tools.plan.cluster import Cluster
from phalanx.tools.plan.estimator import Estimator
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.planner import make_plan
from phalanx.tools.plan.plans import RECOMPUTE, Goal, Layout, Plan
from phalanx.tools.plan.search import HEADROOM, Constraints
from phalanx.tools.plan.text import seconds

LONGEST = 1 << 22


@dataclass(frozen=True)
class PlanCase:
    """A job: what a plan is made for."""

    model: ModelShape | TracedShape
    cluster: Cluster
    goal: Goal
    limits: Constraints

    def plan(self) -> Plan:
        """Return the plan of this job."""
        return make_plan(self.model, self.cluster, self.goal, self.limits)


@dataclass(frozen=True)
class Answer:
    """A question with its answer: a sentence, and plans of the variants that were compared."""

    question: str
    sentence: str = ""
    variants: tuple[tuple[str, Plan], ...] = ()

    def text(self) -> str:
        """Return the answer as lines."""
        lines = [f"what if: {self.question}", *([f"  {self.sentence}"] if self.sentence else [])]
        return "\n".join([*lines, *([variants_table(self.variants)] if self.variants else [])])

    def data(self) -> dict[str, object]:
        """Return plain data."""
        variants = [dict(zip(HEAD, row, strict=True)) for row in rows(self.variants)]
        return {"question": self.question, "answer": self.sentence, "variants": variants}


HEAD = ("variant", "step", "of the first", "MFU", "GiB", "training", "layout")


def variants_table(variants: tuple[tuple[str, Plan], ...]) -> str:
    """Return a row per variant: step time, memory, cost and layout."""
    return table([HEAD, *rows(variants)], "  ")


def rows(variants: tuple[tuple[str, Plan], ...]) -> Iterator[tuple[str, ...]]:
    """Yield a row of `HEAD` for each variant."""
    first = variants[0][1].best.estimate.step_seconds if variants and variants[0][1].best else None
    for name, plan in variants:
        if plan.best is None:
            yield name, "-", "-", "-", "-", "-", "nothing fits"
            continue
        estimate = plan.best.estimate
        relative = f"{estimate.step_seconds / first:.0%}" if first else "-"
        cost = seconds(plan.cost["days"] * 86400) if "days" in plan.cost else "-"
        cost += f", ${plan.cost['money']:,.0f}" if plan.cost.get("money") is not None else ""
        memory = f"{estimate.needed_gib:.1f}"
        yield (
            name,
            seconds(estimate.step_seconds),
            relative,
            f"{estimate.mfu:.1%}",
            memory,
            cost,
            plan.best.layout.title,
        )


def answer(question: str, case: PlanCase, plan: Plan) -> Answer:
    """Return the answer to one question of `--what-if`: `fewest-gpus`, `gpu=h200`, ..."""
    name, _, value = question.partition("=")
    if name not in QUESTIONS:
        raise UsageError(unknown_name("question", question, QUESTIONS), hint="For example: --what-if gpu=h200")
    return QUESTIONS[name](case, plan, value)


def _variants(question: str, plan: Plan, cases: dict[str, PlanCase]) -> Answer:
    return Answer(question, "", (("as planned", plan), *((name, case.plan()) for name, case in cases.items())))


def _largest_batch(case: PlanCase, plan: Plan, value: str) -> Answer:
    if plan.best is None:
        return Answer("largest batch", "no batch fits: see the smallest changes")
    layout = plan.best.layout
    micro = _largest(lambda size: _fits(case, replace(layout, micro_batch=size), case.goal), 1, 1 << 16)
    ranks = layout.dp
    return Answer(
        "largest batch",
        f"micro-batch {micro} fits, which is {micro * ranks:,} samples over {ranks} data ranks without accumulation; "
        "accumulation makes any multiple of it, in the same memory",
    )


def _longest_sequence(case: PlanCase, plan: Plan, value: str) -> Answer:
    if plan.best is None or not isinstance(case.model, ModelShape) or case.model.patches:
        return Answer("longest sequence", "this model has no sequence, or nothing fits")
    others = [other.layout for other in (plan.best, *plan.runners_up)]
    tried = {smaller.title: smaller for layout in others for smaller in _smaller(layout)}

    def longest(layout: Layout) -> int:
        step = 128 * layout.cp

        def fits(size: int) -> bool:
            return _fits(case, layout, replace(case.goal, seq_len=step * size))

        return step * _largest(fits, 1, LONGEST // step)

    lengths = {name: longest(layout) for name, layout in tried.items()}
    best = max(lengths, key=lambda name: lengths[name])
    planned = lengths[replace(plan.best.layout, micro_batch=1).title]
    return Answer(
        "longest sequence", f"{planned:,} tokens in the planned layout at micro-batch 1; {lengths[best]:,} with {best}"
    )


def _smaller(layout: Layout) -> tuple[Layout, Layout]:
    return replace(layout, micro_batch=1), replace(layout, micro_batch=1, recompute="full")


def _fits(case: PlanCase, layout: Layout, goal: Goal) -> bool:
    estimator = Estimator(case.model, case.cluster, goal)
    return estimator.needed_gib(layout) <= HEADROOM * estimator.gpu.memory_gib


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number that fits, by bisection; 0 where none does."""
    if not fits(low):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fewest_gpus(case: PlanCase, plan: Plan, value: str) -> Answer:
    """Halve the GPUs while a layout fits; double them where none does."""
    plans: list[tuple[str, Plan]] = [(_gpus(case.cluster.gpus), plan)]
    gpus = case.cluster.gpus
    while (gpus := gpus // 2 if plan.fits else gpus * 2) >= 1 and gpus <= 1 << 16:
        other = replace(case, cluster=replace(case.cluster, gpus=gpus)).plan()
        plans.append((_gpus(gpus), other))
        if other.fits != plan.fits:
            break
    fitting = [name for name, candidate in plans if candidate.fits]
    sentence = f"the fewest that fit, by halves and doubles: {fitting[-1]}" if fitting else "no number of GPUs fits"
    return Answer("fewest GPUs", sentence, tuple(plans))


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


def _limited(question: str, changes: dict[str, dict[str, Any]]) -> Callable[[PlanCase, Plan, str], Answer]:
    """Return the answer that compares plans under other constraints, each by its name."""

    def compare(case: PlanCase, plan: Plan, value: str) -> Answer:
        limits = {name: replace(case.limits, **change) for name, change in changes.items()}
        return _variants(
            question, plan, {name: replace(case, limits=constraints) for name, constraints in limits.items()}
        )

    return compare


_STAGES = ("ddp (nothing sharded)", "zero-1: optimizer", "zero-2: gradients too", "zero-3: all (fsdp)")


def _fp8(case: PlanCase, plan: Plan, value: str) -> Answer:
    gpu = presets.parts_of(case.cluster)[0]
    if "fp8" not in gpu.tflops or plan.best is None:
        return Answer("fp8", f"{gpu.name} has no fp8" if plan.best else "nothing fits")
    step = Estimator(case.model, case.cluster, replace(case.goal, precision="fp8")).time(plan.best.layout).seconds
    change = step / plan.best.estimate.step_seconds - 1
    return Answer("fp8", f"products in fp8: step {seconds(step)} ({change:+.0%}); --fast plans with it, compiled")


def _other_gpu(case: PlanCase, plan: Plan, value: str) -> Answer:
    gpu_name = presets.parts_of(case.cluster)[0].name
    names = (
        [presets.gpu(value).name]
        if value
        else [name for name in ("a100-80", "h100", "h200", "b200") if name != gpu_name]
    )
    return _variants("another GPU", plan, dict(_on_gpu(case, name) for name in names))


def _on_gpu(case: PlanCase, name: str) -> tuple[str, PlanCase]:
    """Return the job on another GPU, in bf16 where that has no fp8, and its name."""
    other = replace(case, cluster=_with_gpu(case.cluster, name))
    if case.goal.precision != "fp8" or "fp8" in presets.gpu(name).tflops:
        return name, other
    return f"{name} (bf16)", replace(other, goal=replace(case.goal, precision="bf16"))


def _with_gpu(cluster: Cluster, name: str) -> Cluster:
    """Return the cluster with another GPU, its own links, and the price of the first instance type that has it."""
    priced = presets.usual_instance(name)
    price = None if priced is None or priced.price is None else priced.price / priced.gpus
    return replace(
        cluster,
        gpu=name,
        intra_node=None,
        inter_node=None,
        inter_node_gbps=None,
        price_per_gpu_hour=price,
        instance=None,
    )


QUESTIONS: dict[str, Callable[[PlanCase, Plan, str], Answer]] = {
    "largest-batch": _largest_batch,
    "longest-sequence": _longest_sequence,
    "fewest-gpus": _fewest_gpus,
    "sharding": _limited("other sharding", {name: {"zero_stage": stage} for stage, name in enumerate(_STAGES)}),
    "offload": _limited("offload", {f"offload {name}": {"offload": name} for name in ("none", "cpu")}),
    "recompute": _limited("recomputation", {f"recompute {name}": {"recompute": name} for name in RECOMPUTE}),
    "fp8": _fp8,
    "gpu": _other_gpu,
}
"""The questions of `--what-if`."""
