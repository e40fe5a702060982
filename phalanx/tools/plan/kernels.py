"""Time of kernels on one GPU: matrix products, elementwise kernels, attention, and of one transformer layer.

Each constant has a physical meaning and one value for all models. Those of a GPU are in `data/gpus.toml`; those of the
kernels' structure are here. `benchmarks/planner_accuracy.py` compares the result with published measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from phalanx.tools.plan.cluster import Gpu
from phalanx.tools.plan.model import ModelShape

TILES = ((256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.6))
"""Output tiles of matrix kernels, with the share of the largest tile's speed that each reaches."""
SPLIT_DEPTH = 1024
"""Kernels split the inner dimension while parts of this length remain and the GPU has idle multiprocessors."""
BACKWARD_TRAFFIC = 2.6
"""Bytes that elementwise kernels move in backward, as a multiple of forward: gradients and what was kept."""
FLASH_BACKWARD = (2.5, 0.56)
"""Flash attention computes 2.5 times as much in backward, at this share of forward's speed."""
CROSS_ENTROPY = (19.0, 13.5)
"""Bytes per logit in forward and backward: a copy in fp32, the softmax, its gradient."""
CROSS_ENTROPY_KERNEL = (6.0, 0.0)
"""The same of Phalanx's decoders: a kernel reads the logits twice, and writes their gradient."""
FP8 = 0.75
"""Share of bf16's efficiency that products in fp8 reach: operands are scaled and cast.

Fitted to runs of MPT and NeMo with Transformer Engine on H100. Phalanx's own products are measured at 0.76 on an H200
(32,768 x 768 x 3,072: 0.145 ms instead of 0.22), and round their operands besides.
"""
FP8_OUTPUTS, FP8_WEIGHT = 1536, 800
"""Where Phalanx has products in fp8 (`speed/fp8.py`): from this many output features on; for the gradient of a weight,
from so much in x out / (in + out) on."""
FP8_ROUNDING = 3.0
"""Bytes that rounding a value to fp8 moves: it is read in bf16 and written."""
UNALIGNED = 0.3
"""Speed of products in 16 bits whose sizes are not multiples of 8 (a vocabulary of 50,257), unless they are padded: by
torch.compile, or as Phalanx's decoders pad theirs."""
TRAFFIC = {"eager": 1.0, "autocast": 1.7, "fused": 0.5}
"""Elementwise traffic by kind of kernels: torch's autocast computes norms and sums in fp32, with casts between."""
FUSED_ATTENTION = 1.8
"""Speed of attention in newer, fused libraries, as a multiple."""
SELECTIVE_POLICY = 3.5
"""Host time of selective recomputation, as a multiple of launching the kernels of a layer."""
LAYER_KERNELS = 45
"""Kernels of a layer's forward pass; where they are short, launching them takes longer."""
WIDTH = {"bf16": 2, "fp16": 2, "fp8": 2, "fp32": 4}
"""Bytes of an activation. Under fp8 only operands of products are narrower."""


def product_seconds(gpu: Gpu, precision: str, m: int, n: int, k: int, batch: int = 1, *, padded: bool = False) -> float:
    """Return the time of `batch` products of (m, k) and (k, n): bound by arithmetic or by memory."""
    operations = 2.0 * m * n * k * batch
    speed = gpu.matmul * _fill(gpu.sms, m, n, k, batch)
    if (m | n | k) % 8 and precision != "fp32" and not padded:
        speed *= UNALIGNED
    arithmetic = operations / (peak(gpu, precision) * speed)
    moved = batch * (m * k + k * n + m * n) * WIDTH[precision]
    return max(arithmetic, traffic_seconds(gpu, moved))


@lru_cache(maxsize=65536)
def _fill(sms: int, m: int, n: int, k: int, batch: int) -> float:
    """Return the share of a large product's speed: padding to tiles, and the last incomplete wave."""
    best = 0.0
    for height, width, speed in TILES:
        rows, columns = math.ceil(m / height), math.ceil(n / width)
        padded = m * n / (rows * height * columns * width)
        waves, depth = rows * columns * batch / sms, float(k)
        while waves < 4 and depth / 2 >= SPLIT_DEPTH:
            waves, depth = 2 * waves, depth / 2
        best = max(best, speed * padded * waves / (waves + 0.5))
    return best


def peak(gpu: Gpu, precision: str) -> float:
    """Return operations per second at peak, of the nearest wider precision where the GPU lacks one."""
    if precision == "fp8" and "fp8" in gpu.tflops:
        return gpu.tflops["fp8"] * 1e12 * FP8
    for name in (precision, "fp16" if precision == "bf16" else "bf16", "fp16", "fp32"):
        if name in gpu.tflops:
            return gpu.tflops[name] * 1e12
    raise ValueError(f"{gpu.name} has no peak for {precision}")


def traffic_seconds(gpu: Gpu, moved: float) -> float:
    """Return the time in which kernels move a number of bytes to and from memory."""
    return moved / (gpu.memory_gbps * 1e9 * gpu.bandwidth)


@dataclass(frozen=True)
class Passes:
    """Seconds of a forward and a backward pass, and parts of forward."""

    forward: float
    backward: float
    again: float = 0.0
    """What selective recomputation repeats: scores of attention that were written to memory, or elementwise kernels."""
    attention: float = 0.0
    """Attention within forward, which a ring of context-parallel ranks can hide communication behind."""


@lru_cache(maxsize=4096)
def layer_passes(
    model: ModelShape,
    gpu: Gpu,
    precision: str,
    batch: int,
    seq: int,
    *,
    tp: int,
    cp: int,
    ep: int,
    sequence_parallel: bool,
    attention: str,
    kernels: str = "eager",
    where_it_pays: bool = False,
    mixture: bool = False,
) -> Passes:
    """Return the time of one layer on a rank: its share of heads, features and (with cp) of the sequence.

    `where_it_pays`: fp8 is that of Phalanx; else all products are in it, as with Transformer Engine.
    """
    tokens = batch * seq // cp
    width, unit = WIDTH[precision], tokens * model.hidden * WIDTH[precision]
    forward = backward = 0.0
    experts = _expert_products(model, tokens, tp, ep) if mixture else []
    for m, n, k, count in (*_products(model, tokens, tp, mixture=mixture), *experts):
        kinds = _precisions(n, k, precision, where_it_pays=where_it_pays, experts=count > 1)
        forward += product_seconds(gpu, kinds[0], m, n, k, count)
        backward += product_seconds(gpu, kinds[1], m, k, n, count) + product_seconds(gpu, kinds[2], k, n, m, count)
        if where_it_pays:
            values = (m * k, m * n, m * (n + k))
            rounded = sum(size for size, kind in zip(values, kinds, strict=True) if kind == "fp8")
            backward += traffic_seconds(gpu, FP8_ROUNDING * rounded)
    ffn, routed = _feed_forward(model, mixture=mixture)
    norms = (2 * 2 + 2 * 3) * unit / (tp if sequence_parallel else 1)  # two norms, two sums with the residual
    reorder = 2 * (model.attention_width + 2 * model.kv_width) * tokens * width / tp
    activation = (3 if model.gated_mlp else 2) * ffn * routed * tokens * width / tp
    scatter = 4 * routed * unit / tp if mixture else 0.0  # tokens are gathered for experts and put back
    moved = traffic_seconds(gpu, (norms + reorder + activation) * TRAFFIC[kernels] + scatter)
    forward, backward = forward + moved, backward + BACKWARD_TRAFFIC * moved
    core, core_backward = _attention(model, gpu, precision, batch, seq, tp * cp, attention)
    if kernels != "eager" and attention == "flash":
        core, core_backward = core / FUSED_ATTENTION, core_backward / FUSED_ATTENTION
    launches = LAYER_KERNELS * gpu.launch_us * 1e-6
    forward, backward = max(forward + core, launches), max(backward + core_backward, 2 * launches)
    # torch asks a policy in Python about each operation, which takes longer than to launch it.
    again = core if attention != "flash" else max(moved, SELECTIVE_POLICY * launches)
    return Passes(forward, backward, again, core)


def _precisions(n: int, k: int, precision: str, *, where_it_pays: bool, experts: bool) -> tuple[str, str, str]:
    """Return the precisions of a layer's products: of its output (n features), gradients of input (k) and weight."""
    if not where_it_pays:
        return precision, precision, precision
    pays = n >= FP8_OUTPUTS, k >= FP8_OUTPUTS, n * k >= FP8_WEIGHT * (n + k)
    first, second, third = ("fp8" if in_fp8 and not experts else "bf16" for in_fp8 in pays)
    return first, second, third


def _feed_forward(model: ModelShape, *, mixture: bool) -> tuple[int, int]:
    """Return the width of a feed-forward layer, and how many of them each token passes through."""
    if mixture:
        return model.ffn, model.active_experts + model.shared_experts
    return (model.dense_ffn_hidden or model.ffn) if model.experts else model.ffn, 1


def _products(model: ModelShape, tokens: int, tp: int, *, mixture: bool) -> list[tuple[int, int, int, int]]:
    """Return (m, n, k, count) of the matrix products of one layer's linear layers."""
    hidden, ffn, up = model.hidden, model.ffn, 2 if model.gated_mlp else 1
    products = [
        (tokens, (model.attention_width + 2 * model.kv_width) // tp, hidden, 1),
        (tokens, hidden, model.attention_width // tp, 1),
    ]
    if not mixture:
        ffn = _feed_forward(model, mixture=False)[0]
        return [*products, (tokens, up * ffn // tp, hidden, 1), (tokens, hidden, ffn // tp, 1)]
    products += [(tokens, model.experts, hidden, 1)]
    if model.shared_experts:
        ffn *= model.shared_experts
        products += [(tokens, up * ffn // tp, hidden, 1), (tokens, hidden, ffn // tp, 1)]
    return products


def _expert_products(model: ModelShape, tokens: int, tp: int, ep: int) -> list[tuple[int, int, int, int]]:
    """Return those of a mixture layer's experts, which are not linear layers."""
    experts_here = max(1, model.experts // ep)
    tokens_each = max(1, tokens * ep * model.active_experts // model.experts)
    up, ffn = 2 if model.gated_mlp else 1, model.ffn
    return [
        (tokens_each, up * ffn // tp, model.hidden, experts_here),
        (tokens_each, model.hidden, max(1, ffn // tp), experts_here),
    ]


def _attention(
    model: ModelShape, gpu: Gpu, precision: str, batch: int, seq: int, split: int, kind: str
) -> tuple[float, float]:
    """Return forward and backward time of attention between queries and keys, without its projections."""
    heads, size = model.heads / split, model.attention_width // model.heads
    if kind == "flash":
        share = 0.5 if model.causal else 1.0  # blocks above the diagonal are skipped
        operations = 4.0 * batch * heads * seq * seq * size * share
        forward = operations / (peak(gpu, "bf16" if precision == "fp8" else precision) * gpu.attention)
        more, slower = FLASH_BACKWARD
        return forward, more * forward / slower
    count = max(1, round(batch * heads))
    products = product_seconds(gpu, precision, seq, seq, size, count) + product_seconds(
        gpu, precision, seq, size, seq, count
    )
    scores = batch * heads * seq * seq * WIDTH[precision]
    # Forward reads and writes the scores for softmax and for dropout, with its mask; backward reads them and gradients.
    return products + traffic_seconds(gpu, 4.5 * scores), 2 * products + traffic_seconds(gpu, 5.5 * scores)


@lru_cache(maxsize=4096)
def head_passes(
    model: ModelShape,
    gpu: Gpu,
    precision: str,
    batch: int,
    seq: int,
    *,
    tp: int,
    cp: int,
    kernels: str,
) -> Passes:
    """Return the time of the output layer and its loss."""
    if model.outputs is not None:
        return Passes(0.0, 0.0)
    tokens, vocab, padded = batch * seq // cp, model.vocab // tp, kernels == "fused" or model.reference
    forward = product_seconds(gpu, precision, tokens, vocab, model.hidden, padded=padded)
    backward = product_seconds(gpu, precision, tokens, model.hidden, vocab, padded=padded)
    backward += product_seconds(gpu, precision, model.hidden, vocab, tokens, padded=padded)
    logits = tokens * vocab
    ahead, back = CROSS_ENTROPY_KERNEL if model.reference and tp == 1 else CROSS_ENTROPY
    return Passes(forward + traffic_seconds(gpu, ahead * logits), backward + traffic_seconds(gpu, back * logits))
