"""Memory of one rank: model states, activations, logits, buffers. Closed forms of publications and of torch. No torch.

The peak of a step is the highest of five moments, from the end of forward to the end of backward (`_at_peak`). GPT-2
(124 M parameters, 12 layers) by DDP on 8 GPUs, in bf16 with AdamW, 8 sequences of 1,024 tokens per rank, in MB:

                               states   activations   logits   buffers      sum
    end of forward              1,991         2,930    1,093        52    6,067   the peak
    start of backward           1,991         2,930      321        52    5,295
    backward of a late layer    1,991         3,006      154        52    5,204
    backward of the first       1,991            75        0        52    2,119
    end of backward             1,991           309        0        52    2,352

States are 16 bytes per parameter. Activations are 12 layers x 8,192 tokens x 28.1 kB, and 170 MB of weights that
autocast has copied; a layer's backward needs 75 MB besides. Phalanx's decoders have the logits of a chunk of tokens at
a time, here of all 8,192 x 50,257 in bf16, and compute the gradients of hidden states and output matrix in forward,
which are kept until backward and scaled there: `chunked_head`. Other models have all logits: 4,117 MB at the end of
forward, then 4,940 MB. At the end the embedding has two gradients and their sum, since it is the output matrix too.
Buffers are two buckets of DDP.

Without accumulation torch allocates gradients while it frees activations, so that the sum of both is never in use:
`activations` is then what is needed beyond the gradients. Layers with scores in memory (attention = "materialized") are
counted as published for Megatron-LM, in which gradients have their memory from the start; others as torch keeps them.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from phalanx.tools.plan.cluster import Gpu
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.plans import Goal, Layout, budget_of
from phalanx.tools.plan.rank_bytes import (
    HALF,
    SINGLE,
    Counts,
    HeadBytes,
    PerToken,
    chunked_head,
    counts,
    per_token,
    published_per_token,
    state_bytes,
)
from phalanx.tools.plan.stages import PipelineRank, StageLayers, even_cut, pipeline_ranks, train_cut

GIB = float(2**30)
WORKSPACE = 72 * 2**20
"""Workspaces of cublas, which torch's allocator holds from the first product on; part of `communication`."""
FRAGMENTATION = 0.03
"""Memory in pieces too small to use, as a share of what is in use: measured where a GPU was nearly full."""
BUCKETS = 50 * 2**20
"""DDP: two buckets under way."""


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
    outside = (gpu.reserve_gib if reserve_gib is None else reserve_gib) * GIB
    published, reference = attention == "materialized", isinstance(model, ModelShape) and model.reference
    on_gpu = not gpu.name.startswith("cpu")
    case = _Case(layout, goal, micro_batches, published=published, reference=reference, on_gpu=on_gpu)
    find = partial(_transformer, model, case.facts(model)) if isinstance(model, ModelShape) else partial(_traced, model)
    by_rank, cut = {}, _cut(model, layout, case)
    for name, rank in pipeline_ranks(cut, layout.pp, layout.virtual_stages, layout.schedule, micro_batches).items():
        parts = _at_peak(find(rank, case))
        parts["reserve"] = outside + FRAGMENTATION * sum(parts.values())
        by_rank[name] = {part: size / GIB for part, size in parts.items()}
    return by_rank


def _cut(model: ModelShape | TracedShape, layout: Layout, case: _Case) -> StageLayers:
    """Return the layers of the stages; publications have as many in each."""
    stages = layout.pp * layout.virtual_stages
    if isinstance(model, TracedShape):
        return even_cut(model.blocks, stages)
    return even_cut(model.layers, stages) if case.published or stages == 1 else train_cut(model, stages)


class _Facts(NamedTuple):
    """A transformer on a rank of any kind."""

    seq_len: int
    counts: Counts
    per_token: PerToken


class _Case:
    """The choices of a layout and a goal that decide what is kept."""

    def __init__(
        self, layout: Layout, goal: Goal, micro_batches: int, *, published: bool, reference: bool, on_gpu: bool
    ) -> None:
        self.layout, self.goal, self.published = layout, goal, published
        self.half = goal.precision != "fp32"
        self.width = HALF if self.half else SINGLE
        self.shards, self.stage = layout.dp_shard * layout.cp, layout.stage
        self.sharded = self.stage > 0 and (self.shards > 1 or layout.offload == "cpu") and not published
        """Whether `fully_shard` gathers weights in half precision and reduces gradients in fp32, block by block."""
        stream = reference and goal.precision in ("bf16", "fp8")
        self.residual = HALF if self.half and (self.sharded or published or stream) else SINGLE
        """Bytes per value of the hidden states between layers."""
        self.chunks = reference and not published and layout.tp == layout.pp == 1 and goal.precision != "fp16"
        """Whether the loss is computed for a chunk of tokens at a time: by a rank that has the whole matrix."""
        self.on_gpu = on_gpu
        self.micro_batches = micro_batches
        self.lora = layout.lora_rank is not None
        self.casts = self.half and goal.master_weights and not published and not self.sharded
        """Whether autocast copies fp32 weights to half precision."""
        self.states = state_bytes(goal.precision, goal.optimizer, master_weights=goal.master_weights)
        if not published and self.half and goal.master_weights and self.stage in (0, 3):  # fp32 weights, no second copy
            self.states = state_bytes("fp32", goal.optimizer)
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
        kinds = {"half": self.half, "compiled": self.goal.compile, "lora": self.lora}
        whole_logits = self.layout.pp > 1
        return per_token(model, seq_len, tp, recompute, residual=self.residual, whole_logits=whole_logits, **kinds)

    def model_states(self, plain: float, experts: float, adapters: float) -> tuple[float, float, float]:
        """Return bytes of parameters, gradients and optimizer states; a rank has its experts whole, or shares them."""
        states = []
        for size, first in zip(self.states, (3, 2, 1), strict=True):
            ranks = self.shards if self.stage >= first else 1
            trained = adapters / ranks if self.lora else plain / ranks + experts / max(ranks, self.layout.ep)
            states.append(size * trained)
        if self.lora:
            ranks = self.shards if self.stage >= 3 else 1
            frozen = SINGLE if self.goal.master_weights else self.width
            states[0] += frozen * (plain / ranks + experts / max(ranks, self.layout.ep))
        return (0.0, 0.0, 0.0) if self.layout.offload == "cpu" else (states[0], states[1], states[2])


class _HeldBytes(NamedTuple):
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
    logits: HeadBytes
    """With the gradients of hidden states and output matrix, where forward computes them."""
    working: float
    """What the backward pass of one layer needs besides."""
    buffers: tuple[float, float, float]
    """For communication: while the loss is computed, beside a layer's backward pass, and at the end."""


def _at_peak(memory: _HeldBytes) -> dict[str, float]:
    """Return the parts at the moment when their sum is highest."""
    loss, layer, end = memory.buffers
    (cached, saved), head = memory.casts, memory.logits
    moments = {  # model states, activations, logits, buffers
        "end of forward": (memory.base, memory.activations + cached, head.forward, loss),
        "start of backward": (memory.base, memory.activations + saved, head.backward, loss),
        "backward of a late layer": (memory.base, memory.activations + saved + memory.working, head.layers, layer),
        "backward of the first": (memory.end, memory.working, 0.0, layer),
        "end of backward": (memory.end, memory.shared, 0.0, end),
    }
    base, activations, logits, buffers = max(moments.values(), key=sum)
    missing = sum(memory.states) - base  # gradients that are not there yet: the others use their memory
    activations -= min(0.0, missing)
    overlap = max(0.0, min(missing, activations + logits))
    beyond = 1 - overlap / (activations + logits) if overlap else 1.0
    parts = dict(zip(("parameters", "gradients", "optimizer"), memory.states, strict=True))
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
    total = sum(states)
    if case.published or case.layout.offload == "cpu" or (case.sharded and case.stage < 3 and case.lora):
        return total, total
    if not case.sharded or case.stage == 3:
        gradients = size * trained / (ranks if case.sharded else 1)
        if case.sharded and case.layout.pp > 1:  # they are whole until the end, and counted as buffers
            return total - gradients, total - gradients
        return total - (0.0 if case.gradients_stay else gradients), total
    shards = sum(case.states) * trained / ranks
    base = case.width * whole + shards - size * trained / ranks
    if case.gradients_stay:  # torch's pipeline does not reduce them before the last micro-batch
        base += size * trained / (ranks if case.stage == 2 and case.layout.pp == 1 else 1)
    return base, shards


def _transformer(model: ModelShape, facts: _Facts, rank: PipelineRank, case: _Case) -> _HeldBytes:
    layout, counts = case.layout, facts.counts
    tokens, per_token = layout.micro_batch * facts.seq_len / layout.cp, facts.per_token
    root = rank.embeds * counts.embedding + rank.computes_loss * counts.head
    tied = model.tied_embeddings and model.outputs is None and rank.computes_loss
    if tied and not rank.embeds:
        root += counts.table  # both ends of a pipeline hold the shared matrix
    plain, experts = rank.layers * counts.layer + root, rank.layers * counts.experts
    adapters = rank.layers * counts.adapters * (layout.lora_rank or 0)
    states, whole = case.model_states(plain, experts, adapters), plain + experts / layout.ep
    flights, pending = max(rank.moments, key=lambda moment: moment[0] * per_token.saved + moment[1] * per_token.pending)
    loss = tokens * rank.computes_loss
    head = _head(model, case, per_token, loss, flights)
    return _HeldBytes(
        states,
        *_over_the_step(case, states, adapters if case.lora else whole, whole),
        _embedding_gradient(case, rank, counts.table, tied=tied, in_place=case.half and not case.chunks),
        tokens * rank.layers * (flights * per_token.saved + pending * per_token.pending) + loss * per_token.last,
        _casts(case, flights, pending, whole - root, rank.computes_loss * counts.table * (not case.chunks)),
        head,
        tokens * per_token.working,
        _buffers(case, whole, counts.layer, root, tokens * _moved(model, case, rank)),
    )


def _head(model: ModelShape, case: _Case, per_token: PerToken, tokens: float, flights: float) -> HeadBytes:
    """Return what output matrix and loss of the tokens need; none without tokens."""
    if case.chunks:
        width = HALF if case.half and case.sharded else SINGLE
        kinds = {"half": case.half, "fp8": case.goal.precision == "fp8", "kernel": case.on_gpu}
        return chunked_head(model, tokens, norm=width, gradient=width, **kinds)
    forward, backward, waiting = (tokens * size for size in per_token.logits)
    waiting *= flights - 1 if case.layout.schedule == "gpipe" else 0.0  # others run backward at once on the last stage
    return HeadBytes(forward + waiting, backward + waiting)


def _embedding_gradient(case: _Case, rank: PipelineRank, table: float, *, tied: bool, in_place: bool) -> float:
    """Return what the gradient of the token embedding needs besides itself, at the end of backward.

    An embedding that is the output matrix too has two gradients, which are added: in place where autograd has cast one
    of them, else to a third. Tensor-parallel ranks compute the gradient of the whole vocabulary, twice, before each
    keeps its part (DTensor).
    """
    if case.lora or case.published or not rank.embeds:
        return 0.0
    width, tp = case.width if case.sharded else SINGLE, case.layout.tp
    if tp > 1:
        return width * table * tp * (4 if tied else 2 - 1 / tp)
    return width * table * (1 if in_place else 2) if tied and not case.sharded else 0.0


def _moved(model: ModelShape, case: _Case, rank: PipelineRank) -> float:
    """Return the bytes per token of buffers for activations that are sent and received.

    torch's pipeline has a buffer for each micro-batch of a step and keeps them all; Megatron-LM frees them.
    """
    layout = case.layout
    received = 2 if case.published else rank.receives * case.micro_batches
    hidden = case.residual * received * model.hidden / layout.tp if layout.pp > 1 else 0.0
    keys_and_values = 4 * model.kv_width / layout.tp if layout.cp > 1 else 0.0
    rows = 2 * model.active_experts * model.hidden if layout.ep > 1 else 0
    return hidden + case.width * (keys_and_values + rows)


def _casts(case: _Case, flights: float, pending: float, layers: float, table: float) -> tuple[float, float]:
    """Return the half-precision copies of weights: each forward pass has its own, and keeps them for backward.

    Of recomputed layers they are freed when forward ends, of frozen and compiled ones earlier; those of passes that are
    recomputed and pending stay.
    """
    if not case.casts:
        return 0.0, 0.0
    budget = budget_of(case.layout.recompute)
    share = float(case.layout.recompute == "none") if budget is None else budget
    copies = HALF * (table + layers * (share * flights + (1 - share) * pending))
    if case.layout.recompute == "none" or case.lora or case.goal.compile:
        return copies, copies
    return max(copies, HALF * (table + layers)), copies


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
        moved += whole * (gathered + SINGLE * (not case.lora)) if gathered else 0.0
        return moved, moved, moved
    reduced = 0 if case.lora else case.width + SINGLE
    beside = gathered * (root + 2 * layer) + 2 * reduced * layer
    return moved + gathered * root, moved + beside, moved + reduced * (root + layer)


def _traced(model: TracedShape, rank: PipelineRank, case: _Case) -> _HeldBytes:
    """Return the memory of a module that was traced in half precision: in fp32 its activations are twice as large."""
    layout = case.layout
    share, samples = rank.layers / model.blocks, layout.micro_batch * (1 if case.half else 2)
    saved, block = model.activation_bytes_per_sample, model.activation_bytes_per_sample / model.blocks
    working = model.output_bytes_per_sample
    if layout.recompute != "none":
        budget, inputs = budget_of(layout.recompute), model.block_boundary_bytes_per_sample
        more = 0.5 * saved if layout.recompute == "selective" else 0.0  # products are kept
        more = more if budget is None else budget * max(0.0, saved - inputs)
        saved, working = inputs + more, working + (1 - (budget or 0.0)) * block
    parameters = model.parameters * share
    trained = model.trainable * share
    states = list(case.model_states(trained, 0.0, 0.0))
    if layout.offload != "cpu":
        frozen = SINGLE if case.goal.master_weights else case.width
        states[0] += frozen * (parameters - trained) / (case.shards if case.stage >= 3 else 1)
        states[0] += SINGLE * model.buffers
    states_held = (states[0], states[1], states[2])
    block_parameters = float(model.largest_block_parameters)
    return _HeldBytes(
        states_held,
        *_over_the_step(case, states_held, trained, parameters),
        0.0,
        samples * saved * share * rank.moments[0][0],
        _casts(case, *rank.moments[0], parameters, 0.0),
        HeadBytes(0.0, 0.0),
        samples * working,
        _buffers(case, parameters, block_parameters, block_parameters, 0.0),
    )
