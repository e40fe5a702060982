"""Lab 04: a trainer that is right and slow. Three bottlenecks are planted in it; do not change this file.

``torchrun --nproc-per-node 2 slow_trainer.py`` trains it; ``measure.py`` compares it with yours.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

WIDTH = 64
POOL = 32
"""Pixels that become one number."""
LAYERS = 10
CLASSES = 4


class Pictures:
    """Compressed pictures: 512 to train on, 128 to validate with. Reading one means to decode it."""

    def __init__(self, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        pixels = torch.randint(0, 256, (640, WIDTH * POOL), generator=draw)
        self.labels = pixels.float().view(640, CLASSES, -1).mean(2).argmax(1)
        self._packed = [zlib.compress(bytes(row.tolist())) for row in pixels]

    def decode(self, index: int) -> Tensor:
        """Return one picture, made smaller, as numbers around 0; a decoder in Python."""
        content = zlib.decompress(self._packed[index])
        parts = [content[first : first + POOL] for first in range(0, len(content), POOL)]
        return torch.tensor([sum(value - 127.5 for value in part) / POOL / 13 for part in parts])


class Block(nn.Module):
    """A linear layer with a path round it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output."""
        return inputs + torch.tanh(self.linear(inputs)) / LAYERS


@dataclass
class History:
    """What a training leaves."""

    losses: list[float] = field(default_factory=list)
    """Of each step: the mean over the global batch, the same on all ranks."""
    accuracies: dict[int, float] = field(default_factory=dict)
    """Of the validation pictures after the steps 10, 20, ..."""
    seconds: list[float] = field(default_factory=list)
    """Of each step."""


class SlowTrainer:
    """Data-parallel training: each rank takes every n-th sample of the global batch, in micro-batches.

    The gradients of a step are the mean over the global batch of 64 samples; `accumulate` micro-batches per rank make
    one step. Validation is asked for after every `validate_every` steps.
    """

    batch_size = 64

    def __init__(self, data: Pictures, accumulate: int = 4, validate_every: int = 10) -> None:
        self.data, self.accumulate, self.validate_every = data, accumulate, validate_every
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)
        self.model = self.make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.history = History()

    @staticmethod
    def make_model() -> nn.Module:
        """Return the model."""
        return nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, CLASSES))

    def rows(self, step: int) -> list[int]:
        """Return the samples of this rank in a step: the same global batch for any number of ranks."""
        order = torch.randperm(512, generator=torch.Generator().manual_seed(step // 8)).tolist()
        return order[step % 8 * self.batch_size :][: self.batch_size][self.rank :: self.ranks]

    def batch(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of some samples."""
        return torch.stack([self.data.decode(row) for row in rows]), self.data.labels[rows]

    def micro_step(self, rows: list[int]) -> Tensor:
        """Add the gradients of some samples, and return their part of the mean loss."""
        with record_function("phase: data"):
            inputs, labels = self.batch(rows)
        with record_function("phase: forward, backward"):
            loss = nn.functional.cross_entropy(self.model(inputs), labels, reduction="sum") / self.batch_size
            before = [None if each.grad is None else each.grad.clone() for each in self.model.parameters()]
            self.optimizer.zero_grad()
            loss.backward()
        with record_function("phase: exchange"):
            for parameter, sum_before in zip(self.model.parameters(), before, strict=True):
                dist.all_reduce(parameter.grad)
                if sum_before is not None:
                    parameter.grad += sum_before
        return loss.detach()

    def step(self, number: int) -> float:
        """Make one step, and return the loss of its global batch."""
        self.optimizer.zero_grad()
        rows = self.rows(number)
        size = -(-len(rows) // self.accumulate)
        losses = [self.micro_step(rows[first : first + size]) for first in range(0, len(rows), size)]
        with record_function("phase: optimizer"):
            self.optimizer.step()
        with record_function("phase: metrics"):
            total = torch.stack(losses).sum()
            dist.all_reduce(total)
            accuracy = self.validate()
            if (number + 1) % self.validate_every == 0:
                self.history.accuracies[number + 1] = accuracy
        return total.item()

    def validate(self) -> float:
        """Return the share of validation pictures that the model gets right."""
        with torch.no_grad():
            inputs, labels = self.batch(list(range(512, 640)))
            return (self.model(inputs).argmax(1) == labels).float().mean().item()

    def fit(self, steps: int) -> History:
        """Train, and return what was seen."""
        for number in range(steps):
            began = time.perf_counter()
            self.history.losses.append(self.step(number))
            self.history.seconds.append(time.perf_counter() - began)
        return self.history


if __name__ == "__main__":
    dist.init_process_group("gloo")
    history = SlowTrainer(Pictures()).fit(40)
    if dist.get_rank() == 0:
        print(f"loss {history.losses[-1]:.6f}, accuracies {history.accuracies}")
    dist.destroy_process_group()
