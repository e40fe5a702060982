"""Bytes of one rank: parameters and their states, and what forward keeps for backward. No torch.

`published_layer_bytes` is the closed form of "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198): per token and layer h (10 + 24/t + 5as/(ht)). `torch_layer_bytes` counts the tensors that autograd
saves in Phalanx's models under autocast: norms keep their input in fp32, each projection keeps a half-precision copy of
its input, flash attention keeps no scores.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from phalanx.diagnosis import optimizer_states
from phalanx.tools.plan.model import ModelShape
from phalanx.tools.plan.plans import budget_of

HALF, SINGLE = 2, 4
LOGITS = {"published": (6, 6, 4), "half": (10, 12, 4), "fp32": (8, 12, 4), "compiled": (2, 8, 2), "split": (10, 10, 4)}
"""Bytes per logit of the loss as it is computed: at the end of forward, at the start of backward, and kept between.

half: logits in half precision and in fp32, log-probabilities; then log-probabilities and two gradients in fp32. split:
each tensor-parallel rank has its part of the vocabulary. compiled: fused, but for the logits that the model returns.
"""
CHUNK_LOGITS, CHUNK_TOKENS, HELD_LOGITS = 2**29, 1024, 2**31
"""Logits that Phalanx's decoders have at once in training, in multiples of this many tokens (`zoo/models/loss.py`)."""


def published_layer_bytes(
    model: ModelShape,
    seq_len: int,
    tp: int = 1,
    *,
    sequence_parallel: bool = False,
    recompute: str = "none",
    width: int = HALF,
) -> float:
    """Return what Megatron-LM keeps per token and layer; attention writes its scores to memory (5as^2b).

    Tensor parallelism divides what is inside attention and feed-forward layer; norms, inputs and dropout masks are
    divided by sequence parallelism only. Full recomputation keeps the layer's input.
    """
    hidden, outer_split = model.hidden, tp if sequence_parallel else 1
    if recompute == "full":
        return width * hidden / outer_split
    masks = 0 if model.rms_norm else 2 * hidden
    outer = 4 * width * hidden + masks
    inner = width * (2 * model.attention_width + 2 * model.kv_width) + width * _feed_values(model, 3)
    kept_scores = (2 * width + 1) * model.heads * seq_len if recompute == "none" else 0.0
    return outer / outer_split + (inner + kept_scores) / tp


def _feed_values(model: ModelShape, gated: int) -> float:
    """Return the values per token inside the feed-forward part: of the average layer, where some are mixtures."""
    per_width = gated if model.gated_mlp else 2
    plain = per_width * ((model.dense_ffn_hidden or model.ffn) if model.experts else model.ffn)
    if not model.experts:
        return float(plain)
    copies = model.active_experts + model.shared_experts
    mixture = copies * per_width * model.ffn + 2 * model.active_experts * model.hidden
    return (model.mixture_layers * mixture + (model.layers - model.mixture_layers) * plain) / model.layers


def torch_layer_bytes(
    model: ModelShape,
    tp: int = 1,
    *,
    half: bool = True,
    recompute: str = "none",
    compiled: bool = False,
    residual: int = SINGLE,
    lora: bool = False,
) -> float:
    """Return what torch keeps per token and layer of Phalanx's models (flash attention, tensors split by tp).

    `residual`: bytes per value of the hidden states between layers, 4 under autocast and 2 in fsdp's half precision.
    Selective recomputation keeps the layer's input and all outputs of products and attention; full keeps the input; a
    budget keeps the input and its share of the rest.
    """
    width, hidden = HALF if half else SINGLE, model.hidden
    inputs = residual * hidden / tp
    if recompute == "full":
        return inputs
    if (budget := budget_of(recompute)) is not None:
        whole = torch_layer_bytes(model, tp, half=half, compiled=compiled, residual=residual, lora=lora)
        return inputs + budget * (whole - inputs)
    projections = width * (model.attention_width + 2 * model.kv_width) / tp
    mixed = (width * model.attention_width + SINGLE * model.heads) / tp
    if recompute == "selective":
        received = (2 * SINGLE * hidden + 2 * width * hidden / tp) if tp > 1 else 0.0  # gathered inputs, summed outputs
        outputs = _product_outputs(model, tp, width, lora=lora)
        return inputs + projections + mixed + outputs + received - compiled * width * hidden
    norms = 2 * SINGLE * hidden / tp
    return (
        norms + _input_copies(model, width, compiled, lora) + projections + mixed + _feed_bytes(model, tp, width, lora)
    )


def _input_copies(model: ModelShape, width: int, compiled: bool, lora: bool) -> float:
    """Return the copies of norm outputs that products keep: under autocast one per matrix, whole under tp.

    Frozen matrices keep none: LoRA's adapters are in attention.
    """
    repeated = width == HALF and model.gated_mlp and not compiled
    copies = (3 if repeated else 1) + (0 if lora else (2 if repeated else 1)) - (compiled and not model.gated_mlp)
    return copies * width * model.hidden


def _feed_bytes(model: ModelShape, tp: int, width: int, lora: bool) -> float:
    """Return what the feed-forward part keeps between its products: GELU in and out; SwiGLU gate, SiLU, up, product."""
    saved = width * _feed_values(model, 4)
    if model.experts:  # rows are copied for each of their experts and both of its products, and the router's input
        saved += width * model.hidden * (2 + model.active_experts)
    if lora:  # the last product is frozen and keeps no input
        saved *= 0.75 if model.gated_mlp else 0.5
    return saved / tp


def _product_outputs(model: ModelShape, tp: int, width: int, *, lora: bool) -> float:
    """Return the outputs of the products after attention; with LoRA, those of the adapters in attention too."""
    copies = model.active_experts + model.shared_experts if model.experts else 1
    feed = copies * ((2 if model.gated_mlp else 1) * model.ffn / tp + model.hidden)
    adapters = (2 * model.attention_width + 2 * model.kv_width) / tp if lora else 0.0
    return width * (model.hidden + feed + adapters)


def working_bytes(model: ModelShape, tp: int, *, half: bool) -> float:
    """Return the gradients that the backward pass of a layer needs per token: of its widest part and its output."""
    copies = model.active_experts + model.shared_experts if model.experts else 1
    widest = max(copies * model.ffn, model.attention_width + 2 * model.kv_width)
    return ((HALF if half else SINGLE) * widest + SINGLE * model.hidden) / tp


class PerToken(NamedTuple):
    """Bytes per token on one rank, of a layer that is divided by tp."""

    saved: float
    """Per layer."""
    working: float
    """What the backward pass of one layer needs besides."""
    last: float
    """The inputs of the last norm and of the output layer."""
    logits: tuple[float, ...]
    """At the end of forward, at the start of backward, and kept between."""
    pending: float = 0.0
    """Per layer whose gradients of weights are computed later: what was recomputed, and gradients of all outputs."""


@lru_cache(maxsize=4096)
def per_token(
    model: ModelShape,
    seq_len: int,
    tp: int,
    recompute: str,
    *,
    half: bool,
    compiled: bool = False,
    residual: int = SINGLE,
    lora: bool = False,
    whole_logits: bool = False,
) -> PerToken:
    """Return what torch keeps of Phalanx's models; `whole_logits`: tensor-parallel ranks gather them (pipelines)."""
    saved, plain = (
        torch_layer_bytes(model, tp, half=half, recompute=kind, compiled=compiled, residual=residual, lora=lora)
        for kind in (recompute, "none")
    )
    again = 0.0 if recompute == "none" else plain - saved
    last = (SINGLE / tp + (HALF if half else SINGLE)) * model.hidden
    split = 1 if whole_logits else tp
    loss = LOGITS["compiled" if compiled else "split" if split > 1 else "half" if half else "fp32"]
    working, logits = working_bytes(model, tp, half=half), _logits(model, seq_len, split, loss)
    return PerToken(saved, again + working, last, logits, again + _output_gradients(model, tp, half=half))


def _output_gradients(model: ModelShape, tp: int, *, half: bool) -> float:
    """Return the gradients of the outputs of a layer's products, and in fp32 of its norms."""
    ffn = (2 if model.gated_mlp else 1) * model.ffn
    split = model.attention_width + 2 * model.kv_width + ffn
    return (HALF if half else SINGLE) * (split / tp + 2 * model.hidden) + 2 * SINGLE * model.hidden / tp


@lru_cache(maxsize=4096)
def published_per_token(
    model: ModelShape, seq_len: int, tp: int, recompute: str, *, sequence_parallel: bool, width: int
) -> PerToken:
    """Return what Megatron-LM keeps."""
    saved, plain = (
        published_layer_bytes(model, seq_len, tp, sequence_parallel=sequence_parallel, recompute=kind, width=width)
        for kind in (recompute, "none")
    )
    again = plain if recompute == "full" else 0.0
    return PerToken(saved, again, 0.0, _logits(model, seq_len, tp, LOGITS["published"]))


def _logits(model: ModelShape, seq_len: int, tp: int, sizes: tuple[int, ...]) -> tuple[float, ...]:
    classes = (model.vocab if model.outputs is None else model.outputs / seq_len) / tp
    return tuple(size * classes for size in sizes)


class HeadBytes(NamedTuple):
    """Bytes of the output matrix and the loss."""

    forward: float
    backward: float
    """At the start of backward."""
    layers: float = 0.0
    """While the layers' backward passes run."""


def chunked_head(
    model: ModelShape, tokens: float, *, half: bool, fp8: bool, norm: int, gradient: int, kernel: bool
) -> HeadBytes:
    """Return what a head needs that computes loss and gradients for a chunk of tokens at a time (`models.loss.LMHead`).

    Forward has a copy of the matrix in the compute type (and two in fp8), and the logits of one chunk, which a kernel
    turns into their gradient in place; in fp8 that is apart, and waits for the matrix's gradient. Forward keeps the
    gradients of hidden states and of the matrix, the latter in fp32. Backward scales both into new tensors. Without the
    `kernel` (on CPUs) there are logits in fp32, exponentials and two copies besides. GPT-2: chunks of 10,240 tokens, 2
    bytes per logit.

    `norm`, `gradient`: bytes per value of the last norm's output and of the matrix's gradient.
    """
    width, table = HALF if half else SINGLE, model.vocab * model.hidden
    chunk = max(1, CHUNK_LOGITS // model.vocab // CHUNK_TOKENS) * CHUNK_TOKENS
    several, logits = tokens > chunk, min(tokens, chunk) * model.vocab
    per_logit = width + (fp8 if kernel else 12 if half else 8)
    held_logits = min(tokens * model.vocab, HELD_LOGITS) * (fp8 and kernel)
    product = 0 if kernel and half else width + SINGLE * half  # of one chunk, and in fp32; CUDA adds it up in place
    sums = SINGLE * (several or (kernel and half))
    forward = held_logits + max(
        logits * per_logit + table * SINGLE * several, logits * width + table * (product + sums)
    )
    copies = norm + (width if norm != width else 0)
    return HeadBytes(
        forward + (width + 2 * fp8) * table + tokens * model.hidden * copies,
        tokens * model.hidden * width + table * (2 * SINGLE + (gradient if gradient != SINGLE else 0)),
        table * gradient,
    )


class StateBytes(NamedTuple):
    """Bytes per parameter."""

    weights: float
    gradients: float
    optimizer: float


def state_bytes(precision: str = "bf16", optimizer: str = "adamw", *, master_weights: bool = True) -> StateBytes:
    """Return the bytes per parameter: 2 + 2 + 12 in mixed precision with AdamW, 4 + 4 + 8 in fp32.

    adamw8bit has 2 + 8/32 instead of 8: two states of 8 bits, each with a scale in fp32 per 32 values.

    torch's autocast keeps 4 + 4 + 8 instead of 2 + 2 + 12: the sum is the same, the fp32 weights take the place of the
    master copy. Without master weights everything is in half precision.
    """
    states = optimizer_states(optimizer)
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
