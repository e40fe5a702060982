"""The loss on logits that stay split by vocabulary: equal to the whole ones, which no rank has in training."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from phalanx.loop.formation import Formation
from phalanx.zoo.models.llama import llama
from phalanx.zoo.models.loss import token_loss

VOCABULARY = 61  # cannot be cut evenly


def make_logits(dtype: torch.dtype, vocabulary: int = VOCABULARY) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that would overflow if their highest were not taken off, and labels of which some do not count."""
    generator = torch.Generator().manual_seed(2)
    logits = 300 * torch.randn(2, 5, vocabulary, generator=generator)
    targets = torch.randint(vocabulary, (2, 5), generator=generator)
    targets[0, :3] = -100
    return logits.to(dtype), targets


def loss_and_gradient(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.detach().requires_grad_()
    loss = token_loss(leaf, targets)
    (3 * loss).backward()
    gradient = leaf.grad
    return loss.detach(), gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def split_loss(dtype: torch.dtype, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets = make_logits(dtype, vocabulary)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return loss_and_gradient(distribute_tensor(logits, mesh, [Shard(2)]), targets)


@pytest.mark.parametrize(
    ("dtype", "vocabulary"), [(torch.float64, VOCABULARY), (torch.bfloat16, 64), (torch.float64, 4)]
)
def test_loss_and_gradient_equal_those_of_whole_logits(ranks, dtype, vocabulary):
    """A vocabulary of 4 leaves the third of three ranks nothing, and is gathered."""
    loss, gradient = loss_and_gradient(*make_logits(dtype, vocabulary))
    for ours, our_gradient in ranks(lambda: split_loss(dtype, vocabulary), world_size=3):
        assert ours.dtype == loss.dtype
        assert ours.item() == pytest.approx(loss.item(), rel=1e-13 if dtype == torch.float64 else 1e-6)
        assert our_gradient.dtype == gradient.dtype
        assert torch.allclose(our_gradient, gradient, rtol=1e-2 if dtype == torch.bfloat16 else 1e-12, atol=1e-15)


def calls(loss_parallel: bool) -> tuple[tuple[int, ...], ...]:
    """The shapes of the logits that this rank holds: together with a loss in training and in evaluation, and alone."""
    model = llama(layers=1, vocab_size=VOCABULARY, seq_len=8)
    model.takes_split_logits = loss_parallel
    tokens = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
    with Formation(device="cpu", tensor_parallel=2) as formation:
        prepared = formation.prepare(model)
        heads: list[torch.Tensor] = []
        hook = model.head.register_forward_hook(lambda *call: heads.append(call[-1]))
        assert prepared(tokens, tokens).logits is None
        hook.remove()
        alone = prepared(tokens)
        with torch.no_grad():
            evaluated = prepared(tokens, tokens)
    assert type(alone) is type(evaluated.logits) is torch.Tensor
    assert torch.allclose(evaluated.loss, F.cross_entropy(alone.flatten(0, 1), tokens.flatten()))
    held = heads[0].to_local() if isinstance(heads[0], DTensor) else heads[0]
    return tuple(held.shape), tuple(evaluated.logits.shape), tuple(alone.shape)


def test_no_rank_holds_whole_logits_in_training(ranks):
    whole = (2, 8, VOCABULARY)
    assert ranks(calls, True, world_size=2) == [((2, 8, 31), whole, whole), ((2, 8, 30), whole, whole)]
    assert ranks(calls, False, world_size=2) == [(whole, whole, whole)] * 2
