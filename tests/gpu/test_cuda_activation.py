"""On a GPU: activations that are recomputed or offloaded leave less on the device and give the same gradients."""

from __future__ import annotations

import pytest
import torch

from phalanx import Formation
from phalanx.zoo.models import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def held_and_gradients(**settings) -> tuple[int, list[torch.Tensor]]:
    """Return what forward leaves on the device for backward, and the gradients of the second of two passes."""
    torch.manual_seed(0)
    model = build("gpt", preset="small", dropout=0.1)
    with Formation(device="cuda", mixed_precision="bf16", deterministic=True, **settings) as formation:
        wrapped = formation.prepare(model)
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(5)
            tokens = torch.randint(256, (8, 256), device="cuda")
            before = torch.cuda.memory_allocated()
            with formation.autocast():
                loss = wrapped(tokens, tokens).loss
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() - before
            formation.backward(loss)
        return held, [parameter.grad.cpu() for parameter in model.parameters()]


KINDS = {
    "full": ({"activation_checkpointing": "full"}, 0.5),
    "every 2": ({"activation_checkpointing": "every 2"}, 0.8),
    "selective": ({"activation_checkpointing": "selective"}, 0.9),
    "offload": ({"activation_offload": True}, 0.5),
    "full, offload": ({"activation_checkpointing": "full", "activation_offload": True}, 0.4),
    "selective, offload": ({"activation_checkpointing": "selective", "activation_offload": True}, 0.9),
}


@pytest.mark.parametrize("kind", KINDS)
def test_less_is_held_and_gradients_are_equal(kind, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    plain, expected = held_and_gradients()
    settings, share = KINDS[kind]
    held, gradients = held_and_gradients(**settings)
    assert held < share * plain
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
