"""Several optimizers and groups of which a pipeline stage holds no parameter: checkpoints, layouts, fp16."""

from __future__ import annotations

import math

import pytest
import torch
from layouts import assert_same
from torch import nn

from phalanx.loop.formation import Formation
from phalanx.run.weights import whole_weights

PIPELINE = (2, {"pipeline_parallel": 2, "microbatches": 2})
LAYOUTS = {"pipeline 2": PIPELINE, "ddp 2": (2, {}), "one": (1, {}), "fsdp 2": (2, {"strategy": "fsdp"})}


def blocks() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))).double()


def one_a_stage(model: nn.Sequential, rate: float) -> list[torch.optim.Optimizer]:
    first = torch.optim.Adam(model[:2].parameters(), lr=rate)
    return [first, torch.optim.AdamW(model[2:].parameters(), lr=rate / 10, fused=True)]


def one_of_four_groups(model: nn.Sequential, rate: float) -> list[torch.optim.Optimizer]:
    groups = [{"params": list(block.parameters()), "lr": rate / 2**number} for number, block in enumerate(model)]
    return [torch.optim.Adam(groups)]


def one_without_state(model: nn.Sequential, rate: float) -> list[torch.optim.Optimizer]:
    last, first = list(model[3].parameters()), list(model[:3].parameters())
    return [torch.optim.SGD([{"params": last, "lr": rate}, {"params": first, "lr": rate / 10}])]


OPTIMIZERS = {f.__name__: f for f in (one_a_stage, one_of_four_groups, one_without_state)}


def train(folder, make, settings, *, steps, load=False, rate=0.1):
    """Take steps on one batch, all ranks on the same; return whole weights and every group's rate."""
    model = blocks()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with Formation(device="cpu", timeout=30, **settings) as formation:
        wrapped, *optimizers = formation.prepare(model, *OPTIMIZERS[make](model, rate))
        if load:
            formation.load(folder)
        for _ in range(steps):
            formation.train_batch(wrapped, (x, x.sin()), nn.functional.mse_loss)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        if not load:
            formation.save(folder)
        rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        weights = {name: value.clone() for name, value in whole_weights(model).items()}
    return weights, rates


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_stages_continues_at_any_layout(ranks, tmp_path, make, layout):
    """Resumed with other rates, so that the right ones can only come from the checkpoint."""
    world_size, settings = LAYOUTS[layout]
    expected, rates = ranks(lambda: train(tmp_path / "one", make, {}, steps=4), world_size=1)[0]
    ranks(lambda: train(tmp_path / "cut", make, PIPELINE[1], steps=2), world_size=PIPELINE[0])
    resumed = ranks(
        lambda: train(tmp_path / "cut", make, settings, steps=2, load=True, rate=0.7), world_size=world_size
    )
    for ours, our_rates in resumed:
        assert_same(ours, expected, 1e-10)
        assert our_rates == rates


def test_stages_load_a_checkpoint_of_another_layout(ranks, tmp_path):
    expected, rates = ranks(lambda: train(tmp_path / "four", "one_a_stage", {}, steps=4), world_size=1)[0]
    ranks(lambda: train(tmp_path / "two", "one_a_stage", {}, steps=2), world_size=1)
    resumed = ranks(
        lambda: train(tmp_path / "two", "one_a_stage", PIPELINE[1], steps=2, load=True, rate=0.7), world_size=2
    )
    for ours, our_rates in resumed:
        assert_same(ours, expected, 1e-10)
        assert our_rates == rates


def step_in_fp16():
    """Take two steps in fp16, the gradient of the second with an infinity on the first stage."""
    import phalanx.world.world

    phalanx.world.world.check_device = lambda *_: None  # CPUs can, and are refused because they are slow
    model = blocks().float()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    with Formation(device="cpu", timeout=30, mixed_precision="fp16", **PIPELINE[1]) as formation:
        first = torch.optim.SGD(model[:2].parameters(), lr=0.1)
        second = torch.optim.SGD(model[2:].parameters(), lr=0.1)
        wrapped, first, second = formation.prepare(model, first, second)
        states = [{name: value.clone() for name, value in whole_weights(model).items()}]
        for overflows in (False, True):
            formation.train_batch(wrapped, (x, x.sin()), nn.functional.mse_loss)
            if overflows and formation.rank == 0:
                next(model.parameters()).grad[0, 0] = math.inf
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
            formation.gradients.scale.update()
            states.append({name: value.clone() for name, value in whole_weights(model).items()})
        return states, formation.precision.scaler.get_scale(), formation.step


def test_fp16_steps_an_optimizer_that_holds_nothing_on_a_stage(ranks):
    """Each stage holds the parameters of one of two optimizers; both know of an overflow on either stage."""
    found = ranks(step_in_fp16, world_size=2)
    for (before, stepped, skipped), scale, steps in found:
        assert scale == 65536 / 2
        assert steps == 2
        assert not any(torch.equal(stepped[name], value) for name, value in before.items())
        unmoved = {name for name, value in stepped.items() if torch.equal(skipped[name], value)}
        assert unmoved == {name for name in stepped if name.startswith(("0.", "1."))}
