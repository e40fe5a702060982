"""Time of a training step: kernels, exposed communication of each axis, the pipeline's bubble, the optimizer.

A rank computes its layers; tensor-parallel communication stops it; sharded and replicated data axes communicate beside
it, of which a share is hidden; pipeline ranks wait for each other; and all wait for the slowest GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from phalanx.tools.plan.cluster import VOLUME, Gpu, Group, Link, collective_seconds, group_of, send_seconds
from phalanx.tools.plan.kernels import TRAFFIC, WIDTH, Passes, head_passes, layer_passes, peak, traffic_seconds
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.plans import TIME_PARTS, Goal, Layout, repeated_share
from phalanx.tools.plan.rank_bytes import counts
from phalanx.tools.plan.stages import rank_layers, train_cut
from phalanx.world.splits import SCHEDULES

HIDDEN = 0.19
"""Share of the data axis' communication that costs no time while a rank computes: nccl's kernels take multiprocessors
and memory bandwidth from it (published FSDP runs with 1,600 Gbit/s per node)."""
PUBLISHED_GBPS = 0.9 * 200.0
"""GB/s between the nodes of those runs. What communication takes from a computation follows from its bytes: over a
slower link they travel for longer and take no more."""
RING_HIDES = 0.8
"""Share of attention's time behind which a ring sends keys and values: blocks are sent while others are computed."""
VARIATION = 0.02
"""Standard deviation of the speed of GPUs of one kind; a step lasts as long as that of the slowest."""
OPTIMIZER_BYTES = 34.0
"""Bytes that an AdamW step moves per parameter: weights in two precisions, gradient, two moments."""
PCIE_GBPS = 22.0
"""GB/s between a GPU and its host, for offloaded states."""
HOST_UPDATE_GBPS = 60.0
"""GB/s of memory that an optimizer on the CPU of one node moves, over all its ranks."""
FROZEN = 0.55
"""Time of backward where the weights are frozen: the gradient of inputs only, and of adapters."""
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

    `auto` with replicated weights and recomputation or tensor parallelism, on a GPU before Hopper, is what Megatron-LM
    measured in 2021 and 2022: scores in memory, which selective recomputation drops.
    """
    if layout.attention != "auto":
        return layout.attention
    old = gpu.name.startswith(("v100", "a100"))
    megatron = layout.stage < 3 and (layout.recompute in ("selective", "full") or layout.tp > 1)
    return "materialized" if old and megatron else "flash"


def kernel_kind(layout: Layout, gpu: Gpu) -> str:
    """Return the kind of kernels: as the layout says; `auto`: as published.

    Megatron Core on Hopper and later fuses kernels; published runs that shard parameters (FSDP) did not.
    """
    if layout.kernels != "auto":
        return layout.kernels
    return "fused" if layout.stage < 3 and gpu.name.startswith(("h100", "h200", "b200")) else "eager"


def _is_megatron_core(layout: Layout, gpu: Gpu) -> bool:
    """Whether `auto` kernels stand for a published run of Megatron Core."""
    return layout.kernels == "auto" and kernel_kind(layout, gpu) == "fused"


def step_time(model: ModelShape | TracedShape, machine: Machine, layout: Layout, goal: Goal) -> StepTime:
    """Return the predicted time of one optimizer step."""
    step, count = StepTime(), layout.accumulation(goal.global_batch)
    if isinstance(model, TracedShape):
        stage = _traced_stage(model, machine, layout, goal)
    else:
        stage = _transformer_stage(model, machine, layout, goal)
    for name, seconds in stage.parts.items():
        step.parts[name] = count * seconds
    step.parts["compute"] += count * stage.head
    if layout.pp > 1 and isinstance(model, ModelShape):
        step.parts["pipeline_comm"] = count * _pipeline_seconds(model, machine, layout, goal)
    if layout.pp > 1:
        step.parts["bubble"] = _bubble(layout, count, stage.seconds)
    parameters, trained = parameters_per_rank(model, layout)
    _add_data_axis(step, parameters, trained, machine, layout, goal, stage, count)
    _add_optimizer(step, parameters, trained, machine, layout, count)
    slowest = VARIATION * math.sqrt(2 * math.log(layout.gpus)) if layout.gpus > 1 else 0.0
    step.parts["variation"] = slowest * step.seconds
    return step


@dataclass
class _Stage:
    """The time of one micro-batch on the last pipeline stage, which has the output layer."""

    layers: int
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_PARTS, 0.0))
    forward: float = 0.0
    backward: float = 0.0
    head: float = 0.0

    @property
    def seconds(self) -> float:
        """Forward and backward of the layers, with their communication."""
        return sum(self.parts.values())

    def paced(self, others: float, last: float) -> _Stage:
        """Return the longest stage without the output layer, and by how much the one with it takes longer."""
        per_layer, factor = self.seconds / self.layers, others / self.layers
        parts = {name: factor * seconds for name, seconds in self.parts.items()}
        waits = max(0.0, last * per_layer + self.head - others * per_layer)
        return _Stage(max(1, round(others)), parts, factor * self.forward, factor * self.backward, waits)

    def add(self, number: int, forward: float, backward: float, again: float) -> None:
        """Add layers: their passes, and what backward computes again."""
        self.forward += number * forward
        self.backward += number * (backward + again)
        self.parts["compute"] += number * (forward + backward)
        self.parts["recompute"] += number * again


def _transformer_stage(model: ModelShape, machine: Machine, layout: Layout, goal: Goal) -> _Stage:
    gpu = machine.gpu
    attention, kernels = attention_kind(layout, gpu), kernel_kind(layout, gpu)
    # Published runs in fp8 (Transformer Engine) have all products in it; Phalanx those that pay, if layers are whole.
    own_fp8 = goal.precision == "fp8" and layout.kernels != "auto"
    precision = "bf16" if own_fp8 and layout.tp > 1 else goal.precision
    fp8 = {"where_it_pays": own_fp8 and layout.tp == 1}
    case = (model, gpu, precision, layout.micro_batch, goal.seq_len)
    head = head_passes(*case, tp=layout.tp, cp=layout.cp, kernels=kernels)
    stage = _Stage(math.ceil(model.layers / layout.pp), head=head.forward + head.backward)
    mixtures = round(stage.layers * model.mixture_layers / model.layers)
    tensor, repeated = _tensor_seconds(model, machine, layout, goal), repeated_share(layout.recompute)
    for number, mixture in ((stage.layers - mixtures, False), (mixtures, True)):
        if not number:
            continue
        passes = layer_passes(
            *case,
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            sequence_parallel=layout.sequence_parallel,
            attention=attention,
            kernels=kernels,
            **fp8,
            mixture=mixture,
        )
        backward = passes.backward * (FROZEN if layout.lora_rank else 1.0)
        again = passes.again if layout.recompute == "selective" else repeated * passes.forward
        stage.add(number, passes.forward, backward, again)
        passed = 1 + repeated + (1.5 if layout.sequence_parallel else 1.0)  # gathers inputs again
        stage.parts["tensor_comm"] += number * passed * tensor
        stage.parts["context_comm"] += number * _context_seconds(model, machine, layout, goal, passes)
        stage.parts["expert_comm"] += number * _expert_seconds(model, machine, layout, goal) if mixture else 0.0
    return stage.paced(*_cut(model, layout)) if layout.balanced and layout.pp > 1 else stage


def _cut(model: ModelShape, layout: Layout) -> tuple[float, float]:
    """Return the most layers of a rank without the output layer, and those of the rank with it, as `train` cuts."""
    stages = layout.pp * layout.virtual_stages
    cut = train_cut(model, stages)
    average = (model.layers - cut.first - cut.last) / max(1, stages - 2)  # few ranks have two of the longest stages
    layers, folded = rank_layers(cut, layout.virtual_stages, layout.schedule, average)
    others = (layers.last if folded else layers.first, layers.middle if layout.pp > 2 else 0.0)
    return max(others), layers.first if folded else layers.last


def _traced_stage(model: TracedShape, machine: Machine, layout: Layout, goal: Goal) -> _Stage:
    """Return the passes of a traced module: products at a lower speed, and the traffic of its other kernels."""
    gpu, batch = machine.gpu, layout.micro_batch
    precision = "bf16" if goal.precision == "fp8" else goal.precision  # convolutions stay as they are
    products = batch * model.forward_flops_per_sample / (peak(gpu, precision) * gpu.matmul * CONVOLUTION)
    traffic = batch * model.traffic_bytes_per_sample * TRAFFIC[kernel_kind(layout, gpu)]
    forward = products + traffic_seconds(gpu, traffic)
    forward = max(forward, 30 * model.blocks * gpu.launch_us * 1e-6)  # short kernels wait for their launch
    share = 1 / (layout.tp * layout.pp * layout.cp)
    stage = _Stage(max(1, model.blocks // layout.pp))
    stage.add(1, share * forward, 2 * share * forward, share * forward * repeated_share(layout.recompute))
    return stage


def _tensor_seconds(model: ModelShape, machine: Machine, layout: Layout, goal: Goal) -> float:
    """Return the communication of a layer's forward pass: two all-reduces, or as many pairs of gather and scatter."""
    if layout.tp == 1:
        return 0.0
    size = layout.micro_batch * goal.seq_len / layout.cp * model.hidden * WIDTH[goal.precision]
    # Megatron Core on Hopper sends tp pieces, all but the first while another is multiplied.
    exposed = 1 / layout.tp if layout.sequence_parallel and _is_megatron_core(layout, machine.gpu) else 1.0
    return exposed * 2 * machine.time("all_reduce", size, machine.group(layout.tp, 1))


def _context_seconds(model: ModelShape, machine: Machine, layout: Layout, goal: Goal, passes: Passes) -> float:
    """Return what ring attention cannot hide: keys and values go round in forward, with their gradients in backward."""
    if layout.cp == 1:
        return 0.0
    tokens = layout.micro_batch * goal.seq_len / layout.cp
    size = 2 * tokens * model.kv_width / layout.tp * WIDTH[goal.precision]
    group = machine.group(layout.cp, layout.tp)
    link = machine.intra if group.nodes == 1 else machine.inter
    ring = (layout.cp - 1) * send_seconds(size, link)
    hides = RING_HIDES * passes.attention
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


def parameters_per_rank(model: ModelShape | TracedShape, layout: Layout) -> tuple[float, float]:
    """Return the parameters that a rank of the model axes computes with, and those that are trained."""
    split = layout.tp * layout.pp
    if isinstance(model, TracedShape):
        return model.parameters / split, model.trainable / split
    experts = model.mixture_layers * model.expert_parameters
    parameters = (model.parameters - experts) / split + experts / (split * layout.ep)
    if layout.lora_rank is None:
        return parameters, parameters
    return parameters, layout.lora_rank * model.layers * counts(model).adapters / split


def _add_data_axis(
    step: StepTime,
    parameters: float,
    trained: float,
    machine: Machine,
    layout: Layout,
    goal: Goal,
    stage: _Stage,
    count: int,
) -> None:
    """Add what the data axis communicates: gathered parameters, and gradients."""
    width, reduced = (4 if goal.precision == "fp32" else 2), goal.bytes_reduced(layout)
    inner = layout.dp_shard * layout.cp
    shards = machine.group(inner if layout.stage else 1, layout.tp)
    copies = machine.group(layout.dp_replicate * (1 if layout.stage else inner), layout.tp * shards.size)
    spent = hidden = 0.0
    if shards.size > 1:
        layers = stage.layers
        gather = layers * _exchange(machine, "all_gather", parameters * width / layers, shards)
        scatter = layers * _exchange(machine, "reduce_scatter", trained * reduced / layers, shards)
        spent, hidden = _sharded(layout, gather, scatter, stage, count)
    if copies.size > 1:
        gradients = trained / shards.size * reduced
        more, covered = _beside(stage.backward, _exchange(machine, "all_reduce", gradients, copies))
        spent, hidden = spent + more, hidden + covered
    step.parts["data_comm"] += spent
    step.hidden["data_comm"] = hidden


@dataclass(frozen=True)
class _Exchange:
    """Communication beside computation: how long it lasts, and how much of that it takes from the computation."""

    seconds: float
    taken: float

    def __add__(self, other: _Exchange) -> _Exchange:
        return _Exchange(self.seconds + other.seconds, self.taken + other.taken)

    def __rmul__(self, count: float) -> _Exchange:
        return _Exchange(count * self.seconds, count * self.taken)


def _exchange(machine: Machine, kind: str, size: float, group: Group) -> _Exchange:
    seconds = machine.time(kind, size, group)
    link = machine.intra if group.nodes == 1 else machine.inter
    moved = VOLUME[kind] * size * (group.size - 1) / group.size
    # CPUs add up themselves what they send.
    by_bytes = seconds if machine.gpu.name.startswith("cpu") else link.disturbs * moved / (PUBLISHED_GBPS * 1e9)
    return _Exchange(seconds, (1 - HIDDEN) * min(seconds, by_bytes))


def _sharded(layout: Layout, gather: _Exchange, scatter: _Exchange, stage: _Stage, count: int) -> tuple[float, float]:
    """Return the exposed and hidden time of a sharded data axis.

    Stage 3 gathers parameters twice per micro-batch, stages 1 and 2 once per step. Stages 2 and 3 scatter gradients
    with every micro-batch, stage 1 once. In a pipeline stage 3 gathers once per micro-batch, and all stages scatter
    once, after the last one.
    """
    pipeline = layout.pp > 1
    if layout.stage == 3:
        communication = gather if pipeline else 2 * gather + scatter
        # Not behind what other axes communicate: that takes the same links.
        spent, hidden = _beside(stage.forward + stage.backward + stage.head, communication)
        return count * spent + (scatter.seconds if pipeline else 0.0), count * hidden
    times = count if layout.stage == 2 and not pipeline else 1
    spent, hidden = _beside(stage.backward, scatter)
    first, covered = _beside(stage.forward, gather)
    return times * spent + first, times * hidden + covered


def _beside(compute: float, communication: _Exchange) -> tuple[float, float]:
    """Return the exposed and the hidden part of communication that runs beside computation.

    What computes for longer than the communication lasts hides all of it but what it takes; what is shorter hides its
    share.
    """
    if communication.seconds <= 0.0:
        return 0.0, 0.0
    covered = min(1.0, compute / communication.seconds)
    hidden = covered * (communication.seconds - communication.taken)
    return communication.seconds - hidden, hidden


def _add_optimizer(
    step: StepTime, parameters: float, trained: float, machine: Machine, layout: Layout, count: int
) -> None:
    """Add the optimizer's step; with states in host memory the copies of each micro-batch, too."""
    shards = layout.dp_shard * layout.cp if layout.stage else 1
    shard = trained / shards
    if layout.offload == "none":
        step.parts["optimizer"] = traffic_seconds(machine.gpu, shard * OPTIMIZER_BYTES)
        return
    per_rank = HOST_UPDATE_GBPS * 1e9 / machine.gpus_per_node
    step.parts["optimizer"] = shard * OPTIMIZER_BYTES / per_rank
    weights = 2 * 4 * parameters / shards  # fp32 shards are copied for forward and for backward
    step.parts["offload"] = count * (weights + 4 * shard) / (PCIE_GBPS * 1e9)
