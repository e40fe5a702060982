"""Augmented images on ranks: one and two ranks see equal images and labels, also after a resume within an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.config import DistributedConfig
from phalanx.loop.metrics import cross_entropy
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.zoo.data.augment import Augment

STRONG = {"crop": "0:8 1:12", "randaugment": "2,9", "mixup": 0.2, "cutmix": 1.0, "erasing": 0.25, "classes": 4}


class Pooled(nn.Module):
    """A convolution for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.convolution(images.double())).mean(dim=(2, 3)))


def train(folder: str, batch_size: int, **settings: Any) -> tuple[list[float], dict[str, float]]:
    """Return the losses of the global batches and the last evaluation."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    images = torch.randint(256, (40, 3, 16, 16), dtype=torch.uint8, generator=draw)
    data = TensorDataset(images, torch.arange(40) % 4)
    config = DistributedConfig(
        device="cpu",
        progress=False,
        batch_size=batch_size,
        epochs=2,
        learning_rate=0.1,
        log_every_n_steps=1,
        checkpoint_dir=str(Path(folder) / "saved"),
        **settings,
    )
    task = TrainTask(
        Pooled().double(),
        DataLoader(data, shuffle=True),
        TensorDataset(images[:7], torch.arange(7) % 4),
        loss_fn=cross_entropy,
        augment=Augment(**STRONG),
    )
    history = Job("fit", task, config, Path(folder) / "run").run().history
    assert history is not None
    found = history.epochs[-1].val if history.epochs else {}
    return [record["loss"] for record in history.steps], found


def on_ranks(folder: str, settings: dict[str, Any]) -> tuple[list[float], dict[str, float]]:
    return train(folder, 4, strategy="ddp", **settings)


def test_two_ranks_see_the_images_of_one(ranks, tmp_path):
    losses, metrics = train(str(tmp_path / "one"), 8)
    assert len(losses) == 10
    for found, evaluated in ranks(on_ranks, str(tmp_path / "two"), {}, world_size=2):
        assert found == pytest.approx(losses, abs=1e-10)
        assert evaluated == pytest.approx(metrics, abs=1e-10)


def test_a_resumed_run_goes_on_with_the_same_images(tmp_path):
    losses, _ = train(str(tmp_path / "whole"), 8)
    again = {"checkpoint_frequency": "1 step"}
    train(str(tmp_path / "first"), 8, max_steps=3, **again)
    found, _ = train(str(tmp_path / "second"), 8, resume_from_checkpoint=str(tmp_path / "first" / "saved"), **again)
    assert found[-7:] == losses[3:], "equal bits"
