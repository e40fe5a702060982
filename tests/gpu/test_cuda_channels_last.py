"""On a GPU: convolutions stored channels last compute so from contiguous batches, and train and resume as others do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Formation, PyTorchDDPTrainer
from phalanx.zoo.models.resnet import ResNet, resnet

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _compile_here():
    """Compile in this process: Inductor's worker processes outlive a test."""
    with inductor.patch(compile_threads=1):
        yield


def model_of() -> ResNet:
    torch.manual_seed(0)
    return resnet("debug", channels=3, bottleneck=True)


def images() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randn(128, 3, 32, 32, generator=draw)
    return DataLoader(TensorDataset(pixels, torch.randint(10, (128,), generator=draw)), batch_size=16)


def trained(run_dir: Any, **settings: Any) -> list[float]:
    losses: list[float] = []
    trainer = PyTorchDDPTrainer(
        model_of(),
        loss_fn=nn.CrossEntropyLoss(),
        callbacks=[lambda info: losses.append(float(info.loss_tensor))],
        **{"device": DEVICE, "epochs": 2, "run_dir": run_dir, "verbosity": "quiet", **settings},
    )
    trainer.fit(images())
    return losses


def test_convolutions_follow_their_weights():
    """Batches stay contiguous: every convolution gives and gets activations in the layout of the weights."""
    model, seen = model_of(), []
    with Formation(device=DEVICE, channels_last=True, mixed_precision="bf16") as formation:
        prepared = formation.prepare(model)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(lambda _, given, made: seen.append(made.stride()[1] == 1))
        with formation.autocast():
            loss = prepared(torch.randn(4, 3, 32, 32, device=formation.device)).sum()
        formation.backward(loss)
    assert seen
    assert all(seen)


@pytest.mark.parametrize("settings", [{}, {"capture": False}, {"compile": True}, {"memory": True}], ids=str)
def test_losses_are_those_of_contiguous_weights(tmp_path, settings):
    expected = trained(tmp_path / "plain", mixed_precision="bf16", **settings)
    found = trained(tmp_path / "last", mixed_precision="bf16", channels_last=True, **settings)
    assert len(found) == 16
    assert found == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("before", [False, True])
def test_the_fused_optimizer_continues_from_a_checkpoint_of_the_other_layout(tmp_path, before):
    expected = trained(tmp_path / "whole")
    options = {"checkpoint_dir": tmp_path / "checkpoints", "checkpoint_frequency": "1 step"}
    trained(tmp_path / "first", channels_last=before, max_steps=5, **options)
    again = {"channels_last": not before, "resume_from_checkpoint": tmp_path / "checkpoints"}
    assert trained(tmp_path / "second", **again, **options) == pytest.approx(expected[5:], rel=0.03)
