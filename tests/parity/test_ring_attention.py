"""Ring attention equals torch's attention over the whole sequence, and never stores scores of more than a block."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.errors import ModelError
from phalanx.strategies.context_parallel import SequenceSlices
from phalanx.strategies.ring_attention import CPU_FLASH, PLAIN, ROWS, Ring, RingAttention


def make_heads(time: int, dtype: torch.dtype, kv_heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = (4, kv_heads, kv_heads, 4)  # query, key, value, and the gradient of what they give
    return [torch.randn(2, heads, time, 6, generator=generator).to(dtype) for heads in sizes]


def whole_attention(time: int, dtype: torch.dtype, *, causal: bool) -> list[torch.Tensor]:
    query, key, value, gradient = make_heads(time, dtype)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def ring_attention(time: int, dtype: torch.dtype, *, causal: bool) -> list[torch.Tensor]:
    """Output and gradients on this rank's slices, joined again."""
    slices, ring = SequenceSlices(dist.group.WORLD), Ring(dist.group.WORLD)
    query, key, value, gradient = (
        slices.cut(heads.transpose(1, 2)).transpose(1, 2) for heads in make_heads(time, dtype)
    )
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = RingAttention(ring, causal=causal, dropout=0.0)(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, gradient)]
    return [slices.gather(heads.transpose(1, 2)).transpose(1, 2) for heads in found]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_attention_over_the_whole_sequence(ranks, world_size, causal):
    time = 4 * world_size * 2
    expected = whole_attention(time, torch.float64, causal=causal)
    for found in ranks(lambda: ring_attention(time, torch.float64, causal=causal), world_size=world_size):
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).abs().max() < 1e-13


def test_half_precision_adds_up_in_float32(ranks):
    """As close to float64 as torch's own bf16 attention over the whole sequence is."""
    exact = whole_attention(64, torch.float64, causal=True)
    whole = whole_attention(64, torch.bfloat16, causal=True)
    ring = ranks(lambda: ring_attention(64, torch.bfloat16, causal=True), world_size=2)[0]
    for ours, theirs, right in zip(ring, whole, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - right).norm() < 1.2 * (theirs.double() - right).norm()


@pytest.mark.parametrize("causal", [True, False])
def test_the_plain_kernel_equals_the_flash_kernel(causal):
    query, key, value, gradient = make_heads(2 * ROWS if causal else ROWS + 7, torch.float64)
    out, lse = CPU_FLASH.forward(query, key, value, causal)
    ours, our_lse = PLAIN.forward(query, key, value, causal)
    assert (ours - out).abs().max() < 1e-13
    assert (our_lse - lse).abs().max() < 1e-12
    theirs = CPU_FLASH.backward(gradient, query, key, value, out, lse, causal)
    for found, expected in zip(PLAIN.backward(gradient, query, key, value, out, lse, causal), theirs, strict=True):
        assert (found - expected).abs().max() < 1e-12


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


def test_the_whole_matrix_of_scores_is_never_allocated(ranks):
    """A rank keeps its slices of query, key, value, output and log-sum-exp, and makes nothing larger than those."""
    time, width, heads = 256, 6, 4

    def measure() -> tuple[int, int]:
        slices, ring = SequenceSlices(dist.group.WORLD), Ring(dist.group.WORLD)
        query, key, value, gradient = (
            slices.cut(tensor.transpose(1, 2)).transpose(1, 2) for tensor in make_heads(time, torch.float32, heads)
        )
        kept: dict[int, int] = {}
        attention = RingAttention(ring, causal=True, dropout=0.0)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), LargestTensor() as largest:
            out = attention(query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
            out.backward(gradient)
        return sum(kept.values()), largest.numbers

    share = 2 * heads * time // 2  # queries of a rank, over batch and heads
    for kept, largest in ranks(measure, world_size=2):
        assert kept == share * (4 * width + 1)
        assert largest <= 2 * share * width  # keys and values on their way; all scores would be share * time / 2
        assert largest < share * time / 2 / 4


def test_dropout_of_attention_is_refused_in_training_only(ranks):
    def run(training: bool) -> bool:
        attention = RingAttention(Ring(dist.group.WORLD), causal=True, dropout=0.1).train(training)
        query, key, value, _ = make_heads(8, torch.float32)
        return bool(torch.isfinite(attention(query, key, value)).all())

    assert ranks(lambda: run(False), world_size=2) == [True, True]
    with pytest.raises(ModelError, match=r"dropout = 0\.1"):
        ranks(lambda: run(True), world_size=2)


def test_slices_join_to_the_whole_and_cover_it_once(ranks):
    def run() -> tuple[list[int], torch.Tensor]:
        slices = SequenceSlices(dist.group.WORLD)
        whole = torch.arange(24).view(2, 12)
        part = slices.cut(whole)
        assert torch.equal(part[0], slices.positions(12))
        return part[0].tolist(), slices.gather(part)

    results = ranks(run, world_size=3)
    assert [part for part, _ in results] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert all(torch.equal(whole, torch.arange(24).view(2, 12)) for _, whole in results)
