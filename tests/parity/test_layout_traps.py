"""Layouts that could be silently wrong, hang, or fail on one rank only."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layouts import SHAPE, assert_same, make_tokens, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.config import DistributedConfig
from phalanx.errors import ModelError, UsageError
from phalanx.loop.formation import Formation
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.run.weights import whole_weights
from phalanx.strategies.base import local
from phalanx.zoo.models.gpt import gpt
from phalanx.zoo.models.llama import llama
from phalanx.zoo.models.moe import moe


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (gpt, {"strategy": "fsdp", "sharding": "hybrid", "shard_size": 2}),
        (moe, {"expert_parallel": 2}),
        (llama, {"pipeline_parallel": 2, "pipeline_schedule": "zero-bubble"}),
    ],
)
def test_replicas_of_a_meta_model_start_equal(ranks, build, settings):
    shape = {**SHAPE, "layers": 4}

    def run():
        with torch.device("meta"):
            model = build(**shape)
        with Formation(device="cpu", **settings) as formation:
            formation.prepare(model)
            place = formation.world.mesh.coordinates(formation.rank)
        held = {name: local(p.detach()).clone() for name, p in model.named_parameters()}
        return (place["pp"], 0 if "pipeline_parallel" in settings else place["dp_shard"]), held

    found: dict = {}
    for place, held in ranks(run, world_size=4):
        assert_same(held, found.setdefault(place, held), 0.0)
    assert len(found) == 2


def test_shards_of_a_meta_model_are_initialised_differently(ranks):
    def run():
        with torch.device("meta"):
            model = llama(**SHAPE)
        with Formation(device="cpu", tensor_parallel=2) as formation:
            formation.prepare(model)
        return local(model.layers[0].attention.query.weight.detach()).clone()

    first, second = ranks(run, world_size=2)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"pipeline_parallel": 2}, {}),
        ({"pipeline_parallel": 2}, {"pipeline_parallel": 2, "pipeline_schedule": "gpipe"}),
        ({"context_parallel": 2}, {"strategy": "fsdp"}),
        ({"tensor_parallel": 2}, {"strategy": "fsdp"}),
    ],
)
def test_a_model_keeps_its_layout(ranks, first, second):
    def run():
        model = llama(**SHAPE)
        with Formation(device="cpu", **first) as formation:
            formation.prepare(model)
        with Formation(device="cpu", **first) as formation:
            formation.prepare(model)  # the same layout again is allowed
        Formation(device="cpu", **second).prepare(model)

    with pytest.raises(UsageError, match=r"is laid out over the ranks as(.|\n)*new model"):
        ranks(run, world_size=2)


def train_two_targets(folder: str, **settings):
    """Targets in a nest, a loss of two parts, and a judge of the model's own in evaluation."""
    torch.manual_seed(3)
    x = torch.randn(16, 6, dtype=torch.float64)
    data = DataLoader([(row, (row[:2].sin(), row[2:4])) for row in x], batch_size=8)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    config = DistributedConfig(device="cpu", progress=False, batch_size=8, max_steps=2, log_every_n_steps=1, **settings)

    def loss(output, targets):
        return nn.functional.mse_loss(output, targets[0]) + nn.functional.l1_loss(output, targets[1])

    result = Job("fit", TrainTask(model, data, data, loss_fn=loss), config, Path(folder)).run()
    return whole_weights(model), result.history.epochs[-1].val


def test_targets_may_be_nested(ranks, tmp_path):
    weights, metrics = ranks(train_two_targets, str(tmp_path / "a"), world_size=1)[0]
    found = ranks(lambda: train_two_targets(str(tmp_path / "b"), pipeline_parallel=2, microbatches=4), world_size=2)
    for ours, measured in found:
        assert_same(ours, weights, 1e-10)
        assert measured == pytest.approx(metrics, rel=1e-10)


class Smoothed(nn.Sequential):
    """A model whose own loss is not the usual one."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None):
        scores = super().forward(x)
        return scores if targets is None else {"loss": self.loss_from_output(scores, targets), "logits": scores}

    def loss_from_output(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores, targets, label_smoothing=0.3)


def test_evaluation_uses_the_models_own_loss(ranks):
    def run(**settings):
        torch.manual_seed(3)
        data = TensorDataset(torch.randn(8, 6).double(), torch.arange(8) % 3)
        model = Smoothed(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        config = DistributedConfig(device="cpu", progress=False, batch_size=4, **settings)
        return Job("evaluate", TrainTask(model, None, data), config).run().metrics["loss"]

    (expected,) = ranks(run, world_size=1)
    assert ranks(lambda: run(pipeline_parallel=2), world_size=2) == pytest.approx([expected, expected], rel=1e-10)


def test_the_users_weight_keeps_its_value(ranks):
    def run():
        weight = torch.tensor(3.0, dtype=torch.float64)
        model = nn.Linear(2, 2).double()
        with Formation(device="cpu") as formation:
            wrapped, optimizer = formation.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            formation.backward(wrapped(torch.ones(1, 2).double()).sum(), weight=weight)
            optimizer.step()
        return weight.item()

    assert ranks(run, world_size=2) == [3.0, 3.0]


def test_measured_balance_together_with_split_layers(ranks, tmp_path):
    settings = {"pipeline_parallel": 2, "tensor_parallel": 2, "pipeline_cuts": "measured", "batch_size": 4}
    assert len(ranks(lambda: train(str(tmp_path), max_steps=1, **settings)[2], world_size=4)) == 4


def test_a_frozen_stage_is_clipped_with_the_others(ranks, tmp_path):
    """With adapters too: the last stage here has none."""

    def run(**settings):
        torch.manual_seed(3)
        model = llama(**SHAPE).double()
        model.embed.requires_grad_(False)
        model.layers[0].requires_grad_(False)
        return train(str(tmp_path / "a"), model=model, gradient_clipping=0.1, max_steps=2, batch_size=4, **settings)[0]

    expected = ranks(run, world_size=1)[0]
    split = {"pipeline_parallel": 2, "pipeline_cuts": "layers.1", "loss_weighting": "samples"}
    for ours in ranks(lambda: run(**split), world_size=2):
        assert_same(ours, expected, 1e-10)


def test_adapters_in_a_pipeline(ranks, tmp_path):
    def run(**settings):
        return train(str(tmp_path / "a"), max_steps=2, batch_size=4, lora_rank=2, **settings)[0]

    expected = ranks(run, world_size=1)[0]
    for ours in ranks(lambda: run(pipeline_parallel=2, pipeline_cuts="norm"), world_size=2):
        assert_same(ours, expected, 1e-10)


def test_groups_are_reused(ranks):
    def run():
        counts = []
        for _ in range(3):
            with Formation(device="cpu", pipeline_parallel=2, tensor_parallel=2) as formation:
                formation.prepare(llama(**SHAPE))
            counts.append(len(dist.distributed_c10d._world.pg_map))
        return counts

    for counts in ranks(run, world_size=4):
        assert counts[0] == counts[2]


@pytest.mark.parametrize("settings", [{"strategy": "fsdp"}, {"pipeline_parallel": 2}, {"tensor_parallel": 2}])
def test_an_optimizer_prepared_before_its_model(ranks, settings):
    def run():
        model = llama(**SHAPE)
        tokens, targets = make_tokens(8, 8, ignoring=False).tensors
        with Formation(device="cpu", **settings) as formation:
            optimizer, wrapped = formation.prepare(torch.optim.SGD(model.parameters(), lr=0.5), model)
            before = copy.deepcopy(whole_weights(model))
            formation.train_batch(wrapped, (tokens, targets))
            optimizer.step()
            after = whole_weights(model)
        return all(not torch.equal(before[name], after[name]) for name in before)

    assert all(ranks(run, world_size=2))


def test_models_that_cannot_be_cut_are_refused_with_a_reason(ranks, tmp_path):
    def run(name="llama", **settings):
        return ranks(lambda: train(str(tmp_path), name, max_steps=1, batch_size=4, **settings), world_size=2)

    with pytest.raises(ModelError, match=r"mixture of experts cannot be cut(.|\n)*expert_parallel"):
        run("moe", pipeline_parallel=2)
    with pytest.raises(UsageError, match="cannot cut the sequences of MoE"):
        run("moe", context_parallel=2)


def test_batch_norms_get_two_samples(ranks, tmp_path):
    def run(**settings):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
        data = TensorDataset(torch.randn(16, 6), torch.randn(16, 2))
        config = DistributedConfig(device="cpu", progress=False, batch_size=8, max_steps=2, **settings)
        task = TrainTask(model, data, data, loss_fn=nn.MSELoss())
        return Job("fit", task, config, tmp_path).run().history.total_time

    assert len(ranks(lambda: run(pipeline_parallel=2), world_size=2)) == 2
    with pytest.raises(UsageError, match=r"batch norms need them\n.*can be: 2, 4"):
        ranks(lambda: run(pipeline_parallel=2, microbatches=8), world_size=2)


def test_batch_norms_do_not_count_what_fills_a_short_batch(ranks, tmp_path):
    """Twelve samples by eight, in microbatches of two: the last four are not filled up."""
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))

    def run() -> torch.Tensor | None:
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 2))
        settings = {"batch_size": 8, "pipeline_parallel": 2, "microbatches": 4, "optimizer": "sgd"}
        config = DistributedConfig(device="cpu", progress=False, epochs=1, **settings)
        task = TrainTask(model, DataLoader(TensorDataset(x, torch.zeros(12, 2))), loss_fn=nn.MSELoss())
        Job("fit", task, config, tmp_path).run()
        return whole_weights(model)["0.running_mean"].clone()

    norm = nn.BatchNorm1d(6)
    for start in range(0, 12, 2):
        norm(x[start : start + 2])
    torch.testing.assert_close(ranks(run, world_size=2)[0], norm.running_mean)


def test_sampling_respects_the_longest_sequence():
    tokens = gpt("debug", seq_len=15).generate(torch.zeros(1, 10, dtype=torch.long), 12, multiple=2)
    assert tokens.shape == (1, 22)
