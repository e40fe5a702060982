"""`estimate`: time, memory and efficiency of one model on one cluster in one layout."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from phalanx.config.fields import OPTIMIZERS
from phalanx.errors import UsageError, unknown_name
from phalanx.tools.plan import presets
from phalanx.tools.plan.cluster import Cluster
from phalanx.tools.plan.kernels import peak
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.plans import (
    ATTENTION,
    KERNELS,
    PRECISIONS,
    Estimate,
    Goal,
    Layout,
    budget_of,
    check_recompute,
    repeated_share,
)
from phalanx.tools.plan.rank_memory import rank_memory
from phalanx.tools.plan.timing import Machine, StepTime, attention_kind, step_time
from phalanx.world.splits import SCHEDULES

INTERVAL = (0.92, 1.12)
"""Measured / predicted step time of nine in ten published rows, each left out with its group (planner_fit.py)."""

NAMES: dict[str, Collection[str]] = {
    "attention": ATTENTION,
    "kernels": KERNELS,
    "offload": ("none", "cpu"),
    "schedule": SCHEDULES,
    "zero_stage": ("0", "1", "2", "3"),
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
}
POSITIVE = {
    **dict.fromkeys(("tp", "pp", "cp", "ep", "dp_replicate", "dp_shard", "virtual_stages", "micro_batch"), 1),
    **dict.fromkeys(("global_batch", "seq_len", "gpus", "gpus_per_node", "layers", "hidden", "heads"), 1),
    **dict.fromkeys(("inter_node_gbps", "oversubscription"), 1e-6),
}
"""The least value of the fields of models, clusters, layouts and goals."""


def estimate(
    model: str | Path | ModelShape | TracedShape, cluster: str | Cluster, layout: Layout, goal: Goal
) -> Estimate:
    """Return what one step of this layout takes; names of presets stand for models and clusters."""
    shape, machines = presets.resolve(model, cluster)
    check(shape, machines, layout, goal)
    return Estimator(shape, machines, goal)(layout)


def check(model: ModelShape | TracedShape, cluster: Cluster, layout: Layout, goal: Goal) -> None:
    """Raise for unknown names, numbers below 1, and numbers that do not go together."""
    check_values(model, cluster, layout, goal)
    check_modes(cluster, goal, has_budget=budget_of(layout.recompute) is not None)
    if layout.gpus != cluster.gpus:
        sizes = " x ".join(f"{axis} {size}" for axis, size in layout.mesh.sizes.items() if size > 1) or "one rank"
        raise UsageError(
            f"the layout ({sizes}) is for {layout.gpus} GPUs, and the cluster has {cluster.gpus}",
            hint="The product of tp, pp, cp, dp_replicate and dp_shard is the number of GPUs.",
        )
    if goal.global_batch % (layout.dp * layout.micro_batch):
        raise UsageError(
            f"global_batch = {goal.global_batch} is not a multiple of {layout.dp} data ranks x micro_batch = "
            f"{layout.micro_batch}",
            hint=f"The nearest above is {_up(goal.global_batch, layout.dp * layout.micro_batch)}.",
        )


def check_values(*parts: ModelShape | TracedShape | Cluster | Layout | Goal) -> None:
    """Raise for unknown names and for numbers below 1 in what was given."""
    for part in parts:
        if isinstance(part, Layout):
            check_recompute(part.recompute)
        for name, value in vars(part).items():
            if name in NAMES and value is not None and str(value) not in NAMES[name]:
                raise UsageError(unknown_name(name, str(value), NAMES[name]))
            if name in POSITIVE and value is not None and value < POSITIVE[name]:
                raise UsageError(f"{name} = {value}: must be {POSITIVE[name]:g} or more.")


def check_modes(cluster: Cluster, goal: Goal, *, has_budget: bool) -> None:
    """Refuse fp8 on a GPU without it, and a budget of activations without compilation."""
    gpu = presets.parts_of(cluster)[0]
    if goal.precision == "fp8" and "fp8" not in gpu.tflops:
        gpus = (presets.gpu(name) for name in presets.names("gpus"))
        able = sorted({one.name for one in gpus if "fp8" in one.tflops})
        raise UsageError(
            f"{gpu.name} has no fp8. It has: {', '.join(gpu.tflops)}. GPUs with fp8: {', '.join(able)}.",
            hint="Leave --fast out or write --precision bf16, or plan for another GPU: --gpu h100.",
        )
    if has_budget and not goal.compile:
        raise UsageError(
            "a budget of activations is for compiled blocks, and the goal does not compile",
            hint="Write --compile (in Python: Goal(compile=True)), or --recompute selective.",
        )


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Estimator:
    """Estimates many layouts of one model on one cluster: what they share is computed once."""

    def __init__(self, model: ModelShape | TracedShape, cluster: Cluster, goal: Goal) -> None:
        self.model, self.cluster, self.goal = model, cluster, goal
        self.gpu, intra, inter = presets.parts_of(cluster)
        self.machine = Machine(self.gpu, intra, inter, cluster.gpus_per_node)
        self._forward, self._attention = _forward_flops(model, goal)
        self._of_parameters = _parameter_share(model, goal, self._forward)
        self._peak = cluster.gpus * (self.gpu.tflops.get(goal.precision, 0.0) * 1e12 or peak(self.gpu, goal.precision))

    def memory(self, layout: Layout) -> dict[str, dict[str, float]]:
        """Return GiB by kind of rank and part."""
        return rank_memory(self.model, self.gpu, layout, self.goal, attention=attention_kind(layout, self.gpu))

    def needed_gib(self, layout: Layout) -> float:
        """Return the memory of the rank that needs the most, with the reserve."""
        return max(sum(parts.values()) for parts in self.memory(layout).values())

    def time(self, layout: Layout) -> StepTime:
        """Return the time of a step."""
        return step_time(self.model, self.machine, layout, self.goal)

    def _selective(self, layout: Layout) -> float:
        """Return the operations that selective recomputation adds: all of attention once more (Korthikanti et al.)."""
        return 3 * self._attention if attention_kind(layout, self.gpu) == "materialized" else 0.0

    def __call__(self, layout: Layout) -> Estimate:
        """Return the whole estimate."""
        step, goal, memory = self.time(layout), self.goal, self.memory(layout)
        reserve = {kind: parts.pop("reserve") for kind, parts in memory.items()}
        # Backward computes gradients of inputs and of weights; frozen weights need none.
        seconds, useful = step.seconds, (3 if layout.lora_rank is None else 2) * self._forward
        again = repeated_share(layout.recompute) * self._forward
        again += self._selective(layout) if layout.recompute == "selective" else 0.0
        per_sample = goal.seq_len if isinstance(self.model, ModelShape) and not self.model.patches else 1
        low, high = INTERVAL
        return Estimate(
            step_seconds=seconds,
            interval=(low * seconds, high * seconds),
            tokens_per_second_per_gpu=goal.global_batch * per_sample / seconds / self.cluster.gpus,
            mfu=useful / seconds / self._peak,
            mfu_of_parameters=useful * self._of_parameters / seconds / self._peak,
            hfu=(useful + again) / seconds / self._peak,
            memory_gib=memory,
            reserve_gib=reserve,
            breakdown=step.parts,
            hidden=step.hidden,
            memory_limit_gib=self.gpu.memory_gib,
        )


def _parameter_share(model: ModelShape | TracedShape, goal: Goal, forward: float) -> float:
    """Return two operations per active parameter and token, as a share of the forward passes' own."""
    if isinstance(model, TracedShape) or model.patches:
        return 1.0
    return 2.0 * goal.global_batch * goal.seq_len * model.active_parameters / forward


def _forward_flops(model: ModelShape | TracedShape, goal: Goal) -> tuple[float, float]:
    """Return the operations of a step's forward passes, and those of attention's scores among them."""
    if isinstance(model, TracedShape):
        return goal.global_batch * model.forward_flops_per_sample, 0.0
    tokens = goal.global_batch * goal.seq_len
    whole = model.forward_flops(tokens, goal.seq_len)
    return whole, whole - 2.0 * tokens * model.matmul_parameters()
