"""The search: every layout that `train` accepts for a model on a cluster, those that fit, the fastest of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from phalanx.errors import UsageError, unknown_name
from phalanx.tools.plan.cluster import Cluster
from phalanx.tools.plan.estimator import Estimator
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.plans import BUDGETS, RECOMPUTE, Goal, Layout, check_recompute
from phalanx.tools.plan.rules import refusal
from phalanx.world.splits import SCHEDULES

SEARCHED = ("ddp", "fsdp", "zero", "tensor", "pipeline", "context", "expert", "3d")
MAX_MICRO_BATCH = 64
ERROR, EFFORT = 0.03, 0.09
"""What each further axis must save: more than the error of the prediction, and on one node also more than the effort
of a layout that is harder to run. That effort is the same for many nodes, where each percent is worth more."""
ALIKE = 1.02
"""A way to shard that is simpler is preferred while it is not slower than this."""
EQUAL = 1.003
HOST_SHARE = 0.8
"""Share of a node's memory that offloaded states may take."""
SHORTEST_SLICE = 8192
"""Tokens per rank below which sequences are not cut any further."""
HEADROOM = 0.95
"""Share of a GPU's memory that a layout may need: predictions of memory err by some percent."""


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What the search may choose from; None and empty: everything."""

    strategy: str | None = None
    """ddp, fsdp (all is sharded), zero (any stage), or an axis that must be used: tensor, pipeline, context, expert, 3d
    (three axes)."""
    max_tensor_parallel: int | None = None
    max_pipeline_parallel: int | None = None
    max_context_parallel: int | None = None
    micro_batch: int | None = None
    recompute: str | None = None
    memory: bool = False
    """Keep a share of the activations of compiled layers: the largest of `BUDGETS` with which a layout fits."""
    zero_stage: int | None = None
    offload: str | None = None
    lora_rank: int | None = None

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        if self.recompute is not None:
            check_recompute(self.recompute)
        for name, allowed in (("strategy", SEARCHED), ("offload", ("none", "cpu"))):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise UsageError(unknown_name(name, value, allowed))

    @property
    def recomputations(self) -> tuple[tuple[str, ...], ...]:
        """Kinds of recomputation in groups: the next group is tried where nothing of those before fits."""
        if self.recompute is not None:
            return ((self.recompute,),)
        return tuple((budget,) for budget in BUDGETS) if self.memory else (RECOMPUTE,)


@dataclass
class Candidates:
    """What a search found."""

    searched: int = 0
    fitting: list[tuple[float, Layout]] = field(default_factory=list)
    """(step seconds, layout), the fastest first."""
    too_large: list[tuple[float, Layout]] = field(default_factory=list)
    """(GiB that a rank would need, layout), the smallest first."""
    refused: Counter[str] = field(default_factory=Counter)


def search(model: ModelShape | TracedShape, cluster: Cluster, goal: Goal, limits: Constraints) -> Candidates:
    """Estimate every candidate; offload to host memory is tried where nothing else fits."""
    estimator, candidates = Estimator(model, cluster, goal), Candidates()
    layouts = list(_candidates(model, cluster, goal, limits, candidates.refused))
    offloads = ("none", "cpu") if limits.offload is None else (limits.offload,)
    groups = limits.recomputations if _has_blocks(model) else (("none",),)
    for offload, kinds in ((offload, kinds) for offload in offloads for kinds in groups):
        for layout in layouts:
            if (layout.offload == "cpu" != offload) or (offload == "cpu" and not can_offload(layout, model, cluster)):
                continue
            for kind in kinds if not layout.keeps_stages_whole else {"none"}.intersection(kinds):  # see config.pairs
                _judge(estimator, replace(layout, offload=offload, recompute=kind), candidates)
        if candidates.fitting:
            break
    candidates.fitting.sort(key=lambda pair: pair[0])
    candidates.too_large.sort(key=lambda pair: pair[0])
    return candidates


def can_offload(layout: Layout, model: ModelShape | TracedShape, cluster: Cluster) -> bool:
    """Whether states can be in host memory: sharded ones that are gathered block by block, where the host has room."""
    has_room = host_gib(model, cluster) <= HOST_SHARE * cluster.host_memory_gib
    return layout.stage == 3 and layout.pp * layout.tp == 1 and has_room


def host_gib(model: ModelShape | TracedShape, cluster: Cluster) -> float:
    """Return the GiB of states that a node's memory would hold: 16 bytes per parameter."""
    return 16 * model.parameters / 2**30 / cluster.nodes


def _judge(estimator: Estimator, layout: Layout, candidates: Candidates) -> None:
    candidates.searched += 1
    needed = estimator.needed_gib(layout)
    if needed > HEADROOM * estimator.gpu.memory_gib:
        candidates.too_large.append((needed, layout))
    else:
        candidates.fitting.append((estimator.time(layout).seconds, layout))


def simplest(candidates: Candidates) -> Layout | None:
    """Return the fastest layout, or one with fewer axes that is about as fast."""
    if not candidates.fitting:
        return None
    needed = _axis_gain(candidates.fitting[0][1].gpus)
    fewest = _axes(min(candidates.fitting, key=lambda pair: pair[0] * (1 + needed) ** _axes(pair[1]))[1])
    near = [pair for pair in candidates.fitting if _axes(pair[1]) == fewest]
    for count, slower in ((_sharding, ALIKE), (lambda layout: layout.recompute != "none", EQUAL)):
        near = [pair for pair in near if pair[0] <= slower * near[0][0]]
        fewest = min(count(layout) for _, layout in near)
        near = [pair for pair in near if count(pair[1]) == fewest]
    alike = [layout for seconds, layout in near if seconds <= EQUAL * near[0][0]]
    return max(alike, key=lambda layout: layout.micro_batch)


def _axis_gain(gpus: int) -> float:
    """Return how much faster each further axis must make a step, as a share."""
    return ERROR + EFFORT * min(1.0, 8 / gpus)


def _axes(layout: Layout) -> int:
    return sum(size > 1 for size in (layout.tp, layout.pp, layout.cp, layout.ep))


def _sharding(layout: Layout) -> int:
    hybrid = layout.dp_replicate > 1 < layout.dp_shard
    return (layout.stage > 0) + hybrid + (layout.offload != "none") + (layout.schedule == "zero-bubble")


def _candidates(
    model: ModelShape | TracedShape, cluster: Cluster, goal: Goal, limits: Constraints, refused: Counter[str]
) -> Iterator[Layout]:
    """Return the layouts that `train` accepts; the others are counted by reason."""
    for mesh in _meshes(model, cluster, goal, limits):
        reason = refusal(model, mesh, goal, cluster)
        if reason is not None:
            refused[reason] += 1
            continue
        per_rank = goal.global_batch // mesh.dp
        for micro_batch in _micro_batches(per_rank, limits):
            whole = replace(mesh, micro_batch=micro_batch)
            # A larger micro-batch can be refused only where it does not divide, or leaves a pipeline too few of them.
            changes = micro_batch > 1 and (mesh.pp > 1 or goal.global_batch % (mesh.dp * micro_batch) > 0)
            reason = refusal(model, whole, goal, cluster) if changes else None
            if reason is not None:
                refused[reason] += 1
                continue
            yield whole


def _has_blocks(model: ModelShape | TracedShape) -> bool:
    return model.layers > 1 if isinstance(model, ModelShape) else model.blocks > 1


def _micro_batches(per_rank: int, limits: Constraints) -> list[int]:
    if limits.micro_batch is not None:
        return [limits.micro_batch]
    return [size for size in range(1, min(per_rank, MAX_MICRO_BATCH) + 1) if per_rank % size == 0]


def kernels_of(goal: Goal) -> str:
    """Return the kind of kernels that a run of Phalanx uses."""
    return "fused" if goal.compile else "eager" if goal.precision == "fp32" else "autocast"


def _meshes(model: ModelShape | TracedShape, cluster: Cluster, goal: Goal, limits: Constraints) -> Iterator[Layout]:
    """Return every split of the GPUs over the axes, with each way to share the data axis and each schedule."""
    gpus = cluster.gpus
    kernels = kernels_of(goal)
    sizes = _axis_sizes(model, cluster, goal, limits)
    for tp in sizes["tp"]:
        for pp in sizes["pp"]:
            for cp in sizes["cp"]:
                if gpus % (tp * pp * cp):
                    continue
                data = gpus // (tp * pp * cp)
                common = Layout(
                    tp=tp,
                    pp=pp,
                    cp=cp,
                    sequence_parallel=tp > 1,
                    attention="flash",
                    kernels=kernels,
                    balanced=True,
                    lora_rank=limits.lora_rank,
                )
                for layout in _data_axes(common, data, cluster, model, limits):
                    if _wanted(layout, limits):
                        yield from _schedules(layout)


def _axis_sizes(
    model: ModelShape | TracedShape, cluster: Cluster, goal: Goal, limits: Constraints
) -> dict[str, list[int]]:
    """Return the sizes of each axis that can be useful: beyond two nodes tensor parallelism never is."""
    gpus = cluster.gpus
    divisors = [size for size in range(1, gpus + 1) if gpus % size == 0]
    if isinstance(model, TracedShape) and not model.supports:
        return {"tp": [1], "pp": [1], "cp": [1]}
    layers = model.layers if isinstance(model, ModelShape) else model.blocks
    tp = min(limits.max_tensor_parallel or 2 * cluster.gpus_per_node, 2 * cluster.gpus_per_node)
    pp = min(limits.max_pipeline_parallel or layers + 1, layers + 1)
    cp = min(limits.max_context_parallel or gpus, max(1, goal.seq_len // SHORTEST_SLICE))
    return {name: [size for size in divisors if size <= most] for name, most in (("tp", tp), ("pp", pp), ("cp", cp))}


def _data_axes(
    layout: Layout, data: int, cluster: Cluster, model: ModelShape | TracedShape, limits: Constraints
) -> Iterator[Layout]:
    """Return the ways to use the data ranks: copies, shards, shards within a node, experts."""
    experts = model.experts if isinstance(model, ModelShape) else 0
    if experts and layout.replica == 1:
        for ep in (size for size in range(2, min(experts, data) + 1) if data % size == 0 and experts % size == 0):
            yield replace(layout, ep=ep, dp_replicate=data // ep, dp_shard=ep, zero_stage=3)
    if layout.cp == 1:
        yield replace(layout, dp_replicate=data, zero_stage=0)
    usual = (1, 3) if layout.pp > 1 else (1, 2, 3)  # a pipeline reduces gradients after its last micro-batch only
    stages = _STAGES.get(limits.strategy or "", usual) if limits.zero_stage is None else (limits.zero_stage,)
    if data * layout.cp == 1:
        if layout.replica == 1 and limits.offload != "none":
            yield replace(layout, zero_stage=3, offload="cpu")
        return
    inside = max(1, cluster.gpus_per_node // layout.replica)
    for stage in stages:
        if stage:
            yield replace(layout, dp_shard=data, zero_stage=stage)
            if 1 < inside < data and data % inside == 0:
                yield replace(layout, dp_replicate=data // inside, dp_shard=inside, zero_stage=stage)


def _schedules(layout: Layout) -> Iterator[Layout]:
    if layout.pp == 1:
        yield layout
        return
    for schedule in SCHEDULES.values():
        if schedule.splits_backward == (layout.stage == 0 and layout.dp > 1) or layout.dp == 1:
            yield replace(layout, schedule=schedule.name, virtual_stages=schedule.stages_per_rank)


_STAGES = {"fsdp": (3,)}
"""The stages of a strategy that was asked for, where zero_stage does not say another."""
_KINDS: dict[str, Callable[[Layout], bool]] = {
    "ddp": lambda layout: layout.stage == 0 and layout.tp * layout.pp * layout.cp * layout.ep == 1,
    **dict.fromkeys(
        ("fsdp", "zero"), lambda layout: layout.stage > 0 and layout.tp * layout.pp * layout.cp * layout.ep == 1
    ),
    "tensor": lambda layout: layout.tp > 1,
    "pipeline": lambda layout: layout.pp > 1,
    "context": lambda layout: layout.cp > 1,
    "expert": lambda layout: layout.ep > 1,
    "3d": lambda layout: layout.tp > 1 and layout.pp > 1 and layout.dp > 1,
}


def _wanted(layout: Layout, limits: Constraints) -> bool:
    """Whether a layout is of the strategy that was asked for."""
    if limits.zero_stage is not None and layout.stage != limits.zero_stage:
        return False
    return limits.strategy is None or _KINDS[limits.strategy](layout)
