"""Time of a training step: kernels, exposed communication of each axis, the pipeline's bubble, the optimizer.

A rank computes its layers; tensor-parallel communication stops it; sharded and replicated data axes communicate beside
it, of which a share is hidden; pipeline ranks wait for each other; and all wait for the slowest GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from phalanx.plan.cluster import Gpu, Link
from phalanx.plan.collectives import Group, collective_seconds, group_of, send_seconds
from phalanx.plan.prediction import TIME_PARTS
from phalanx.plan.kernels import WIDTH, Passes, head_passes, layer_passes, peak, traffic_seconds
from phalanx.plan.layout import Goal, Layout
from phalanx.plan.model import ModelShape, TracedShape
from phalanx.world.schedules import SCHEDULES

HIDDEN = 0.19
"""Share of the data axis' communication that costs no time while a rank computes: nccl's kernels take multiprocessors
and memory bandwidth from it (published FSDP runs)."""
VARIATION = 0.02
"""Standard deviation of the speed of GPUs of one kind; a step lasts as long as that of the slowest."""
OPTIMIZER_BYTES = 34.0
"""Bytes that an AdamW step moves per parameter: weights in two precisions, gradient, two moments."""
PCIE_GBPS = 22.0
"""GB/s between a GPU and its host, for offloaded states."""
HOST_UPDATE_GBPS = 60.0
"""GB/s of memory that an optimizer on the CPU of one machine moves, over all its ranks."""
CONVOLUTION = 0.55
"""Speed of products in modules that are not transformers, as a share of large matrix products."""


@dataclass
class StepTime:
    """Seconds by part, and what runs hidden."""

    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_PARTS, 0.0))
    hidden: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Machine:
    """The links and the GPU that a step runs on."""

    gpu: Gpu
    intra: Link
    inter: Link
    gpus_per_node: int

    def group(self, size: int, stride: int) -> Group:
        """Return the group of an axis whose neighbours are `stride` ranks apart."""
        return group_of(size, stride, self.gpus_per_node)

    def time(self, kind: str, size: float, group: Group) -> float:
        """Return the time of a collective."""
        return collective_seconds(kind, size, group, self.intra, self.inter)


def attention_kind(layout: Layout, gpu: Gpu) -> str:
    """Return the attention kernel of a layout: flash, but for the publications before it.

    `auto` with recomputation and replicated weights on a GPU before Hopper is what Megatron-LM measured in 2021 and
    2022: scores in memory, which selective recomputation drops.
    """
    if layout.attention != "auto":
        return layout.attention
    old = gpu.name.startswith(("v100", "a100"))
    return "materialized" if old and layout.recompute != "none" and layout.stage < 3 else "flash"


def fused_kernels(layout: Layout, gpu: Gpu) -> bool:
    """Whether kernels are fused: as the layout says; `auto`: as published, by Megatron Core on Hopper and later.

    Published runs that shard parameters (FSDP) used one kernel per operation.
    """
    if layout.kernels != "auto":
        return layout.kernels == "fused"
    return layout.stage < 3 and gpu.name.startswith(("h100", "h200", "b200"))


def step_time(model: ModelShape | TracedShape, machine: Machine, layout: Layout, goal: Goal) -> StepTime:
    """Return the predicted time of one optimizer step."""
    if isinstance(model, TracedShape):
        step = _traced_step(model, machine, layout, goal)
    else:
        step = _transformer_step(model, machine, layout, goal)
    slowest = VARIATION * math.sqrt(2 * math.log(layout.gpus)) if layout.gpus > 1 else 0.0
    step.parts["variation"] = slowest * step.seconds
    return step


def _transformer_step(model: ModelShape, machine: Machine, layout: Layout, goal: Goal) -> StepTime:
    step, parts = StepTime(), {}
    count = layout.accumulation(goal.global_batch)
    stage = _Stage(model, machine, layout, goal)
    waiting = stage.seconds  # a pass of a pipeline stage without the output layer
    for name, seconds in {**stage.parts, "head": stage.head}.items():
        parts[name] = count * seconds
    step.parts["compute"] = parts["layers"] + parts["head"]
    step.parts["recompute"] = parts["recompute"]
    for name in ("tensor_comm", "context_comm", "expert_comm"):
        step.parts[name] = parts[name]
    if layout.pp > 1:
        step.parts["pipeline_comm"] = count * _pipeline_seconds(model, machine, layout, goal)
        step.parts["bubble"] = _bubble(layout, count, waiting)
    _add_data_axis(step, model, machine, layout, goal, stage, count)
    _add_optimizer(step, _trained_parameters(model, layout), machine, layout)
    return step


class _Stage:
    """The time of one micro-batch on the last pipeline stage, which has the output layer."""

    def __init__(self, model: ModelShape, machine: Machine, layout: Layout, goal: Goal) -> None:
        self.passes: list[tuple[int, Passes]] = []
        self.parts = dict.fromkeys(("layers", "recompute", "tensor_comm", "context_comm", "expert_comm"), 0.0)
        self.layers = math.ceil(model.layers / layout.pp)
        kind, seq = attention_kind(layout, machine.gpu), goal.seq_len
        mixtures = round(self.layers * model.mixture_layers / model.layers)
        tensor = _tensor_seconds(model, machine, layout, goal)
        fused = fused_kernels(layout, machine.gpu)
        self.forward = self.backward = 0.0
        for number, mixture in ((self.layers - mixtures, False), (mixtures, True)):
            if not number:
                continue
            passes = layer_passes(
                model,
                machine.gpu,
                goal.precision,
                layout.micro_batch,
                seq,
                tp=layout.tp,
                cp=layout.cp,
                ep=layout.ep,
                sequence_parallel=layout.sequence_parallel,
                attention=kind,
                fused=fused,
                mixture=mixture,
            )
            backward = passes.backward * (0.55 if layout.lora_rank else 1.0)  # frozen weights need no gradient
            again = {"none": 0.0, "selective": passes.core, "full": passes.forward}[layout.recompute]
            self.forward += number * passes.forward
            self.backward += number * (backward + again)
            self.parts["layers"] += number * (passes.forward + backward)
            self.parts["recompute"] += number * again
            forward_comm = tensor + (tensor if layout.recompute == "full" else 0.0)
            backward_comm = tensor * (1.5 if layout.sequence_parallel else 1.0)  # inputs are gathered again
            self.parts["tensor_comm"] += number * (forward_comm + backward_comm)
            self.parts["context_comm"] += number * _context_seconds(model, machine, layout, goal, passes)
            self.parts["expert_comm"] += number * _expert_seconds(model, machine, layout, goal) if mixture else 0.0
        head = head_passes(model, machine.gpu, goal.precision, layout.micro_batch, seq, tp=layout.tp, cp=layout.cp)
        self.head = head.forward + head.backward
        self.seconds = sum(self.parts.values())


def _tensor_seconds(model: ModelShape, machine: Machine, layout: Layout, goal: Goal) -> float:
    """Return the communication of a layer's forward pass: two all-reduces, or as many pairs of gather and scatter."""
    if layout.tp == 1:
        return 0.0
    size = layout.micro_batch * goal.seq_len / layout.cp * model.hidden * WIDTH[goal.precision]
    return 2 * machine.time("all_reduce", size, machine.group(layout.tp, 1))


def _context_seconds(model: ModelShape, machine: Machine, layout: Layout, goal: Goal, passes: Passes) -> float:
    """Return what ring attention cannot hide: keys and values go round in forward, with their gradients in backward."""
    if layout.cp == 1:
        return 0.0
    tokens = layout.micro_batch * goal.seq_len / layout.cp
    size = 2 * tokens * model.kv_width / layout.tp * WIDTH[goal.precision]
    group = machine.group(layout.cp, layout.tp)
    link = machine.intra if group.nodes == 1 else machine.inter
    ring = (layout.cp - 1) * send_seconds(size, link)
    hides = passes.attention * (1 - HIDDEN)
    return max(0.0, ring - hides) + max(0.0, 2 * ring - 2.5 * hides)


def _expert_seconds(model: ModelShape, machine: Machine, layout: Layout, goal: Goal) -> float:
    """Return the four exchanges of a mixture layer: tokens to experts and back, and their gradients."""
    tokens = layout.micro_batch * goal.seq_len / layout.cp
    size = tokens * model.active_experts * model.hidden * WIDTH[goal.precision] / layout.tp
    return 4 * machine.time("all_to_all", size, machine.group(layout.ep, layout.tp * layout.cp))


def _pipeline_seconds(model: ModelShape, machine: Machine, layout: Layout, goal: Goal) -> float:
    """Return the sends of one micro-batch: forward and backward, at each stage of the rank."""
    inside = layout.tp * layout.cp * layout.dp * 2 <= machine.gpus_per_node
    whole = layout.micro_batch * goal.seq_len / layout.cp * model.hidden * WIDTH[goal.precision]
    seconds = send_seconds(whole / layout.tp, machine.intra if inside else machine.inter)
    if not layout.sequence_parallel:  # each rank sends a part, and the parts are gathered again
        seconds += machine.time("all_gather", whole, machine.group(layout.tp, 1))
    return 2 * layout.virtual_stages * seconds


def _bubble(layout: Layout, count: int, waiting: float) -> float:
    """Return the wait of a pipeline rank: (p-1)/v passes; less where gradients of weights fill it."""
    schedule = SCHEDULES.get(layout.schedule)
    if schedule is not None and schedule.splits_backward:
        share = schedule.bubble(layout.pp, count)
        return count * waiting * share / (1 - share)
    return (layout.pp - 1) * waiting / layout.virtual_stages


def _trained_parameters(model: ModelShape, layout: Layout) -> float:
    """Return the parameters per rank of the model axes that the optimizer steps."""
    if layout.lora_rank:
        return 2.0 * layout.lora_rank * model.hidden * 4 * model.layers / layout.pp
    experts = model.mixture_layers * model.expert_parameters
    return ((model.parameters - experts) / layout.tp + experts / (layout.tp * layout.ep)) / layout.pp


def _add_data_axis(
    step: StepTime, model: ModelShape, machine: Machine, layout: Layout, goal: Goal, stage: _Stage, count: int
) -> None:
    """Add what the data axis communicates: gathered parameters per micro-batch (ZeRO 3), gradients per step."""
    trained = _trained_parameters(model, layout)
    held = (model.parameters / layout.tp) / layout.pp
    width = 4 if goal.precision == "fp32" else 2
    shards = machine.group(layout.dp_shard * layout.cp, layout.tp)
    copies = machine.group(layout.dp_replicate, layout.tp * layout.cp * layout.dp_shard)
    compute = stage.seconds + stage.head
    spent = hidden = 0.0
    if layout.stage == 3 and shards.size > 1:
        layers = max(1, stage.layers)
        gather = layers * machine.time("all_gather", held * width / layers, shards)
        scatter = layers * machine.time("reduce_scatter", trained * goal.reduce_bytes / layers, shards)
        spent, hidden = _beside(compute, 2 * gather + scatter)
        spent, hidden = count * spent, count * hidden
    elif shards.size > 1:
        kind = "all_reduce" if layout.stage == 0 else "reduce_scatter"
        seconds = machine.time(kind, trained * width, shards)
        if layout.stage:  # the stepped shards are gathered
            seconds += machine.time("all_gather", held * width, shards)
        spent, hidden = _beside(stage.backward, seconds)
    if copies.size > 1:
        shard = trained / (shards.size if layout.stage else 1)
        more, covered = _beside(stage.backward, machine.time("all_reduce", shard * width, copies))
        spent, hidden = spent + more, hidden + covered
    step.parts["data_comm"] += spent
    step.hidden["data_comm"] = hidden


def _beside(compute: float, communication: float) -> tuple[float, float]:
    """Return the exposed and the hidden part of communication that runs beside computation."""
    hidden = HIDDEN * min(compute, communication)
    return communication - hidden, hidden


def _add_optimizer(step: StepTime, trained: float, machine: Machine, layout: Layout) -> None:
    shards = layout.dp_shard * layout.cp if layout.stage else 1
    own = trained / shards
    if layout.offload == "none":
        step.parts["optimizer"] = traffic_seconds(machine.gpu, own * OPTIMIZER_BYTES)
        return
    per_rank = HOST_UPDATE_GBPS * 1e9 / machine.gpus_per_node
    step.parts["optimizer"] = own * OPTIMIZER_BYTES / per_rank
    step.parts["offload"] = own * 8 / (PCIE_GBPS * 1e9)  # weights there, gradients back


def _traced_step(model: TracedShape, machine: Machine, layout: Layout, goal: Goal) -> StepTime:
    """Return the step of a module that was traced: products at a lower speed, and the traffic of its other kernels."""
    step, gpu = StepTime(), machine.gpu
    count, batch = layout.accumulation(goal.global_batch), layout.micro_batch
    products = batch * model.forward_flops_per_sample / (peak(gpu, goal.precision) * gpu.matmul * CONVOLUTION)
    forward = products + traffic_seconds(gpu, batch * model.traffic_bytes_per_sample)
    step.parts["compute"] = 3 * forward * count
    step.parts["recompute"] = forward * count if layout.recompute == "full" else 0.0
    width = 4 if goal.precision == "fp32" else 2
    shards, copies = machine.group(layout.dp_shard, 1), machine.group(layout.dp_replicate, layout.dp_shard)
    if layout.stage == 3 and shards.size > 1:
        each = model.parameters * width / model.blocks
        gather = model.blocks * machine.time("all_gather", each, shards)
        scatter = model.blocks * machine.time("reduce_scatter", each, shards)
        spent, hidden = _beside(3 * forward, 2 * gather + scatter)
        step.parts["data_comm"], step.hidden["data_comm"] = count * spent, count * hidden
    elif shards.size > 1:
        seconds = machine.time("reduce_scatter", model.trainable * 4, shards)
        seconds += machine.time("all_gather", model.parameters * width, shards)
        step.parts["data_comm"], step.hidden["data_comm"] = _beside(2 * forward, seconds)
    if copies.size > 1:
        shard = model.trainable / (shards.size if layout.stage else 1)
        # torch's DDP reduces gradients in the precision of the weights: fp32 under autocast.
        spent, hidden = _beside(2 * forward, machine.time("all_reduce", shard * 4, copies))
        step.parts["data_comm"] += spent
        step.hidden["data_comm"] = step.hidden.get("data_comm", 0.0) + hidden
    _add_optimizer(step, model.trainable, machine, layout)
    return step
