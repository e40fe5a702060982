"""Weights of convolutions stored channels last: equal losses, checkpoints of either layout, optimizers, messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Formation, PyTorchDDPTrainer
from phalanx.config import resolve
from phalanx.errors import ConfigError, ModelError
from phalanx.strategies.optimizer_state import load_optimizer_state, optimizer_state
from phalanx.zoo.models.resnet import resnet


class Convolutions(nn.Module):
    """Kernels of 3x3 and 1x1, and a head that takes the activations as they lie in memory, or not."""

    def __init__(self, *, views: bool = False) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.head = nn.Linear(4 * 8 * 8, 4)
        self.views = views

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.narrow(torch.relu(self.wide(images)))
        return self.head(hidden.view(len(images), -1) if self.views else hidden.flatten(1))


def images(samples: int = 32) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(5)
    pixels = torch.randn(samples, 3, 8, 8, dtype=torch.float64, generator=draw)
    return DataLoader(TensorDataset(pixels, torch.randint(4, (samples,), generator=draw)), batch_size=8)


def model_of(**options: Any) -> Convolutions:
    torch.manual_seed(0)
    return Convolutions(**options).double()


def trained(tmp_path: Any, model: nn.Module, **settings: Any) -> list[float]:
    """Train, and return the loss of each step."""
    losses: list[float] = []
    options = {"device": "cpu", "epochs": 2, "learning_rate": 1e-2, "run_dir": tmp_path, "verbosity": "quiet"}
    trainer = PyTorchDDPTrainer(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        callbacks=[lambda info: losses.append(float(info.loss_tensor))],
        **{**options, **settings},
    )
    trainer.fit(images())
    return losses


def is_last(weight: Tensor) -> bool:
    return weight.stride()[1] == 1


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adamw8bit"])
def test_losses_are_equal_in_both_layouts(tmp_path, optimizer):
    plain, last = model_of(), model_of()
    expected = trained(tmp_path / "plain", plain, optimizer=optimizer, ema_decay=0.9)
    found = trained(tmp_path / "last", last, optimizer=optimizer, ema_decay=0.9, channels_last=True)
    assert found == pytest.approx(expected, abs=1e-12)
    assert [is_last(last.wide.weight), is_last(last.narrow.weight), is_last(plain.wide.weight)] == [True, True, False]
    assert last.narrow.weight.stride() == (8, 1, 8, 8)
    for ours, theirs in zip(last.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("before", "after"), [(True, True), (False, True), (True, False)], ids=str)
def test_a_checkpoint_of_either_layout_is_resumed_in_either(tmp_path, before, after):
    expected = trained(tmp_path / "whole", model_of(), ema_decay=0.9)
    options = {"ema_decay": 0.9, "checkpoint_dir": tmp_path / "checkpoints", "checkpoint_frequency": "1 step"}
    trained(tmp_path / "first", model_of(), channels_last=before, max_steps=5, **options)
    again = model_of()
    found = trained(
        tmp_path / "second", again, channels_last=after, resume_from_checkpoint=tmp_path / "checkpoints", **options
    )
    assert found == pytest.approx(expected[5:], abs=1e-12)
    assert is_last(again.wide.weight) is after


def test_an_optimizer_that_has_taken_steps_keeps_its_parameters_and_moments():
    """Fused kernels of the CPU would read moments in another order than weights, without a message."""
    results = []
    for channels_last in (False, True):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        step(model, optimizer)
        with Formation(device="cpu", channels_last=channels_last) as formation:
            prepared, bound = formation.prepare(model, optimizer)
            for _ in range(3):
                step(prepared, bound, formation.backward)
        results.append(model.wide.weight.detach())
        assert is_last(optimizer.state[model.wide.weight]["exp_avg"]) is channels_last
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Any = Tensor.backward) -> None:
    pixels, labels = next(iter(images()))
    optimizer.zero_grad()
    backward(nn.functional.cross_entropy(model(pixels), labels))
    optimizer.step()


def test_states_that_come_contiguous_get_the_layout_of_their_parameters():
    model = model_of().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step(model, optimizer)
    state = optimizer_state(model, optimizer)
    expected = optimizer.state[model.wide.weight]["exp_avg"].clone()
    state["state"]["wide.weight"]["exp_avg"] = expected.contiguous()
    load_optimizer_state(model, optimizer, state)
    loaded = optimizer.state[model.wide.weight]["exp_avg"]
    assert loaded.stride() == model.wide.weight.stride()
    assert torch.equal(loaded, expected)


def test_volumes_are_stored_channels_last_too():
    model = nn.Conv3d(2, 4, 3)
    with Formation(device="cpu", channels_last=True) as formation:
        formation.prepare(model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last_3d)


def test_a_model_without_convolutions_gets_a_note():
    with Formation(device="cpu", channels_last=True) as formation:
        formation.prepare(nn.Linear(4, 4))
        assert formation.notes == ["channels_last: no weight of the model has 4 or 5 dimensions, so it changes nothing"]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_view_that_fails_says_what_to_write(tmp_path, compiled):
    with pytest.raises(ModelError, match=r"x\.reshape\(\.\.\.\) or x\.flatten\(1\)") as caught:
        trained(tmp_path, model_of(views=True), channels_last=True, compile=compiled)
    assert isinstance(caught.value.__cause__, RuntimeError)
    if not compiled:
        assert len(trained(tmp_path / "plain", model_of(views=True))) == 8


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"strategy": "fsdp"}, "strategy = 'fsdp', which needs contiguous weights: write strategy = 'ddp'"),
        ({"zero_stage": 2}, "strategy = 'fsdp'"),
        ({"strategy": "deepspeed"}, "strategy = 'deepspeed'"),
        ({"backend": "horovod"}, "strategy = 'horovod'"),
        ({"pipeline_parallel": 2, "num_workers": 2}, "pipeline_parallel = 2"),
        ({"backend": "tensorflow"}, "leave channels_last out"),
    ],
    ids=str,
)
def test_strategies_with_contiguous_weights_refuse_it(given, why):
    with pytest.raises(ConfigError, match=why):
        resolve({**given, "channels_last": True})


def test_the_name_in_torch_is_understood():
    with pytest.raises(ConfigError, match="channels_last"):
        resolve({"memory_format": True})


def test_the_residual_network_keeps_the_layout_to_its_head():
    model = resnet().to(memory_format=torch.channels_last)
    seen: list[bool] = []
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(lambda _, given, made: seen.append(is_last(made)))
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    assert seen
    assert all(seen)
    assert is_last(model.embed.conv.weight.grad)
