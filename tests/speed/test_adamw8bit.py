"""AdamW with 8-bit states: learns like AdamW, keeps its state, and needs a quarter of the memory for it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import PyTorchDDPTrainer
from phalanx.speed import adamw8bit
from phalanx.speed.adamw8bit import AdamW8bit
from phalanx.strategies.optimizer_state import match_layouts


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
    assert size == weight.numel() * 2 + 2 * 4 * weight.numel() // 32, "two bytes, and a scale for each block of 32"
    assert optimizer.state[model[0].bias]["exp_avg"].dtype is torch.float32


def test_a_loaded_state_goes_on_with_equal_bits(model, batch):
    optimizer = AdamW8bit(model.parameters(), lr=1e-2)
    train(model, optimizer, batch, 3)
    other = copy.deepcopy(model)
    again = AdamW8bit(other.parameters(), lr=1e-2)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    types = {value.dtype for state in again.state.values() for value in state.values()}
    assert {torch.int8, torch.float8_e4m3fn} <= types
    assert train(model, optimizer, batch, 3) == train(other, again, batch, 3)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_states_are_rounded_up_or_down_by_a_chance_of_step_and_place():
    values = torch.full((64, 1024), 68.0)  # a square between those of 64 and 72: not in their middle
    (_, chance), (_, later) = adamw8bit._chances(values, 0, 7), adamw8bit._chances(values, 0, 8)
    rounded = adamw8bit._rounded(values, chance)
    assert set(rounded.unique().tolist()) == {64.0, 72.0}
    assert rounded.square().mean().sqrt().item() == pytest.approx(68.0, rel=5e-4)
    assert not torch.equal(rounded, adamw8bit._rounded(values, later))
    assert torch.equal(chance[32:], adamw8bit._chances(values[32:], 32 * 1024, 7)[1]), "some values at a time"
    for share in (1.0, 0.3, 1e-3, 1e-6):
        levels = adamw8bit._level(torch.full((64, 1024), share), chance)
        assert (levels / 127).pow(4).mean().item() == pytest.approx(share, rel=0.02)


def test_an_average_follows_a_gradient_that_stays():
    """By the nearest value it would stop at up to a half of it: a tenth of what is missing would be rounded away."""
    torch.manual_seed(0)
    gradient = torch.rand(64, 256) + 0.05
    weight = nn.Parameter(torch.zeros(64, 256))
    optimizer = AdamW8bit([weight], lr=1e-3, weight_decay=0.0)
    weight.grad = 0.01 * gradient
    for _ in range(30):
        optimizer.step()
    weight.grad = gradient
    for _ in range(60):
        optimizer.step()
    state = optimizer.state[weight]
    average = (state["exp_avg_level"].float() / 127).pow(4).view(64, 8, 32) * state["exp_avg_level_scale"][..., None]
    assert (average.view(64, 256) / gradient).mean().item() == pytest.approx(1.0, abs=0.01)


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


@pytest.mark.parametrize("decades", [2, 5, 7])
def test_gradients_of_very_different_sizes_in_a_block_take_steps_of_one_size(decades):
    """A root that was rounded to zero would be a step of m / eps."""
    weight = nn.Parameter(torch.zeros(16, 256))
    size = 10 ** -torch.linspace(0, decades, 256)
    optimizer = AdamW8bit([weight], lr=1e-3, weight_decay=0.0)
    for step in range(200):
        weight.grad = size * torch.randn(16, 256, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    assert weight.abs().max() < 0.15, "at most 200 steps of 0.001, of changing sign"


def test_parameters_that_are_not_contiguous_or_in_bf16_are_trained():
    convolution = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
    half = nn.Linear(64, 256).bfloat16()
    optimizer = AdamW8bit([*convolution.parameters(), *half.parameters()], lr=1e-2)
    before = [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]
    convolution(torch.randn(2, 64, 8, 8)).square().mean().backward()
    half(torch.randn(2, 64, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(one, two) for one, two in zip(before, optimizer.param_groups[0]["params"], strict=True))
    again = AdamW8bit([*convolution.parameters(), *half.parameters()], lr=1e-2)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name in ("exp_avg_level_scale", "exp_avg_root_scale"):
        assert torch.equal(again.state[half.weight][name], optimizer.state[half.weight][name])


def test_weights_of_either_layout_take_the_same_steps_and_each_others_states():
    torch.manual_seed(0)
    plain = nn.Conv2d(64, 64, 3)
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    optimizers = [AdamW8bit(each.parameters(), lr=1e-2) for each in (plain, last)]
    for step in range(4):
        gradient = torch.randn(plain.weight.shape, generator=torch.Generator().manual_seed(step))
        for each, optimizer in zip((plain, last), optimizers, strict=True):
            each.weight.grad = gradient.clone().contiguous(
                memory_format=torch.channels_last if each is last else torch.contiguous_format
            )
            optimizer.step()
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        match_layouts(optimizers[1])
    assert last.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain.weight, last.weight)
    assert optimizers[1].state[last.weight]["exp_avg_level"].dtype is torch.int8


def test_a_state_of_another_optimizer_is_refused(model, batch):
    usual = torch.optim.AdamW(model.parameters())
    train(model, usual, batch, 1)
    with pytest.raises(ValueError, match="not a state of AdamW8bit: a parameter has no exp_avg_level"):
        AdamW8bit(model.parameters()).load_state_dict(usual.state_dict())


@pytest.mark.parametrize("layout", [{"strategy": "fsdp"}, {"tensor_parallel": 2}], ids=["odd shards", "split rows"])
def test_split_models_are_trained_and_saved(ranks, tmp_path, layout):
    def run() -> float:
        from phalanx.zoo.models.gpt import gpt  # in the rank

        torch.manual_seed(0)
        tokens = torch.randint(259, (8, 65))
        trainer = PyTorchDDPTrainer(
            gpt(vocab_size=259, hidden=192, heads=2, layers=1),
            device="cpu",
            optimizer="adamw8bit",
            batch_size=4,
            max_steps=2,
            checkpoint_dir=tmp_path / "saved",
            checkpoint_frequency="1 steps",
            **layout,
        )
        data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        return trainer.fit(data, run_dir=tmp_path / "run").epochs[-1].train_loss

    assert all(loss < 6 for loss in ranks(run, world_size=2))
    assert (tmp_path / "saved" / "step-00000002").is_dir()


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": -0.1}], ids=str
)
def test_numbers_that_make_no_sense_are_refused(model, wrong):
    with pytest.raises(ValueError, match="none may be negative, and betas are below 1"):
        AdamW8bit(model.parameters(), **wrong)
