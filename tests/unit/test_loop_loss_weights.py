"""Steps and batches that count for nothing: no label in a step, a placeholder batch in a metric."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import PyTorchDDPTrainer
from phalanx.loop.metrics import MetricSums


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


def test_a_step_without_any_label_is_left_out_and_training_continues(tmp_path):
    labels = torch.tensor([[0, 1], [-100, -100], [2, -100], [1, 1]])
    data = TensorDataset(torch.tensor([[0, 1], [2, 3], [4, 0], [1, 2]]), labels)
    trainer = PyTorchDDPTrainer(
        Tagger(), device="cpu", batch_size=1, loss_weighting="tokens", epochs=2, log_every_n_steps=1, progress=False,
        run_dir=str(tmp_path),
    )  # fmt: skip
    history = trainer.fit(data)
    assert len(history.steps) == 6
    assert all(math.isfinite(epoch.train_loss) for epoch in history.epochs)


def test_a_metric_that_is_nan_on_a_placeholder_batch_counts_for_nothing():
    sums = MetricSums({"mean": lambda output, target: output.mean()}, torch.device("cpu"))
    sums.add(None, torch.tensor([2.0, 4.0]), None, samples=2)
    sums.add(None, torch.tensor([math.nan]), None, samples=0)
    assert sums.result() == {"mean": 3.0}
