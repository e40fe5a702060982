"""Kernels for CUDA in Triton: cross-entropy that replaces logits by their gradient, and rounding to 8 bits.

Each is one pass over memory where torch's operations are several. Those that compiled blocks use are operators of
torch, whose kernels the compiled code launches itself. Without Triton (CPUs, Windows) this module is not imported.
"""

# ruff: noqa: ANN001, ANN202 - Triton reads the annotations of a kernel
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.config.fields import IGNORED_LABEL

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E4M3_LARGEST = torch.finfo(E4M3).max
E5M2_LARGEST = torch.finfo(E5M2).max
GRADIENT_SCALE = 8192.0
"""The 8-bit gradients of logits are times this: they are at most 1, and e5m2 reaches from 2**-16 to 57,344."""


@triton.jit
def _cross_entropy_kernel(
    logits, losses, norms, targets, vocabulary, width, IGNORED: tl.constexpr, TO_GRADIENT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target = tl.load(targets + row)
    counts = target != IGNORED
    # Before the reductions, whose barriers keep other threads from overwriting it too early.
    is_token = (target >= 0) & (target < vocabulary)
    chosen = tl.load(logits + tl.where(is_token, target, 0)).to(tl.float32)
    chosen = tl.where(is_token, chosen, float("nan"))  # a label outside the vocabulary: the loss is NaN
    columns = tl.arange(0, GROUP)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    highest = tl.full([BLOCK], -1e30, tl.float32)  # of each lane: one reduction after the loop, none in it
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK * GROUP):
        places = start + columns
        values = tl.load(logits + places, mask=places < vocabulary, other=float("-inf")).to(tl.float32) * LOG2E
        higher = tl.maximum(highest, tl.max(values, 0))
        total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(values - higher[None, :]), 0)
        highest = higher
    top = tl.max(highest, 0)
    norm = top + tl.log2(tl.sum(total * tl.exp2(highest - top), 0))
    tl.store(losses + row, tl.where(counts, norm / LOG2E - chosen, 0.0))
    if TO_GRADIENT:
        blocks = tl.cdiv(width, BLOCK * GROUP)
        for block in range(blocks):  # backwards: what was read last is still in the cache
            places = (blocks - 1 - block) * BLOCK * GROUP + columns
            values = tl.load(
                logits + places, mask=places < vocabulary, other=float("-inf"), eviction_policy="evict_first"
            )
            gradient = tl.exp2(values.to(tl.float32) * LOG2E - norm)
            gradient = tl.where(places == target, gradient - 1.0, gradient)
            gradient = tl.where(counts, gradient, 0.0).to(logits.dtype.element_ty)
            tl.store(logits + places, gradient, mask=places < width, eviction_policy="evict_first")
    else:
        tl.store(norms + row, tl.where(counts, norm, float("inf")))


def cross_entropy_(logits: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
    """Replace logits [tokens, width] by the gradient of each token's cross-entropy; return these losses.

    Columns from `vocabulary` on are padding.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _cross_entropy(logits, losses, losses, targets.contiguous(), vocabulary, to_gradient=True)
    return losses


def _cross_entropy(
    logits: Tensor, losses: Tensor, norms: Tensor, targets: Tensor, vocabulary: int, *, to_gradient: bool
) -> None:
    sizes = {"GROUP": 4, "BLOCK": 2048, "num_warps": 8}  # the fastest on an H200 for 50,257 and 128,256 tokens
    _cross_entropy_kernel[(len(logits),)](
        logits, losses, norms, targets, vocabulary, logits.shape[1],
        IGNORED=IGNORED_LABEL, TO_GRADIENT=to_gradient, **sizes,
    )  # fmt: skip


@triton.jit
def _gradient_kernel(
    logits, norms, targets, rows_result, columns_result, tokens, vocabulary, width, stride,
    SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here, there = row < tokens, column < width
    offsets = row[:, None].to(tl.int64) * width + column[None, :]
    is_token = here[:, None] & (column[None, :] < vocabulary)
    values = tl.load(logits + offsets, mask=is_token, other=float("-inf")).to(tl.float32) * LOG2E
    norm = tl.load(norms + row, mask=here, other=float("inf"))  # infinite: the label does not count
    target = tl.load(targets + row, mask=here, other=-1)
    gradient = tl.exp2(values - norm[:, None])
    is_label = (column[None, :] == target[:, None]) & (norm[:, None] < float("inf"))
    rounded = (tl.where(is_label, gradient - 1.0, gradient) * SCALE).to(rows_result.dtype.element_ty)
    tl.store(rows_result + offsets, rounded, mask=here[:, None] & there[None, :])
    turned = column[:, None].to(tl.int64) * stride + row[None, :]
    tl.store(columns_result + turned, tl.trans(rounded), mask=there[:, None] & here[None, :])


def cross_entropy_gradient(logits: Tensor, targets: Tensor, vocabulary: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Return each token's cross-entropy; write its gradient times GRADIENT_SCALE in e5m2, also transposed.

    `rows` [tokens, width] and `columns` [width, tokens], the latter perhaps a part of a matrix of more tokens.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    norms = torch.empty_like(losses)
    targets = targets.contiguous()
    _cross_entropy(logits, losses, norms, targets, vocabulary, to_gradient=False)
    tokens, width = logits.shape
    _gradient_kernel[(triton.cdiv(tokens, 64), triton.cdiv(width, 128))](
        logits, norms, targets, rows, columns, tokens, vocabulary, width, columns.stride(0),
        SCALE=GRADIENT_SCALE, ROWS=64, COLUMNS=128, num_warps=4,
    )  # fmt: skip
    return losses


@triton.jit
def _rows_kernel(values, result, scales, rows, width, LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    block = tl.load(values + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(block), 1), 1e-12)[:, None] / LARGEST
    tl.store(result + row * width + column, (block / scale).to(result.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


@torch.library.triton_op("phalanx::round_rows", mutates_args={})
def round_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in e4m3 with a scale for each row [rows, 1]."""
    values = values.contiguous()
    rows, width = values.shape
    result = torch.empty(rows, width, dtype=E4M3, device=values.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=values.device)
    block = triton.next_power_of_2(width)
    together = max(1, 4096 // block)
    torch.library.wrap_triton(_rows_kernel)[(triton.cdiv(rows, together),)](
        values, result, scales, rows, width, LARGEST=E4M3_LARGEST, ROWS=together, BLOCK=block,
        num_warps=4 if block <= 4096 else 8 if block <= 8192 else 16,
    )  # fmt: skip
    return result, scales


@triton.jit
def _transpose_kernel(values, result, scale, rows, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    block = tl.load(values + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    rounded = tl.clamp(block / tl.load(scale), -LARGEST, LARGEST).to(result.dtype.element_ty)
    pointers = result + column[:, None] * rows + row[None, :]
    tl.store(pointers, tl.trans(rounded), mask=(column[:, None] < width) & (row[None, :] < rows))


@torch.library.triton_op("phalanx::round_transposed", mutates_args={})
def round_transposed(values: Tensor, scale: Tensor, wide_range: bool) -> Tensor:
    """Return the transpose of a matrix divided by a scale, in e4m3, or in e5m2 for a wide range (gradients)."""
    values = values.contiguous()
    rows, width = values.shape
    result = torch.empty(width, rows, dtype=E5M2 if wide_range else E4M3, device=values.device)
    grid = (triton.cdiv(rows, 64), triton.cdiv(width, 64))
    largest = E5M2_LARGEST if wide_range else E4M3_LARGEST
    kernel = torch.library.wrap_triton(_transpose_kernel)
    kernel[grid](values, result, scale, rows, width, LARGEST=largest, BLOCK=64, num_warps=4)
    return result


@triton.jit(do_not_specialize=["step"])
def _adamw8bit_kernel(
    weights, gradients, averages, roots, average_scales, root_scales, blocks, step,
    rate, decay, beta1, beta2, correction1, correction2_root, eps,
    LEVELS: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    offsets = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = row < blocks
    every = inside & (offsets >= 0)
    weight = tl.load(weights + offsets, mask=every, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + offsets, mask=every, other=0.0).to(tl.float32)
    level = tl.load(averages + offsets, mask=every, other=0).to(tl.float32) / LEVELS
    share = level * level
    average = share * share * tl.load(average_scales + row, mask=inside, other=0.0)
    average = tl.where(level < 0, -average, average)
    root = tl.load(roots + offsets, mask=every, other=0.0).to(tl.float32)
    root *= tl.load(root_scales + row, mask=inside, other=0.0)
    average = beta1 * average + (1 - beta1) * gradient
    root = tl.sqrt(beta2 * root * root + (1 - beta2) * gradient * gradient)
    moved = weight * (1 - decay) - rate * (average / correction1) / (root / correction2_root + eps)
    tl.store(weights + offsets, moved.to(weights.dtype.element_ty), mask=every)
    scale = tl.maximum(tl.max(tl.abs(average), 1), 1e-30)[:, None]
    tl.store(average_scales + row, scale, mask=inside)
    # As `adamw8bit._chances`: up or down by chance, which is a function of step and place.
    noise = (offsets + step.to(tl.int64) * 0x9E3779B9) * 0x2545F491
    noise = (noise ^ (noise >> 15)) * 0x45D9F3B
    share = tl.abs(average) / scale
    level = tl.floor(tl.sqrt(tl.sqrt(share)) * LEVELS)
    low, high = level / LEVELS, (level + 1.0) / LEVELS
    low, high = low * low, high * high
    low, high = low * low, high * high
    chance = ((noise >> 31) & 0xFFFFF).to(tl.float32) / 1048576.0
    level = tl.minimum(tl.where(chance < (share - low) / (high - low), level + 1.0, level), LEVELS)
    tl.store(averages + offsets, tl.where(average < 0, -level, level).to(tl.int8), mask=every)
    scale = tl.maximum(tl.max(root, 1), 1e-30)[:, None] / LARGEST
    tl.store(root_scales + row, scale, mask=inside)
    chance = ((noise >> 11) & 0xFFFFF).to(tl.float32) / 1048576.0
    value = root / scale
    power = value.to(tl.int32, bitcast=True) & 0x7F800000
    spacing = tl.maximum((power - 0x01800000).to(tl.float32, bitcast=True), LEAST)
    below = tl.floor(value / spacing) * spacing
    above = below + spacing
    up = (value * value - below * below) / (above * above - below * below)
    rounded = tl.minimum(tl.maximum(tl.where(chance < up, above, below), LEAST), LARGEST)
    tl.store(roots + offsets, rounded.to(roots.dtype.element_ty), mask=every)


def adamw8bit_(
    weights: Tensor, gradients: Tensor, states: tuple[Tensor, ...], block: int, step: int, numbers: tuple[float, ...]
) -> None:
    """Take a step of AdamW on blocks of neighbouring values; `states`: averages, roots, and the scales of both."""
    blocks = weights.numel() // block
    assert all(scales.numel() == blocks for scales in states[2:]), "a scale for each block"
    rows = max(1, 2048 // block)
    _adamw8bit_kernel[(triton.cdiv(blocks, rows),)](
        weights, gradients, *states, blocks, step, *numbers,
        LEVELS=127.0, LEAST=2.0**-9, LARGEST=E4M3_LARGEST, ROWS=rows, BLOCK=block,
    )  # fmt: skip
