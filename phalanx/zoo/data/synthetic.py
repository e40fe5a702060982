"""Made-up data of any shape and length: each sample is computed from its index and nothing is stored."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from phalanx.config.option import limited
from phalanx.data.fetch import GatherDataset
from phalanx.errors import UsageError
from phalanx.world.seed import derive_seed

_TASKS = ("classification", "regression", "tokens")
_WINDOWS = 1 << 16
_TARGET_FEATURES = 8


class SyntheticDataset(GatherDataset):
    """Samples that can be learnt: classes around their own centres, a linear target, or token sequences to predict.

    Noise is read from one small pool at a position hashed from the index, so a batch costs about a copy at any shape.
    """

    def __init__(self, length: int, shape: Sequence[int], *, task: str, classes: int, first: int, seed: int) -> None:
        self._length = length
        self._first = first
        self.shape = tuple(shape)
        self.task = task
        self.classes = classes
        generator = torch.Generator().manual_seed(derive_seed(seed))
        size = math.prod(self.shape) + (task == "tokens")
        if task == "tokens":
            pool = torch.randint(classes, (_WINDOWS + size - 1,), generator=generator)
        else:
            pool = torch.randn(_WINDOWS + size - 1, generator=generator)
        self._pool = pool
        self._windows = pool.unfold(0, size, 1)
        self._coefficients = torch.randn(_TARGET_FEATURES, generator=generator).tolist()

    def __len__(self) -> int:
        return self._length

    def gather(self, index: torch.Tensor) -> list[torch.Tensor]:
        """Compute the samples at `index`."""
        key = _scramble(index + self._first)
        noise = self._windows.index_select(0, key % _WINDOWS)
        if self.task == "tokens":
            return [noise[:, :-1].contiguous(), noise[:, 1:].contiguous()]
        if self.task == "regression":
            return [noise.reshape(-1, *self.shape), self._target(noise)]
        labels = (key >> 16) % self.classes
        centres = self._windows.index_select(0, _scramble(labels + 1) % _WINDOWS)
        return [(noise + centres).reshape(-1, *self.shape), labels]

    def _target(self, features: torch.Tensor) -> torch.Tensor:
        # Column by column: a matrix product may round a sample differently in another batch.
        target = torch.zeros(len(features))
        for column, coefficient in zip(features.unbind(1), self._coefficients, strict=False):
            target = target + column * coefficient
        return target.unsqueeze(1)


@limited(length={"minimum": 1}, classes={"minimum": 1}, task={"choices": _TASKS})
def synthetic(
    split: str = "train",
    length: int = 10_000,
    shape: Sequence[int] = (32,),
    task: str = "classification",
    classes: int = 10,
    seed: int = 0,
) -> SyntheticDataset:
    """Return (inputs, targets) of `task`: classification, regression or tokens (`classes` is then the vocabulary).

    The validation split follows the training split in the same endless sequence, so the two never share a sample.
    """
    if not shape or any(size < 1 for size in shape):
        raise UsageError(f"shape = {tuple(shape)}: every size must be 1 or more", hint="Write: shape = (3, 32, 32)")
    first = 0 if split == "train" else 1 << 40
    return SyntheticDataset(length, shape, task=task, classes=classes, first=first, seed=seed)


def _scramble(index: torch.Tensor) -> torch.Tensor:
    """Hash indices to non-negative integers (a multiply-xor mix; int64 wraps around, which is what is wanted)."""
    mixed = (index + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return (mixed ^ (mixed >> 32)) & 0x7FFFFFFFFFFFFFFF
