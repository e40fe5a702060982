"""ema_decay: the average over the steps, whole or sharded, equals the one computed by hand, also after a resumption."""

from __future__ import annotations

import pytest
import torch
from layouts import assert_same
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import Callback
from phalanx.checkpoint import find_best, list_checkpoints
from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.loop.ema import WeightAverage
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.run.weights import load_weights, whole_weights
from phalanx.strategies.base import whole

DECAY = 0.8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 10)
        self.narrow = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ByHand(Callback):
    """Averages whole weights after every step."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_fit_start(self, trainer):
        self.average = self._weights(trainer)

    def on_step_end(self, trainer, info):
        decay = min(DECAY, (1 + info.step) / (10 + info.step))
        for name, value in self._weights(trainer).items():
            self.average[name].lerp_(value, 1 - decay)

    def _weights(self, trainer):
        named = trainer.formation.unwrap(trainer.model).named_parameters()
        return {name: whole(value.detach()).clone() for name, value in named}


def data(samples: int) -> TensorDataset:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def train(folder: str, dtype: torch.dtype = torch.float64, decay: float | None = DECAY, **settings):
    """Return the weights after a run, those averaged by hand, the history, and the loss of the result."""
    torch.manual_seed(3)
    model, by_hand = Net().to(dtype), ByHand()
    config = DistributedConfig(
        device="cpu", progress=False, run_dir=folder, ema_decay=decay, **{"learning_rate": 0.05, **settings}
    )
    history = Job("fit", TrainTask(model, data(48), data(20), callbacks=[by_hand]), config).run()
    again = Job("evaluate", TrainTask(model, val=data(20)), config).run().metrics["loss"]
    return whole_weights(model), by_hand.average, history.history, again


LAYOUTS = [
    {"strategy": "ddp", "batch_size": 8},
    {"strategy": "fsdp", "batch_size": 8},
    {"strategy": "fsdp", "sharding": "grad-op", "batch_size": 8},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_result_and_the_evaluation_are_those_of_the_average(ranks, tmp_path, layout):
    expected = ranks(lambda: train(str(tmp_path / "a"), batch_size=16, epochs=3), world_size=1)[0]
    found = ranks(lambda: train(str(tmp_path / "b"), epochs=3, **layout), world_size=2)
    assert_same(found[0][0], found[0][1], 1e-12)
    assert_same(found[1][0], expected[0], 1e-10)
    for _, _, history, loss in found:
        assert history.epochs[-1].val["loss"] == pytest.approx(loss, rel=1e-12)
        losses = [record.val["loss"] for record in history.epochs]
        assert losses == pytest.approx([record.val["loss"] for record in expected[2].epochs], rel=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_stop_and_resume_gives_the_same_bits(ranks, tmp_path, layout):
    place = {"checkpoint_dir": str(tmp_path / "ckpt")}
    expected = ranks(lambda: train(str(tmp_path / "a"), epochs=3, **layout), world_size=2)[0]
    ranks(lambda: train(str(tmp_path / "b"), max_steps=4, **layout, **place), world_size=2)
    rest = {**layout, **place, "resume_from_checkpoint": True}
    found = ranks(lambda: train(str(tmp_path / "c"), epochs=3, **rest), world_size=2)[0]
    assert_same(found[0], expected[0], 0.0)
    best = expected[2].best_step
    assert (find_best(tmp_path / "ckpt").step, found[2].best_step) == (best, best)


def test_the_weights_of_a_checkpoint_are_the_average(ranks, tmp_path):
    place = {"checkpoint_dir": str(tmp_path / "ckpt")}
    weights = ranks(lambda: train(str(tmp_path / "a"), batch_size=8, strategy="fsdp", **place), world_size=2)[0][0]
    model = Net().double()
    load_weights(model, list_checkpoints(tmp_path / "ckpt")[0].path)
    assert_same(model.state_dict(), weights, 0.0)
    plain = {"batch_size": 16, "resume_from_checkpoint": True, "epochs": 2, "learning_rate": 1e-30, **place}
    found = ranks(lambda: train(str(tmp_path / "b"), decay=None, **plain), world_size=1)[0]
    assert_same(found[0], weights, 1e-12)


def test_weights_of_low_precision_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"which is too low: layers\.0\.wide\.weight is torch\.bfloat16"):
        train(str(tmp_path), torch.bfloat16, batch_size=8)


def test_what_is_unfrozen_or_put_in_the_place_of_a_buffer_is_averaged_too():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model.register_buffer("seen", torch.zeros(1))
    model[0].requires_grad_(False)
    average = WeightAverage(model, 0.5)
    model[0].requires_grad_(True)
    before = model[0].weight.item()
    average.follow()
    model.seen = torch.ones(1)  # another tensor
    with torch.no_grad():
        model[0].weight += 1.0
    average.update(100)
    assert float(average.other["seen"]) == 0.5
    assert float(average.other["0.weight"]) == pytest.approx(before + 0.5)
    with average.applied():
        assert float(model.seen) == 0.5
    assert float(model.seen) == 1.0
