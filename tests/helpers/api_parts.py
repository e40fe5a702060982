"""Models, data and callbacks that tests hand to ranks; apart from the tests, so that ranks import no pytest."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from phalanx import Callback


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 3)


def make_normed() -> nn.Module:
    """A model with buffers that every rank fills from its own samples."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def make_data(samples: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


def make_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def cross_entropy(output, target):
    return F.cross_entropy(output, target)


def failing_loss(output, target):
    raise ValueError("no loss today")


def top_two(output, target):
    return (output.topk(2, dim=1).indices == target[:, None]).any(1).double()


def mean_margin(output, target):
    return output.max(1).values.mean()


class ReturnsLoss(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 3)

    def forward(self, x, y):
        return F.cross_entropy(self.layer(x), y)


class HuggingFaceStyle(ReturnsLoss):
    def forward(self, inputs, labels=None):
        logits = self.layer(inputs)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


class DictData(Dataset):
    def __init__(self, samples=24):
        self.data = make_data(samples)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, place):
        x, y = self.data[place]
        return {"inputs": x, "labels": y}


class Stream(IterableDataset):
    """Ends with fewer samples than a global batch, so that the ranks have different numbers of batches."""

    def __init__(self, samples):
        self.data = make_data(samples)

    def __iter__(self):
        return (self.data[place] for place in range(len(self.data)))


class HoldsLock(Dataset):
    def __init__(self):
        self.lock = threading.Lock()

    def __len__(self):
        return 8

    def __getitem__(self, place):
        return torch.zeros(4), 0


class Diary(Callback):
    """Writes what it receives to a file: the ranks are other processes."""

    def __init__(self, path):
        self.path = path

    def _note(self, trainer, text):
        if trainer.formation.is_main:
            with open(self.path, "a") as file:
                file.write(text + "\n")

    def on_fit_start(self, trainer):
        self._note(trainer, "start")

    def on_step_end(self, trainer, info):
        self._note(trainer, f"step {info.step} epoch {info.epoch} samples {info.samples} {info.loss > 0}")

    def on_epoch_end(self, trainer, epoch, metrics):
        self._note(trainer, f"epoch {epoch} {sorted(metrics)}")

    def on_checkpoint(self, trainer, path):
        self._note(trainer, f"saved {Path(path).name}")

    def on_fit_end(self, trainer):
        self._note(trainer, "end")


class StopAfter(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, info):
        if info.step == self.step:
            trainer.request_stop()


class ShardedStream(IterableDataset):
    """Yields 0, 1, 2, ... and knows how to cut itself."""

    def __init__(self, length: int, step: int = 1, first: int = 0) -> None:
        self.length, self.step, self.first = length, step, first

    def shard(self, num_shards: int, index: int) -> ShardedStream:
        return ShardedStream(self.length, num_shards, index)

    def __iter__(self):
        for number in range(self.first, self.length, self.step):
            yield torch.tensor([float(number)]), 0


class RaggedBatches(Dataset):
    """A map-style data set whose items are whole batches of different sizes."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int):
        return torch.full((index + 1, 1), float(index)), torch.zeros(index + 1)


class SumOfSamples(Callback):
    def __init__(self, path):
        self.path, self.samples = path, 0

    def on_step_end(self, trainer, info):
        self.samples += info.samples

    def on_fit_end(self, trainer):
        if trainer.formation.is_main:
            Path(self.path).write_text(str(self.samples))
