"""Synchronised batch norm: losses, weights and running statistics of several ranks equal those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Formation
from phalanx.config import DistributedConfig, resolve
from phalanx.errors import ConfigError
from phalanx.loop.sync_norm import NormRanks, SyncedBatchNorm, synchronise
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.run.weights import whole_weights
from phalanx.zoo.models.resnet import resnet


class Norms(nn.Module):
    """Norms of two kinds: after a convolution, and without weights after a product."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.plain, self.head = nn.BatchNorm1d(4, affine=False, momentum=None), nn.Linear(4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.convolution(images)))
        return self.head(self.plain(hidden.mean(dim=(2, 3))))


def make_data(samples: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randn(samples, 3, 5, 5, generator=draw, dtype=torch.float64) * 3 + 20
    return TensorDataset(pixels, torch.randint(3, (samples,), generator=draw))


def train(folder: str, samples: int, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of the global batches and the weights, with the running statistics."""
    torch.manual_seed(3)
    model = Norms().double()
    config = DistributedConfig(
        device="cpu", progress=False, optimizer="sgd", epochs=2, learning_rate=0.05, log_every_n_steps=1, **settings
    )
    task = TrainTask(model, DataLoader(make_data(samples), shuffle=True), loss_fn=nn.CrossEntropyLoss())
    history = Job("fit", task, config, Path(folder)).run().history
    assert history is not None
    losses = [record["loss"] for record in history.steps]
    weights = whole_weights(model)
    assert weights is not None
    assert [type(model.norm), type(model.plain)] == [nn.BatchNorm2d, nn.BatchNorm1d], "they are what they were"
    return losses, {name: value.clone() for name, value in weights.items()}


@pytest.mark.parametrize(
    ("strategy", "world_size", "samples"),
    [("ddp", 2, 24), ("ring", 2, 27), ("fsdp", 2, 27), ("ddp", 4, 34)],
    ids=["even", "ragged", "ragged under fsdp", "two placeholders"],
)
def test_ranks_train_as_one_process_with_the_global_batch(ranks, tmp_path, strategy, world_size, samples):
    losses, expected = train(str(tmp_path / "one"), samples, batch_size=8)
    found = ranks(
        train_on_ranks, str(tmp_path / "ranks"), samples, strategy, 8 // world_size, True, world_size=world_size
    )
    for own_losses, own in found:
        assert own_losses == pytest.approx(losses, abs=1e-10)
        for name, value in expected.items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=1e-10)


def train_on_ranks(folder: str, samples: int, strategy: str, batch_size: int, synchronised: bool) -> Any:
    return train(folder, samples, strategy=strategy, batch_size=batch_size, sync_batch_norm=synchronised)


def test_without_it_ranks_normalise_by_their_own_samples(ranks, tmp_path):
    losses, _ = train(str(tmp_path / "one"), 24, batch_size=8)
    (found, _), _ = ranks(train_on_ranks, str(tmp_path / "ranks"), 24, "ddp", 4, False, world_size=2)
    assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) > 1e-4


def gradients_of_one_rank() -> None:
    """The function's own gradients against autograd's through torch's batch norm, also in bf16."""
    import torch.distributed as dist

    torch.manual_seed(0)
    inputs = torch.randn(6, 3, 4, dtype=torch.float64, requires_grad=True)
    theirs, ours = nn.BatchNorm1d(3).double(), nn.Sequential(nn.BatchNorm1d(3).double())
    layers, undo = synchronise(ours, NormRanks(None, dist.get_world_size(), lambda: False))
    assert layers == 1
    assert isinstance(ours[0], SyncedBatchNorm)
    weight = torch.randn(6, 3, 4, dtype=torch.float64)
    results = []
    for norm in (theirs, ours):
        inputs.grad = None
        output = norm(inputs)
        (output * weight).sum().backward()
        results.append([output, inputs.grad, *(p.grad for p in norm.parameters()), *norm.buffers()])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    half = ours(torch.randn(6, 3, dtype=torch.bfloat16, requires_grad=True))
    half.sum().backward()
    assert half.dtype == torch.bfloat16
    undo()
    assert type(ours[0]) is nn.BatchNorm1d


def test_gradients_are_those_of_batch_norm(ranks):
    ranks(gradients_of_one_rank, world_size=1)


def gradients_of_a_compiled_model() -> None:
    """The layers are left out of the graphs; traced into, some norms would get no gradient."""
    import torch.distributed as dist

    torch.manual_seed(0)
    model, images = resnet().double(), torch.randn(4, 1, 8, 8, dtype=torch.float64)
    expected = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
    _, undo = synchronise(model, NormRanks(None, dist.get_world_size(), lambda: False))
    model.compile(backend="aot_eager")
    model(images).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-9)
    undo()


def test_a_compiled_model_has_all_its_gradients(ranks):
    ranks(gradients_of_a_compiled_model, world_size=1)


def notes_of(model_has_norms: bool) -> list[str]:
    model = resnet() if model_has_norms else nn.Linear(4, 2)
    with Formation(device="cpu", sync_batch_norm=True) as formation:
        formation.prepare(model)
        return [note for note in formation.notes if "sync_batch_norm" in note]


def test_a_model_without_batch_norm_is_noted(ranks):
    assert ranks(notes_of, False, world_size=2)[0] == [
        "sync_batch_norm: the model has no BatchNorm layer, so it changes nothing"
    ]
    assert ranks(notes_of, True, world_size=2) == [[], []]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel": 2, "num_workers": 2}, "with tensor_parallel = 2, where ranks hold parts of a model"),
        ({"pipeline_parallel": 2, "num_workers": 2}, "with pipeline_parallel = 2"),
        ({"strategy": "local-sgd"}, "with strategy = 'local-sgd', whose ranks take their own steps"),
        ({"strategy": "ring", "fixed_order": True}, "with fixed_order"),
    ],
)
def test_what_it_does_not_go_with_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve({"sync_batch_norm": True, **settings})
