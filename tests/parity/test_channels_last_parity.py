"""Weights stored channels last on two ranks: the losses and weights of contiguous ones, by each strategy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx import Formation


def train(
    strategy: str, channels_last: bool, folder: str = "", stop: int = 0
) -> tuple[list[float], torch.Tensor, bool]:
    """Return this rank's losses, the weights of the first convolution, and whether its gradient has their strides.

    `stop`: save after this many steps of six and end; a folder without it: continue from what was saved.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(144, 4)).double()
    options = {"sync_every": 2} if strategy in ("local-sgd", "diloco") else {}
    formation = Formation(strategy=strategy, device="cpu", channels_last=channels_last, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    prepared, bound = formation.prepare(model, optimizer)
    if folder and not stop:
        formation.load(folder)
    losses, follows = [], False
    for step in range(formation.step, stop or 6):
        draw = torch.Generator().manual_seed(2 * step + formation.rank)
        pixels, labels = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=draw), torch.arange(4)
        loss = nn.functional.cross_entropy(prepared(pixels), labels)
        formation.backward(loss)
        follows = model[0].weight.grad.stride() == model[0].weight.stride()
        bound.step()
        bound.zero_grad()
        losses.append(loss.item())
    if stop:
        formation.save(folder)
    weights = model[0].weight.detach().contiguous()
    del prepared, bound
    formation.close()
    return losses, weights, follows


def compare(strategy: str) -> None:
    losses, weights, _ = train(strategy, channels_last=False)
    found, laid_out, follows = train(strategy, channels_last=True)
    assert found == pytest.approx(losses, abs=1e-12)
    torch.testing.assert_close(laid_out, weights, rtol=0, atol=1e-12)
    assert follows, "the gradient has the strides of its weight, which fused optimizers need"


@pytest.mark.parametrize("strategy", ["ddp", "ring", "local-sgd", "diloco"])
def test_two_ranks_train_alike_in_both_layouts(ranks, strategy):
    ranks(compare, strategy, world_size=2)


def resume(strategy: str, folder: str, before: bool) -> None:
    losses, weights, _ = train(strategy, channels_last=False)
    train(strategy, before, folder, stop=4)
    found, laid_out, _ = train(strategy, not before, folder)
    assert found == pytest.approx(losses[4:], abs=1e-12)
    torch.testing.assert_close(laid_out, weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "ring"])
def test_two_ranks_resume_a_checkpoint_of_the_other_layout(ranks, tmp_path, strategy, before):
    ranks(resume, strategy, str(tmp_path / "saved"), before, world_size=2)
