"""Recomputed and offloaded activations change no bit of what each strategy trains."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from phalanx import Formation
from phalanx.speed.offload import _View
from phalanx.strategies.base import whole
from phalanx.zoo.models import build

KINDS = {
    "full": {"activation_checkpointing": "full"},
    "every 2": {"activation_checkpointing": "every 2", "activation_offload": True},
    "selective": {"activation_checkpointing": "selective"},
    "offload": {"activation_offload": True},
}
LAYOUTS = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"tensor_parallel": 2},
}


def train(**settings) -> list[torch.Tensor]:
    """Take three clipped steps of two micro-batches each, with dropout; return the whole weights."""
    torch.manual_seed(0)
    model = build("gpt", layers=3, seq_len=16, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Formation(device="cpu", gradient_accumulation_steps=2, seed=1, **settings) as formation:
        wrapped, optimizer = formation.prepare(model, optimizer)
        for batch in range(6):
            tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(batch))
            formation.backward(wrapped(tokens, tokens).loss)
            formation.clip_grad_norm(0.5)
            optimizer.step()
            optimizer.zero_grad()
        return [whole(parameter.detach()).clone() for parameter in model.parameters()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_have_equal_bits(ranks, layout):
    def compare() -> dict[str, bool]:
        plain = train(**LAYOUTS[layout])
        found = {}
        for name, kind in KINDS.items():
            pairs = zip(train(**LAYOUTS[layout], **kind), plain, strict=True)
            found[name] = all(torch.equal(ours, theirs) for ours, theirs in pairs)
        return found

    for found in ranks(compare, world_size=2):
        assert found == dict.fromkeys(KINDS, True)


def moved_and_back() -> bool:
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.randn(3, 4), mesh, [Shard(1)]).t()
    piece = tensor.to_local()
    back = _View(tensor, piece).of(piece.untyped_storage())
    same = isinstance(back, DTensor) and (back.placements, back.shape) == (tensor.placements, tensor.shape)
    return same and back.stride() == tensor.stride() and torch.equal(back.to_local(), piece)


def test_an_offloaded_tensor_keeps_its_layout(ranks):
    assert ranks(moved_and_back, world_size=2) == [True, True]
