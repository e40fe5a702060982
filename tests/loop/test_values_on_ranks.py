"""Logged and gathered values over several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import Formation
from phalanx.errors import UsageError
from phalanx.observe.events import LOGGED, MetricsReported, StepDone, from_json

SAMPLES = 53


def gathered() -> tuple:
    data = TensorDataset(torch.arange(SAMPLES), torch.arange(SAMPLES) * 10)
    with Formation(batch_size=4, device="cpu") as f:
        numbers, labels = [], []
        for inputs, targets in f.prepare_loader(data, training=False):
            first, second = f.gather_for_metrics((inputs, targets.float()))
            numbers += first.tolist()
            labels += second.tolist()
        ragged = f.gather({"a": torch.full((f.rank + 1, 2), f.rank), "b": 2.0 * f.rank})
        try:
            f.gather(torch.zeros(2, f.rank + 1))
        except UsageError as error:
            wrong = str(error)
        return numbers, labels, ragged["a"].tolist(), ragged["b"].tolist(), wrong


def test_each_sample_is_gathered_once(ranks):
    for numbers, labels, ragged, alone, wrong in ranks(gathered, world_size=3):
        assert sorted(numbers) == list(range(SAMPLES))
        assert labels == [10.0 * number for number in numbers]
        assert ragged == [[0, 0], [1, 1], [1, 1], [2, 2], [2, 2], [2, 2]]
        assert alone == [0.0, 2.0, 4.0]
        assert "differ between the ranks in more than their number of rows" in wrong


def looped(folder: str, strategy: str) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    with Formation(batch_size=4, device="cpu", run_dir=folder, log_every_n_steps=1, strategy=strategy) as f:
        model = nn.Linear(4, 1)
        model, optimizer, loader = f.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        for inputs, targets in loader:
            loss = (model(inputs) - targets).square().mean()
            f.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            f.log({"mean": loss}, reduce="mean")
            f.log({"highest": f.rank}, reduce="max")
            if f.is_main:
                f.log({"own": f.rank})


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "auto"])
def test_a_loop_on_two_ranks_reports_the_loss_of_the_global_batch(ranks, tmp_path, strategy):
    ranks(looped, str(tmp_path / "run"), strategy, world_size=2)
    events = [from_json(line) for line in Path(tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    losses = {e.step: e.loss for e in events if isinstance(e, StepDone)}
    points = {e.step: e.values for e in events if isinstance(e, MetricsReported) and e.split == LOGGED}
    assert sorted(losses) == sorted(points) == list(range(1, 9))
    for step, loss in losses.items():
        assert points[step]["mean"] == pytest.approx(loss, rel=1e-6)
        assert (points[step]["highest"], points[step]["own"]) == (1.0, 0.0)
