"""Attention over one block of keys with the log-sum-exp to merge blocks: torch's flash kernels, or plain operations.

All tensors are [batch, heads, time, head width], and keys may have fewer heads. Forward returns the output and the
log-sum-exp [batch, heads, time]. Backward takes the output and the log-sum-exp of *all* blocks, so that a block's part
of the gradients of query, key and value is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx import torch_flash

ROWS = 1024
"""How many queries the plain kernel scores at a time, which limits its memory."""


def _forward(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    key, value = _precise(_repeat(key, query)), _precise(_repeat(value, query))
    outs, sums = [], []
    for start, rows in _pieces(query):
        scores = _scores(rows, key, start if causal else None)
        sums.append(scores.logsumexp(-1))
        outs.append((scores - sums[-1][..., None]).exp() @ value)
    return torch.cat(outs, 2).to(query.dtype), torch.cat(sums, 2)


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    heads, scale = key.shape[1], query.shape[-1] ** -0.5
    key, value = _precise(_repeat(key, query)), _precise(_repeat(value, query))
    for_query, for_key, for_value = [], torch.zeros_like(key), torch.zeros_like(value)
    for start, rows in _pieces(query):
        these = slice(start, start + rows.shape[2])
        into, mixed = _precise(gradient[:, :, these]), _precise(out[:, :, these])
        shares = (_scores(rows, key, start if causal else None) - lse[:, :, these, None]).exp()
        towards = into @ value.mT - (into * mixed).sum(-1, keepdim=True)
        for_scores = shares * towards * scale
        for_query.append(for_scores @ key)
        for_key += for_scores.mT @ rows
        for_value += shares.mT @ into
    return torch.cat(for_query, 2), _fold(for_key, heads), _fold(for_value, heads)


class Kernel(NamedTuple):
    """Forward and backward of attention over a block of keys."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


CPU_FLASH = Kernel(torch_flash.flash_cpu, torch_flash.flash_cpu_backward)
CUDA_FLASH = Kernel(torch_flash.flash_cuda, torch_flash.flash_cuda_backward)
PLAIN = Kernel(_forward, _backward)
"""Any device and dtype."""


def choose_kernel(query: Tensor) -> Kernel:
    """Return the fastest kernel for tensors like this one."""
    if query.device.type == "cpu":
        return CPU_FLASH
    fits = query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return CUDA_FLASH if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and fits else PLAIN


def _pieces(query: Tensor) -> list[tuple[int, Tensor]]:
    return [(start, _precise(query[:, :, start : start + ROWS])) for start in range(0, query.shape[2], ROWS)]


def _scores(rows: Tensor, key: Tensor, start: int | None) -> Tensor:
    """Return the scaled scores; with `start`, keys after a row's position are masked."""
    scores: Tensor = rows @ key.mT * rows.shape[-1] ** -0.5
    if start is None:
        return scores
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=rows.device).tril(start)
    return scores.masked_fill(~seen, -torch.inf)


def _precise(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _repeat(shared: Tensor, query: Tensor) -> Tensor:
    """Repeat key (or value) heads: one per query head."""
    groups = query.shape[1] // shared.shape[1]
    return shared if groups == 1 else shared.repeat_interleave(groups, 1)


def _fold(gradient: Tensor, heads: int) -> Tensor:
    """Add up the gradients of a key (or value) head over its query heads."""
    if gradient.shape[1] == heads:
        return gradient
    batch, _, time, width = gradient.shape
    return gradient.view(batch, heads, -1, time, width).sum(2)
