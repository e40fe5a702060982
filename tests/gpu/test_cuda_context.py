"""On a GPU: ring attention by the flash kernel and by hand; `test_nccl_parity` trains with it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from phalanx.strategies.context_parallel import SequenceSlices
from phalanx.strategies.ring_attention import CUDA_FLASH, PLAIN, Ring, RingAttention, choose_kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make_heads(dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key, value with half as many heads, and the gradient of what they give."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, heads, 256, 64, generator=generator).to("cuda", dtype) for heads in (4, 2, 2, 4)]


def whole_attention(dtype: torch.dtype, *, causal: bool) -> list[torch.Tensor]:
    query, key, value, gradient = make_heads(dtype)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    return [found.detach().double().cpu() for found in (out, *torch.autograd.grad(out, leaves, gradient))]


def ring_attention(dtype: torch.dtype, *, causal: bool) -> list[torch.Tensor]:
    slices, ring = SequenceSlices(dist.group.WORLD), Ring(dist.group.WORLD)
    parts = [slices.cut(heads.transpose(1, 2)).transpose(1, 2) for heads in make_heads(dtype)]
    leaves = [tensor.requires_grad_() for tensor in parts[:3]]
    out = RingAttention(ring, causal=causal, dropout=0.0)(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, parts[3])]
    return [slices.gather(heads.transpose(1, 2)).transpose(1, 2).double().cpu() for heads in found]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_equals_attention_over_the_whole_sequence(ranks, dtype, causal):
    """Half precision by the flash kernel, as near to float64 as torch's own attention is; the rest by hand."""
    expected = PLAIN if dtype in (torch.float32, torch.float64) else CUDA_FLASH
    assert choose_kernel(make_heads(dtype)[0]) is expected
    exact, theirs = whole_attention(torch.float64, causal=causal), whole_attention(dtype, causal=causal)
    for found in ranks(lambda: ring_attention(dtype, causal=causal), world_size=2):
        for ours, other, right in zip(found, theirs, exact, strict=True):
            allowed = max(1.5 * (other - right).norm(), 1e-12 * right.norm())
            assert (ours - right).norm() <= allowed
