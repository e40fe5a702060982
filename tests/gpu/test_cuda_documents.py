"""On a GPU: compiled layers skip blocks of other documents, and give the losses and gradients of the whole mask."""

from __future__ import annotations

import pytest
import torch

from phalanx import Formation
from phalanx.zoo.models import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _compile_here(monkeypatch):
    """Compile in this process: Inductor's worker processes outlive a test."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)


def losses_and_gradients(name: str, **settings) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = build(name, preset="small", seq_len=512)
    losses = []
    with Formation(device="cuda", mixed_precision="bf16", **settings) as formation:
        wrapped = formation.prepare(model)
        for step in range(3):
            torch.manual_seed(step)
            model.zero_grad()
            tokens = torch.randint(256, (4, 512), device="cuda")
            documents = torch.randint(0, 9, (4, 512), device="cuda").sort(dim=1).values
            with formation.autocast():
                loss = wrapped(tokens, tokens, documents=documents).loss
            formation.backward(loss)
            losses.append(loss.item())
        return losses, [parameter.grad.float().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_compiled_layers_give_what_the_whole_mask_gives(name):
    plain, compiled = (losses_and_gradients(name, compile=compiled) for compiled in (False, True))
    assert compiled[0] == pytest.approx(plain[0], rel=2e-3)
    for ours, theirs in zip(compiled[1], plain[1], strict=True):
        assert (ours - theirs).norm() <= 0.05 * theirs.norm() + 1e-6
