"""Memory of one rank: model states, activations, logits, buffers. Closed forms of publications and of torch. No torch.

The peak of a step is the highest of three moments: the end of forward, the start of backward, the end of backward.
Without accumulation torch allocates gradients while it frees activations, so that the sum of both is never in use:
`activations` is then what is needed beyond the gradients. Layers with scores in memory (attention = "materialized") are
counted as published for Megatron-LM, in which gradients have their memory from the start; others as torch keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from phalanx.plan.activations import (
    HALF,
    SINGLE,
    logit_bytes,
    published_layer_bytes,
    torch_layer_bytes,
    working_bytes,
)
from phalanx.plan.cluster import Gpu
from phalanx.plan.layout import Goal, Layout
from phalanx.plan.model import ModelShape, TracedShape
from phalanx.world.schedules import SCHEDULES

GIB = float(2**30)
WORKSPACE = 72 * 2**20
"""Workspaces of cublas, which torch's allocator holds from the first product on; part of `communication`."""
FRAGMENTATION = 0.03
"""Memory in pieces too small to use, as a share of what is in use: measured where a GPU was nearly full."""
BUCKETS = 50 * 2**20
"""DDP: two buckets under way."""
_STATES = {"adamw": 2, "adam": 2, "rmsprop": 2, "adagrad": 1, "sgd": 1}
"""Values per parameter that an optimizer keeps (with momentum)."""


class StateBytes(NamedTuple):
    """Bytes per parameter."""

    weights: float
    gradients: float
    optimizer: float


def state_bytes(precision: str = "bf16", optimizer: str = "adamw", *, master_weights: bool = True) -> StateBytes:
    """Return the bytes per parameter: 2 + 2 + 12 in mixed precision with AdamW, 4 + 4 + 8 in fp32.

    torch's autocast keeps 4 + 4 + 8 instead of 2 + 2 + 12: the sum is the same, the fp32 weights take the place of the
    master copy. Without master weights everything is in half precision.
    """
    states = _STATES.get(optimizer, 2)
    if precision == "fp32":
        return StateBytes(SINGLE, SINGLE, SINGLE * states)
    return StateBytes(HALF, HALF, SINGLE * (1 + states) if master_weights else HALF * states)


def zero_bytes(parameters: float, ranks: int, stage: int, states: StateBytes | None = None) -> StateBytes:
    """Return weights, gradients and optimizer states per rank under ZeRO.

    With 2 + 2 + 12 bytes: stage 1 P (4 + 12/N), stage 2 P (2 + 14/N), stage 3 16 P/N (arXiv 1910.02054).
    """
    states = states or state_bytes()
    parts = zip(states, (3, 2, 1), strict=True)
    return StateBytes(*(parameters * size / (ranks if stage >= first else 1) for size, first in parts))


def in_flight(schedule: str, ranks: int, virtual_stages: int, index: int, micro_batches: int) -> float:
    """Return the micro-batches whose activations a pipeline rank keeps at its peak, in units of all its layers.

    1f1b: p - i; interleaved: 1 + (p - 1)/(p v) times p on the first rank; zero-bubble: p on every rank; gpipe: all.
    """
    if ranks == 1:
        return 1.0
    if schedule == "gpipe":
        return float(micro_batches)
    if schedule == "zero-bubble":
        return float(min(micro_batches, ranks))
    if virtual_stages > 1:
        chunks = 2 * (ranks - 1 - index) + (virtual_stages - 1) * ranks + 1
        return min(micro_batches * virtual_stages, chunks) / virtual_stages
    return float(min(micro_batches, ranks - index))


class Counts(NamedTuple):
    """Parameters on one tensor-parallel rank, apart from the experts."""

    layer: float
    experts: float
    """Of one layer, on average, before they are spread over ranks."""
    embedding: float
    head: float
    """After the last layer; with tied weights the norm alone."""
    table: float
    """The output matrix, tied or not."""


@lru_cache(maxsize=1024)
def counts(model: ModelShape, tp: int = 1) -> Counts:
    """Return the parameters of a rank; norms are on every tensor-parallel rank."""
    experts = model.mixture_layers * model.expert_parameters / model.layers
    layers = model.parameters - model.embedding_parameters - model.head_parameters
    norms = 2 * model.norm_parameters
    classes = model.vocab if model.outputs is None else model.outputs
    head = (model.head_parameters - model.norm_parameters) / tp + model.norm_parameters
    layer = (layers / model.layers - experts - norms) / tp + norms
    return Counts(layer, experts / tp, model.embedding_parameters / tp, head, classes * model.hidden / tp)


@dataclass(frozen=True)
class _Rank:
    """What one kind of rank holds."""

    layers: float
    flights: float
    """Micro-batches whose activations it keeps."""
    embeds: bool = True
    computes_loss: bool = True


@lru_cache(maxsize=4096)
def _ranks(layers: int, pp: int, virtual: int, schedule: str, micro_batches: int) -> dict[str, _Rank]:
    """Return the kinds of rank; a share of the layers that is not whole is rounded up."""
    if pp == 1:
        return {"all": _Rank(layers, 1.0)}
    here = float(-(-layers // (pp * virtual)) * virtual)
    folded = schedule in SCHEDULES and SCHEDULES[schedule].folded  # the first rank holds the last stage too
    kinds = {"first stage": 0, "middle stage": 1, "last stage": pp - 1}
    return {
        name: _Rank(
            here,
            in_flight(schedule, pp, virtual, index, micro_batches),
            embeds=index == 0,
            computes_loss=index == (0 if folded else pp - 1),
        )
        for name, index in kinds.items()
        if pp > 2 or name != "middle stage"
    }


def rank_memory(
    model: ModelShape | TracedShape,
    gpu: Gpu,
    layout: Layout,
    goal: Goal,
    *,
    attention: str = "flash",
    reserve_gib: float | None = None,
) -> dict[str, dict[str, float]]:
    """Return GiB by kind of rank ("all"; in a pipeline "first stage", "middle stage", "last stage") and part.

    All parts but `reserve` together are what torch.cuda.max_memory_allocated counts.
    """
    micro_batches = layout.accumulation(goal.global_batch)
    depth = model.layers if isinstance(model, ModelShape) else model.blocks
    outside = (gpu.reserve_gib if reserve_gib is None else reserve_gib) * GIB
    case = _Case(layout, goal, micro_batches, published=attention == "materialized")
    found = {}
    for name, rank in _ranks(depth, layout.pp, layout.virtual_stages, layout.schedule, micro_batches).items():
        held = _transformer(model, rank, case) if isinstance(model, ModelShape) else _traced(model, rank, case)
        parts = _at_peak(held)
        parts["reserve"] = outside + FRAGMENTATION * sum(parts.values())
        found[name] = {part: size / GIB for part, size in parts.items()}
    return found


class _Case:
    """The choices of a layout and a goal that decide what is kept."""

    def __init__(self, layout: Layout, goal: Goal, micro_batches: int, *, published: bool) -> None:
        self.layout, self.goal, self.published = layout, goal, published
        self.half = goal.precision != "fp32"
        self.width = HALF if self.half else SINGLE
        self.shards, self.stage = layout.dp_shard * layout.cp, layout.stage
        self.sharded = self.stage > 0 and self.shards > 1 and not published
        """Whether `fully_shard` gathers weights in half precision and reduces gradients in fp32, block by block."""
        self.lora = layout.lora_rank is not None
        self.casts = self.half and goal.master_weights and not published and not self.sharded
        """Whether autocast copies fp32 weights to half precision."""
        self.states = state_bytes(goal.precision, goal.optimizer, master_weights=goal.master_weights)
        self.gradients_stay = published or micro_batches > 1 or (self.stage == 0 and layout.dp_replicate > 1)
        """DDP's buckets are the gradients' memory, also between steps."""

    def model_states(self, plain: float, experts: float, adapters: float) -> tuple[float, float, float]:
        """Return bytes of parameters, gradients and optimizer states; a rank has its experts whole, or shares them."""
        found = []
        for size, first in zip(self.states, (3, 2, 1), strict=True):
            ranks = self.shards if self.stage >= first else 1
            trained = adapters / ranks if self.lora else plain / ranks + experts / max(ranks, self.layout.ep)
            found.append(size * trained)
        if self.lora:
            ranks = self.shards if self.stage >= 3 else 1
            frozen = SINGLE if self.goal.master_weights else self.width
            found[0] += frozen * (plain / ranks + experts / max(ranks, self.layout.ep))
        return (0.0, 0.0, 0.0) if self.layout.offload == "cpu" else (found[0], found[1], found[2])


class _Held(NamedTuple):
    """Bytes of one rank."""

    states: tuple[float, float, float]
    transient: float
    """Gradients that exist only while activations are freed."""
    activations: float
    casts: tuple[float, float]
    """Copies of weights at the end of forward, and those kept for backward."""
    logits: tuple[float, float]
    """At the end of forward and at the start of backward."""
    working: float
    """What the backward pass of one layer needs besides."""
    shared: float
    """A second gradient of an embedding that is the output matrix too."""
    buffers: tuple[float, float]
    """For communication: up to the start of backward, and at its end."""


def _at_peak(held: _Held) -> dict[str, float]:
    """Return the parts at the moment when their sum is highest."""
    states = sum(held.states)
    kept = states - held.transient + held.activations
    forward = kept + held.casts[0] + held.logits[0] + held.buffers[0]
    backward = kept + held.casts[1] + max(held.logits[1], held.working) + held.buffers[0]
    end = states + held.shared + held.working + held.buffers[1]
    total = max(forward, backward, end)
    buffers = held.buffers[1] if total == end else held.buffers[0]
    logits = 0.0 if total == end else held.logits[0] if total == forward else held.logits[1]
    beside = total - states - buffers
    logits = min(logits, beside)
    parts = dict(zip(("parameters", "gradients", "optimizer"), held.states, strict=True))
    return {**parts, "activations": beside - logits, "logits": logits, "communication": buffers + WORKSPACE}


def _transformer(model: ModelShape, rank: _Rank, case: _Case) -> _Held:
    layout, goal, here = case.layout, case.goal, counts(model, case.layout.tp)
    seq_len = model.patches + 1 if model.patches else goal.seq_len
    tokens = layout.micro_batch * seq_len / layout.cp
    root = rank.embeds * here.embedding + rank.computes_loss * here.head
    if layout.pp > 1 and rank.computes_loss and not rank.embeds and model.tied_embeddings and model.outputs is None:
        root += here.table  # both ends of a pipeline hold the shared matrix
    plain, experts = rank.layers * here.layer + root, rank.layers * here.experts
    per_layer, working = _layer_bytes(model, case, seq_len)
    ends = (SINGLE / layout.tp + case.width) * model.hidden if rank.computes_loss and not case.published else 0.0
    states = case.model_states(plain, experts, rank.layers * _adapters(model, case))
    trained = rank.layers * _adapters(model, case) if case.lora else plain + experts / layout.ep
    classes = (model.vocab if model.outputs is None else model.outputs / seq_len) / layout.tp
    logits = logit_bytes(half=case.half, tp=layout.tp, compiled=goal.compile, published=case.published)
    tied = model.tied_embeddings and model.outputs is None and rank.embeds and rank.computes_loss
    return _Held(
        states,
        _transient(case, trained),
        tokens * (rank.flights * rank.layers * per_layer + ends),
        _casts(case, rank, rank.layers * (here.layer + here.experts / layout.ep), rank.computes_loss * here.table),
        (tokens * classes * logits[0] * rank.computes_loss, tokens * classes * logits[1] * rank.computes_loss),
        tokens * working,
        0.0 if case.lora or case.published or not tied else SINGLE * here.table * (1 if case.half else 2),
        _buffers(case, rank, here.layer, root, tokens * model.hidden / layout.tp, model),
    )


def _layer_bytes(model: ModelShape, case: _Case, seq_len: int) -> tuple[float, float]:
    """Return what is kept per token and layer, and what the backward pass of a layer needs besides per token."""
    layout, recompute = case.layout, case.layout.recompute
    if case.published:
        options = {"sequence_parallel": layout.sequence_parallel, "width": case.width}
        kept = published_layer_bytes(model, seq_len, layout.tp, recompute=recompute, **options)
        again = published_layer_bytes(model, seq_len, layout.tp, **options) if recompute == "full" else 0.0
        return kept, again
    residual = HALF if case.half and case.sharded else SINGLE
    options = {"half": case.half, "compiled": case.goal.compile, "residual": residual, "lora": case.lora}
    kept = torch_layer_bytes(model, layout.tp, recompute=recompute, **options)
    again = 0.0 if recompute == "none" else torch_layer_bytes(model, layout.tp, **options) - kept
    return kept, again + working_bytes(model, layout.tp, half=case.half)


def _adapters(model: ModelShape, case: _Case) -> float:
    """Return the parameters of LoRA's adapters of one layer: the products of attention have them."""
    if case.layout.lora_rank is None:
        return 0.0
    return case.layout.lora_rank * (4 * model.hidden + 2 * model.attention_width + 2 * model.kv_width)


def _transient(case: _Case, trained: float) -> float:
    if case.gradients_stay or case.layout.offload == "cpu":
        return 0.0
    size = SINGLE if case.goal.master_weights else case.width
    return size * trained / (case.shards if case.stage >= 2 else 1)


def _casts(case: _Case, rank: _Rank, layers: float, table: float) -> tuple[float, float]:
    """Return the half-precision copies of weights: each forward pass has its own, and keeps them for backward.

    Of recomputed layers they are freed when forward ends, of frozen and compiled ones earlier.
    """
    if not case.casts:
        return 0.0, 0.0
    if case.layout.recompute == "none":
        return HALF * (rank.flights * layers + table), HALF * (rank.flights * layers + table)
    return HALF * (table + (0.0 if case.lora or case.goal.compile else layers)), HALF * table


def _buffers(
    case: _Case, rank: _Rank, layer: float, root: float, hidden: float, model: ModelShape
) -> tuple[float, float]:
    """Return the bytes of communication buffers up to the start of backward, and at its end."""
    layout, width = case.layout, case.width
    moved = 2 * width * hidden if layout.pp > 1 else 0.0  # sent and received hidden states
    if layout.cp > 1:  # keys and values of this rank and of its neighbour
        moved += 4 * width * hidden * model.kv_width / model.hidden
    if layout.ep > 1:
        moved += 2 * width * hidden * model.active_experts
    if not case.sharded:
        return moved + (BUCKETS if layout.dp > 1 else 0.0), moved + (BUCKETS if layout.dp > 1 else 0.0)
    reduced = 0.0 if case.lora else width + SINGLE  # gradients as they come, and in fp32 to be summed
    if layout.pp > 1:  # torch's pipeline keeps weights gathered and gradients whole until the last micro-batch
        whole = rank.layers * layer + root
        held = whole * ((width if case.stage == 3 else 0) + (0 if case.lora else SINGLE))
        return moved + held, moved + held
    gathered = (3 * layer + root) * width if case.stage == 3 else 0.0
    return moved + gathered + 2 * reduced * layer, moved + gathered + reduced * (layer + root)


def _traced(model: TracedShape, rank: _Rank, case: _Case) -> _Held:
    """Return the memory of a module that was traced in half precision: in fp32 its activations are twice as large."""
    layout = case.layout
    share, samples = rank.layers / model.blocks, layout.micro_batch * (1 if case.half else 2)
    kept, block = model.activation_bytes_per_sample, model.activation_bytes_per_sample / model.blocks
    working = model.output_bytes_per_sample
    if layout.recompute != "none":
        selective = 0.5 * kept if layout.recompute == "selective" else 0.0  # products are kept
        kept, working = model.block_boundary_bytes_per_sample + selective, working + block
    parameters = model.parameters * share
    trained = model.trainable * share
    states = list(case.model_states(trained, 0.0, 0.0))
    if layout.offload != "cpu":
        frozen = SINGLE if case.goal.master_weights else case.width
        states[0] += frozen * (parameters - trained) / (case.shards if case.stage >= 3 else 1)
        states[0] += SINGLE * model.buffers
    block_parameters = float(model.largest_block_parameters)
    gathered = case.width * 3 * block_parameters if case.sharded and case.stage == 3 else 0.0
    reduced = (case.width + SINGLE) * 2 * block_parameters if case.sharded else BUCKETS if layout.dp > 1 else 0.0
    return _Held(
        (states[0], states[1], states[2]),
        _transient(case, trained),
        samples * kept * share * rank.flights,
        _casts(case, rank, parameters, 0.0),
        (0.0, 0.0),
        samples * working,
        0.0,
        (gathered + reduced, gathered + reduced),
    )
