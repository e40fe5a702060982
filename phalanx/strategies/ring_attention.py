"""Ring attention: keys and values pass around the ranks, in forward and in backward.

A kernel computes attention over one block of keys, with the log-sum-exp to merge blocks: torch's flash kernels, or
plain operations. All tensors are [batch, heads, time, head width], and keys may have fewer heads. Forward returns the
output and the log-sum-exp [batch, heads, time]. Backward takes the output and the log-sum-exp of *all* blocks, so that
a block's part of the gradients of query, key and value is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx import torch_compat
from phalanx.errors import ModelError

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


CPU_FLASH = Kernel(torch_compat.flash_cpu, torch_compat.flash_cpu_backward)
CUDA_FLASH = Kernel(torch_compat.flash_cuda, torch_compat.flash_cuda_backward)
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
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=rows.device).tril(start)
    return scores.masked_fill(~visible, -torch.inf)


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


_GRADIENTS = 1
"""The tag of gradients on the ring, different from that of keys and values."""


class RingAttention(nn.Module):
    """Replaces a model's inner attention; inputs and output are this rank's slice of the sequence."""

    def __init__(self, ring: Ring, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.ring = ring
        self.causal = causal
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention over the keys and values of all ranks; all tensors are [batch, heads, slice, width]."""
        if self.training and self.dropout > 0:
            raise ModelError(
                f"context_parallel cannot drop attention weights (dropout = {self.dropout}): no rank has all of them",
                hint="Set dropout = 0 on the model's inner attention modules; dropout between layers works.",
            )
        if torch.is_autocast_enabled(query.device.type):  # as torch's own attention does
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        mixed: Tensor = _RingFunction.apply(query, key, value, self.ring, self.causal)  # type: ignore[no-untyped-call]
        return mixed


class _RingFunction(torch.autograd.Function):
    """Attention over a ring; it saves a rank's slices for backward, but no scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, causal: bool) -> Tensor:
        kernel = choose_kernel(query)
        precise = torch.promote_types(query.dtype, torch.float32)
        out, lse = query.new_empty(0), query.new_empty(0)
        for owner, pair in ring.travel(torch.stack([key, value])):
            rows, columns, masked = _seen(ring, owner, query.shape[2], causal=causal)
            keys, values = pair[:, :, :, columns].unbind(0)
            block, sums = kernel.forward(query[:, :, rows], keys, values, masked)
            if owner == ring.rank:
                out, lse = block.to(precise), sums.contiguous()
            else:
                _merge(out[:, :, rows], lse[:, :, rows], block, sums)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.ring, ctx.causal = ring, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        kernel = choose_kernel(query)
        precise = torch.promote_types(query.dtype, torch.float32)
        for_query = torch.zeros_like(query, dtype=precise)
        totals = torch.zeros(2, *key.shape, dtype=precise, device=key.device)
        flight = None
        for owner, pair in ring.travel(torch.stack([key, value])):
            rows, columns, masked = _seen(ring, owner, query.shape[2], causal=ctx.causal)
            keys, values = pair[:, :, :, columns].unbind(0)
            into, queries, mixed, sums = (tensor[:, :, rows] for tensor in (gradient, query, out, lse))
            gradients = kernel.backward(into, queries, keys, values, mixed, sums, masked)
            if flight is not None:  # the gradients of these keys and values from the ranks before
                totals = flight.wait()
            for_query[:, :, rows] += gradients[0]
            totals[0, :, :, columns] += gradients[1]
            totals[1, :, :, columns] += gradients[2]
            flight = ring.send(totals, _GRADIENTS)
        assert flight is not None, "a ring has a rank"
        for_key, for_value = flight.wait().to(key.dtype).unbind(0)
        return for_query.to(query.dtype), for_key, for_value, None, None


def _seen(ring: Ring, owner: int, time: int, *, causal: bool) -> tuple[slice, slice, bool]:
    """Return which of this rank's queries see which of the owner's keys, and whether causally."""
    everything, half = slice(None), time // 2
    if not causal or owner == ring.rank:
        return everything, everything, causal
    return (everything, slice(0, half), False) if owner < ring.rank else (slice(half, None), everything, False)


def _merge(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """Add a block to the attention so far, in place, weighted by the sums of their exponentials."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp_()[..., None]).add_(block * (block_lse - total).exp_()[..., None])
    lse.copy_(total)


class Flight:
    """A tensor that is sent to the next rank, and the one that arrives from the previous rank."""

    def __init__(self, sent: Tensor, arriving: Tensor, works: list[dist.Work], device: torch.device) -> None:
        self._sent = sent  # kept until it has been sent
        self._arriving = arriving
        self._works = works
        self._device = device

    def wait(self) -> Tensor:
        """Return the tensor of the previous rank."""
        for work in self._works:
            work.wait()
        return self._arriving.to(self._device)


class Ring:
    """The ranks of a group in a ring."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._next = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self._before = dist.get_global_rank(group, (self.rank - 1) % self.size)
        self._through_host = dist.get_backend(group) == "gloo"  # which cannot send memory of a GPU

    def send(self, tensor: Tensor, tag: int = 0) -> Flight:
        """Send a tensor to the next rank; the one that arrives has the same shape and dtype."""
        sent = tensor.contiguous()
        if self._through_host:
            sent = sent.cpu()
        arriving = torch.empty_like(sent)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, self._next, self.group, tag),
                dist.P2POp(dist.irecv, arriving, self._before, self.group, tag),
            ]
        )
        return Flight(sent, arriving, works, tensor.device)

    def travel(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (owner, tensor) for every rank's tensor, this rank's first; the next is received meanwhile."""
        tensor = mine
        for step in range(self.size):
            flight = self.send(tensor) if step + 1 < self.size else None
            yield (self.rank - step) % self.size, tensor
            if flight is not None:
                tensor = flight.wait()
