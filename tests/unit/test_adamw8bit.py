"""AdamW with 8-bit states: learns like AdamW, keeps its state, and needs a quarter of the memory for it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import PyTorchDDPTrainer
from phalanx.loop.adamw8bit import AdamW8bit, rounded_either_way


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


@pytest.fixture
def batch():
    inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    return inputs, torch.sin(inputs.roll(1, 1) + inputs)


def train(model, optimizer, batch, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
    return loss.item()


def test_it_learns_like_adamw(model, batch):
    other = copy.deepcopy(model)
    usual = train(other, torch.optim.AdamW(other.parameters(), lr=2e-3), batch, 60)
    assert train(model, AdamW8bit(model.parameters(), lr=2e-3), batch, 60) == pytest.approx(usual, rel=0.1)


def test_the_first_step_is_that_of_adamw(model, batch):
    """Nothing was rounded yet."""
    other = copy.deepcopy(model)
    train(other, torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1), batch, 1)
    train(model, AdamW8bit(model.parameters(), lr=1e-2, weight_decay=0.1), batch, 1)
    for found, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_states_of_large_parameters_need_two_bytes(model, batch):
    optimizer = AdamW8bit(model.parameters())
    train(model, optimizer, batch, 1)
    weight = model[0].weight
    size = sum(value.nbytes for name, value in optimizer.state[weight].items() if name != "step")
    assert size == weight.numel() * 2 + 2 * 4 * weight.numel() // 64, "two bytes, and a scale for each block of 64"
    assert optimizer.state[model[0].bias]["exp_avg"].dtype is torch.float32


def test_a_loaded_state_goes_on_with_equal_bits(model, batch):
    optimizer = AdamW8bit(model.parameters(), lr=1e-2)
    train(model, optimizer, batch, 3)
    other = copy.deepcopy(model)
    again = AdamW8bit(other.parameters(), lr=1e-2)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, batch, 3) == train(other, again, batch, 3)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_rounding_either_way_is_right_on_average_and_equal_on_replicas():
    values = torch.full((100_000,), 1.03)  # between 1 and 1.125, where the nearest is always 1
    rounded = rounded_either_way(values, 7)
    assert set(rounded.tolist()) == {1.0, 1.125}
    assert rounded.mean().item() == pytest.approx(1.03, abs=0.002)
    assert torch.equal(rounded, rounded_either_way(values, 7))
    assert not torch.equal(rounded, rounded_either_way(values, 8))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_is_resumed_with_equal_bits(model, batch, tmp_path, strategy):
    def fit(steps: int, folder: str, **settings):
        trained = copy.deepcopy(model)
        trainer = PyTorchDDPTrainer(
            trained,
            loss_fn=F.mse_loss,
            device="cpu",
            strategy=strategy,
            optimizer="adamw8bit",
            learning_rate=1e-2,
            batch_size=64,
            max_steps=steps,
            checkpoint_dir=tmp_path / folder,
            **settings,
        )
        trainer.fit(TensorDataset(*batch), run_dir=tmp_path / f"{folder}-{steps}")
        return trained

    whole = fit(6, "whole")
    fit(3, "parts")
    resumed = fit(6, "parts", resume_from_checkpoint=True)
    assert all(torch.equal(one, two) for one, two in zip(whole.parameters(), resumed.parameters(), strict=True))
