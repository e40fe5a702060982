"""Memory of one rank: model states, activations, logits, buffers. Closed forms of publications and of torch. No torch.

The peak of a step is the highest of three moments: the end of forward, the start of backward, the end of backward.
Without accumulation torch allocates gradients while it frees activations, so that the sum of both is never in use:
`activations` is then what is needed beyond the gradients. Layers with scores in memory (attention = "materialized") are
counted as published for Megatron-LM, in which gradients have their memory from the start; others as torch keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from phalanx.plan.activations import HALF, SINGLE, PerToken, in_flight, per_token, published_per_token
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
    adapters: float
    """Of one layer and of rank 1: LoRA adapts the products of attention."""


@lru_cache(maxsize=1024)
def counts(model: ModelShape, tp: int = 1) -> Counts:
    """Return the parameters of a rank; norms are on every tensor-parallel rank."""
    experts = model.mixture_layers * model.expert_parameters / model.layers
    layers = model.parameters - model.embedding_parameters - model.head_parameters
    norms = 2 * model.norm_parameters
    classes = model.vocab if model.outputs is None else model.outputs
    head = (model.head_parameters - model.norm_parameters) / tp + model.norm_parameters
    layer = (layers / model.layers - experts - norms) / tp + norms
    adapters = 4 * model.hidden + 2 * model.attention_width + 2 * model.kv_width
    table = classes * model.hidden / tp
    return Counts(layer, experts / tp, model.embedding_parameters / tp, head, table, adapters)


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
    find = partial(_transformer, model, case.facts(model)) if isinstance(model, ModelShape) else partial(_traced, model)
    found = {}
    for name, rank in _ranks(depth, layout.pp, layout.virtual_stages, layout.schedule, micro_batches).items():
        parts = _at_peak(find(rank, case))
        parts["reserve"] = outside + FRAGMENTATION * sum(parts.values())
        found[name] = {part: size / GIB for part, size in parts.items()}
    return found


class _Facts(NamedTuple):
    """A transformer on a rank of any kind."""

    seq_len: int
    counts: Counts
    per_token: PerToken


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

    def facts(self, model: ModelShape) -> _Facts:
        """Return what all ranks have in common."""
        seq_len = model.patches + 1 if model.patches else self.goal.seq_len
        return _Facts(seq_len, counts(model, self.layout.tp), self._per_token(model, seq_len))

    def _per_token(self, model: ModelShape, seq_len: int) -> PerToken:
        tp, recompute = self.layout.tp, self.layout.recompute
        if self.published:
            split = self.layout.sequence_parallel
            return published_per_token(model, seq_len, tp, recompute, sequence_parallel=split, width=self.width)
        residual = HALF if self.half and self.sharded else SINGLE
        compiled = self.goal.compile
        return per_token(
            model, seq_len, tp, recompute, half=self.half, compiled=compiled, residual=residual, lora=self.lora
        )

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
    base: float
    """What is held besides activations until backward starts."""
    end: float
    """What is held of model states at the end of backward."""
    shared: float
    """A second gradient of an embedding that is the output matrix too, at the end."""
    activations: float
    casts: tuple[float, float]
    """Copies of weights at the end of forward, and those kept for backward."""
    logits: tuple[float, float]
    """At the end of forward and at the start of backward."""
    working: float
    """What the backward pass of one layer needs besides."""
    buffers: tuple[float, float, float]
    """For communication: while the loss is computed, beside a layer's backward pass, and at the end."""


def _at_peak(held: _Held) -> dict[str, float]:
    """Return the parts at the moment when their sum is highest."""
    loss, layer, end = held.buffers
    (cached, saved), (forward, backward) = held.casts, held.logits
    moments = (  # model states, activations, logits, buffers
        (held.base, held.activations + cached, forward, loss),
        (held.base, held.activations + saved, backward, loss),
        (held.base, held.activations + saved + held.working, 0.0, layer),
        (held.end, held.working, 0.0, layer),
        (held.end, held.shared, 0.0, end),
    )
    base, activations, logits, buffers = max(moments, key=sum)
    missing = sum(held.states) - base  # gradients that are not there yet: the others use their memory
    activations -= min(0.0, missing)
    overlap = max(0.0, min(missing, activations + logits))
    beyond = 1 - overlap / (activations + logits) if overlap else 1.0
    parts = dict(zip(("parameters", "gradients", "optimizer"), held.states, strict=True))
    parts["activations"], parts["logits"] = beyond * activations, beyond * logits
    parts["communication"] = WORKSPACE + max(0.0, buffers - max(0.0, missing - overlap))
    return parts


def _over_the_step(
    case: _Case, states: tuple[float, float, float], trained: float, whole: float
) -> tuple[float, float]:
    """Return what of the model states is held until backward starts, and at its end.

    Gradients appear during backward, in fp32 under autocast and fsdp. With stages 1 and 2, fsdp holds fp32 shards and
    the whole weights in half precision, which it frees during backward.
    """
    size, ranks = SINGLE if case.goal.master_weights else case.width, case.shards
    held = sum(states)
    if case.published or case.layout.offload == "cpu" or (case.sharded and case.stage < 3 and case.lora):
        return held, held
    if not case.sharded or case.stage == 3:
        found = size * trained / (ranks if case.sharded else 1)
        return held - (0.0 if case.gradients_stay else found), held
    shards = sum(case.states) * trained / ranks
    base = case.width * whole + shards - size * trained / ranks
    if case.gradients_stay:
        base += size * trained / (ranks if case.stage == 2 else 1)
    return base, shards


def _transformer(model: ModelShape, facts: _Facts, rank: _Rank, case: _Case) -> _Held:
    layout, here = case.layout, facts.counts
    tokens, each = layout.micro_batch * facts.seq_len / layout.cp, facts.per_token
    root = rank.embeds * here.embedding + rank.computes_loss * here.head
    tied = model.tied_embeddings and model.outputs is None and rank.computes_loss
    if tied and not rank.embeds:
        root += here.table  # both ends of a pipeline hold the shared matrix
    plain, experts = rank.layers * here.layer + root, rank.layers * here.experts
    adapters = rank.layers * here.adapters * (layout.lora_rank or 0)
    states, whole = case.model_states(plain, experts, adapters), plain + experts / layout.ep
    doubled = tied and rank.embeds and not (case.lora or case.published or case.sharded)
    loss = tokens * rank.computes_loss
    return _Held(
        states,
        *_over_the_step(case, states, adapters if case.lora else whole, whole),
        SINGLE * here.table * (1 if case.half else 2) if doubled else 0.0,
        tokens * rank.flights * rank.layers * each.kept + loss * each.last,
        _casts(case, rank, whole - root, rank.computes_loss * here.table),
        (loss * each.logits[0], loss * each.logits[1]),
        tokens * each.working,
        _buffers(case, whole, here.layer, root, tokens * _moved(model, layout, case.width)),
    )


def _moved(model: ModelShape, layout: Layout, width: int) -> float:
    """Return the bytes of activations per token that are sent and received."""
    hidden = 2 * model.hidden / layout.tp if layout.pp > 1 else 0.0
    keys_and_values = 4 * model.kv_width / layout.tp if layout.cp > 1 else 0.0
    rows = 2 * model.active_experts * model.hidden if layout.ep > 1 else 0
    return width * (hidden + keys_and_values + rows)


def _casts(case: _Case, rank: _Rank, layers: float, table: float) -> tuple[float, float]:
    """Return the half-precision copies of weights: each forward pass has its own, and keeps them for backward.

    Of recomputed layers they are freed when forward ends, of frozen and compiled ones earlier.
    """
    if not case.casts:
        return 0.0, 0.0
    if case.layout.recompute == "none":
        return HALF * (rank.flights * layers + table), HALF * (rank.flights * layers + table)
    return HALF * (table + (0.0 if case.lora or case.goal.compile else layers)), HALF * table


def _buffers(case: _Case, whole: float, layer: float, root: float, moved: float) -> tuple[float, float, float]:
    """Return the bytes of communication buffers: while the loss is computed, beside a layer's backward, at the end.

    fsdp gathers a block while it computes another, and reduces its gradients in fp32 beside what it has computed; what
    is outside the blocks stays gathered. torch's pipeline keeps weights gathered, and gradients whole in fp32, until
    the last micro-batch.
    """
    if not case.sharded:
        moved += BUCKETS if case.layout.dp > 1 else 0.0
        return moved, moved, moved
    gathered = case.width if case.stage == 3 else 0
    if case.layout.pp > 1:
        moved += whole * (gathered + (0 if case.lora else SINGLE))
        return moved, moved, moved
    reduced = 0 if case.lora else case.width + SINGLE
    beside = gathered * (root + 2 * layer) + 2 * reduced * layer
    return moved + gathered * root, moved + beside, moved + reduced * (root + layer)


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
    held = (states[0], states[1], states[2])
    block_parameters = float(model.largest_block_parameters)
    return _Held(
        held,
        *_over_the_step(case, held, trained, parameters),
        0.0,
        samples * kept * share * rank.flights,
        _casts(case, rank, parameters, 0.0),
        (0.0, 0.0),
        samples * working,
        _buffers(case, parameters, block_parameters, block_parameters, 0.0),
    )
