"""Metrics over all samples together: each sample once and in order, with any number of ranks and ragged data."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from phalanx.config import DistributedConfig
from phalanx.errors import ModelError
from phalanx.loop.metrics import MetricSums
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.zoo.data.questions import questions
from phalanx.zoo.models import build

SAMPLES = 13
"""Neither the batches nor the ranks divide it."""


class Area:
    """The area under the ROC curve, and what it was computed from."""

    def __call__(self, output, target):
        return torch.stack([output[:, 0], target.float()], 1)

    def combine(self, rows, samples):
        assert samples.tolist() == list(range(SAMPLES))
        score, label = rows.unbind(1)
        pairs = score[label == 1][:, None] - score[label == 0][None]
        return {"auc": ((pairs > 0) + 0.5 * (pairs == 0)).mean(), "weighted": (score * samples).sum()}


def measure(strategy: str = "ddp") -> dict[str, float]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    config = DistributedConfig(device="cpu", progress=False, batch_size=2, strategy=strategy)
    metrics = {"area": Area(), "mean": lambda output, target: output[:, 0]}
    task = TrainTask(model, None, data, loss_fn=nn.CrossEntropyLoss(), metrics=metrics)
    return Job("evaluate", task, config).run().metrics


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_rows_of_all_ranks_are_combined_in_order(ranks, strategy):
    expected = measure()
    assert set(expected) == {"auc", "weighted", "mean", "loss"}
    first, *others = ranks(measure, strategy, world_size=3)
    assert first == pytest.approx(expected, rel=1e-5)
    assert all(found == first for found in others)


def answers(path: str) -> dict[str, float]:
    torch.manual_seed(0)
    data = questions("val", path, seq_len=48, stride=16)
    model = build("bert", task="qa", vocab_size=257)
    config = DistributedConfig(device="cpu", progress=False, batch_size=3)
    return Job("evaluate", TrainTask(model, None, data), config).run().metrics


def test_answers_over_windows_on_different_ranks(ranks, tmp_path, capsys):
    """The windows of a question are evaluated on several ranks; the data set itself says how it is scored."""
    context = "one two three four five six seven eight nine ten eleven twelve thirteen"
    qas = [
        {"id": word, "question": "which?", "answers": [{"text": word, "answer_start": context.index(word)}]}
        for word in context.split()[:7]
    ]
    path = tmp_path / "dev.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": context, "qas": qas}]}]}))
    (tmp_path / "train.json").write_text(path.read_text())
    qas[0]["answers"][0]["answer_start"] = 40
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": context, "qas": qas}]}]}))
    expected = answers(str(tmp_path))
    assert "1 of 7 questions have answers that are not at answer_start (one)" in capsys.readouterr().err
    assert set(expected) == {"exact", "f1", "loss"}
    for found in ranks(answers, str(tmp_path), world_size=2):
        assert found == pytest.approx(expected, rel=1e-5)


class Scored(Dataset):
    """A data set of the user that says how it is measured."""

    def __init__(self) -> None:
        self.metrics = {"largest": Area()}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index):
        return torch.full((4,), float(index)), index % 2


def test_metrics_of_a_data_set_are_used_where_none_are_given():
    config = DistributedConfig(device="cpu", progress=False, batch_size=4)
    task = TrainTask(nn.Linear(4, 2), None, Scored(), loss_fn=nn.CrossEntropyLoss())
    assert set(Job("evaluate", task, config).run().metrics) == {"auc", "weighted", "loss"}
    task.metrics = {"one": lambda output, target: torch.ones(len(target))}
    assert set(Job("evaluate", task, config).run().metrics) == {"one", "loss"}


def test_rows_of_another_shape_are_refused():
    class Flat(Area):
        def __call__(self, output, target):
            return output[:, 0]

    sums = MetricSums({"flat": Flat()}, torch.device("cpu"))
    with pytest.raises(ModelError, match=r"the metric 'flat', which combines rows, returned \[2\] for a batch of 2"):
        sums.add(None, torch.zeros(2, 2), torch.zeros(2), samples=2)
