"""The models of `gpu_table.py`: how rivals and Phalanx build them, their batches, learnable data and operations."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from plain_models import Bert, Images, PlainDecoder
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

RIVALS = ("raw", "accelerate", "lightning", "hf")
MODES: dict[str, dict[str, Any]] = {
    "ours": {"mixed_precision": "bf16", "compile": True},
    "ours fast": {"fast": True},
    "ours small": {"memory": True, "mixed_precision": "bf16"},
}
CONTESTANTS = (*RIVALS, *MODES)
_AGAINST_RAW = ("raw", *MODES)
_HELD_IMAGES = 8192
_IMAGE_CLASSES = 100
_WRONG_LABELS = 0.2
"""The share of labels that say nothing about their image, so that the loss does not end near zero."""


@dataclass(frozen=True)
class Case:
    """A model of the table: how the rivals build it, how Phalanx does, its batch, and who trains it for how long."""

    plain: Callable[[], nn.Module]
    ours: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    """Of a sample: (tokens,), or (channels, height, width) of an image."""
    vocabulary: int
    """0: images."""
    contestants: tuple[str, ...] = _AGAINST_RAW
    """Those of the whole table; `--only` names others."""
    loss_steps: int = 0
    """Steps of a training whose last losses are compared; 0: steps are timed alone."""
    workers: int = 0
    """Processes that load data, for every contestant: one cannot stack 7,000 images a second."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What a user of Phalanx sets for this model besides a mode."""

    @property
    def flops(self) -> float:
        """Operations of training on one sample: 6 for each weight and token, or three forward passes as torch counts.

        The same number for every contestant: what a contestant computes beside it does not count as work.
        """
        with torch.device("meta"):
            ours = self.ours()
            if hasattr(ours, "flops_per_token"):
                return float(self.shape[0] * ours.flops_per_token(self.shape[0]))
            sample = torch.zeros(1, *self.shape, dtype=torch.long if self.vocabulary else torch.uint8)
            labels = torch.zeros(1, *(self.shape if self.vocabulary else ()), dtype=torch.long)
        counter = FlopCounterMode(display=False)
        with counter:
            ours(sample, labels)
        return 3.0 * counter.get_total_flops()

    @property
    def title(self) -> str:
        """What is trained, for a heading."""
        if self.vocabulary:
            return f"batch {self.batch} x {self.shape[0]}"
        source = "torchvision" if find_spec("torchvision") else "phalanx.zoo.models (torchvision is not installed)"
        return f"{self.batch} images, model of {source}"

    def data(self, samples: int) -> Dataset[tuple[Tensor, ...]]:
        """Return samples that can be learned: Python's library as bytes, or images with a pattern of their class."""
        held = text(samples, self.shape[0]) if self.vocabulary else images(min(samples, _HELD_IMAGES), self.shape)
        return Repeated(held, samples)


class Repeated(Dataset[tuple[Tensor, ...]]):
    """What users write, a length and a `__getitem__`: as many samples as asked for, of fewer that are in memory."""

    def __init__(self, held: TensorDataset, samples: int) -> None:
        self.tensors, self._samples = held.tensors, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, labels = self.tensors
        return inputs[index % len(inputs)], labels[index % len(inputs)]


def text(samples: int, time_steps: int) -> TensorDataset:
    """Return windows of the Python library's sources, in a fixed random order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts, missing = [], 64 << 20
    for path in sorted(folder.rglob("*.py")):
        parts.append(path.read_bytes())
        missing -= len(parts[-1])
        if missing <= 0:
            break
    stream = torch.frombuffer(bytearray(b"".join(parts)[: 64 << 20]), dtype=torch.uint8)
    starts = torch.randint(len(stream) - time_steps - 1, (samples,), generator=torch.Generator().manual_seed(0))
    windows = torch.stack([stream[start : start + time_steps + 1] for start in starts.tolist()]).long()
    return TensorDataset(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


def images(samples: int, shape: tuple[int, ...]) -> TensorDataset:
    """Return noise with the pattern of a class added, and the classes, some of them wrong."""
    draw = torch.Generator().manual_seed(0)
    coarse = torch.randint(128, (_IMAGE_CLASSES, shape[0], 7, 7), generator=draw).float()
    patterns = F.interpolate(coarse, shape[1:]).to(torch.uint8)
    labels = torch.randint(_IMAGE_CLASSES, (samples,), generator=draw)
    # Slices of one piece of noise, because drawing a billion numbers takes half a minute.
    size = math.prod(shape)
    noise = torch.randint(128, (16 * size,), dtype=torch.uint8, generator=draw)
    starts = torch.randint(15 * size, (samples,), generator=draw)
    pixels = torch.empty(samples, *shape, dtype=torch.uint8)
    for image, label, start in zip(pixels, labels.tolist(), starts.tolist(), strict=True):
        torch.add(noise[start : start + size].view(shape), patterns[label], out=image)
    others = torch.randint(_IMAGE_CLASSES, (samples,), generator=draw)
    return TensorDataset(pixels, torch.where(torch.rand(samples, generator=draw) < _WRONG_LABELS, others, labels))


def _gpt(preset: str, layers: int, hidden: int, heads: int, batch: int, **more: Any) -> Case:
    def ours() -> nn.Module:
        from phalanx.zoo.models.gpt import gpt

        return gpt(preset)

    plain = lambda: PlainDecoder(50257, 1024, layers, hidden, heads)  # noqa: E731
    return Case(plain, ours, batch, (1024,), 50257, **more)


def _llama() -> Case:
    def ours() -> nn.Module:
        from phalanx.zoo.models.llama import llama

        return llama("1b", seq_len=2048)

    plain = lambda: PlainDecoder(128256, 2048, 16, 2048, 32, 8, 8192, llama=True)  # noqa: E731
    return Case(plain, ours, 8, (2048,), 128256)


def _vision(name: str, **more: Any) -> Case:
    """Return a model of images: the rivals' code makes it channels last by hand, ours by a setting."""
    plain, ours = lambda: Images(name, channels_last=True), lambda: Images(name)
    return Case(plain, ours, 256, (3, 224, 224), 0, workers=8, settings={"channels_last": True}, **more)


CASES = {
    "gpt2": _gpt("gpt2", 12, 768, 12, 32, contestants=CONTESTANTS, loss_steps=300),
    "llama-1b": _llama(),
    "gpt2-medium": _gpt("gpt2-medium", 24, 1024, 16, 16),
    "gpt2-xl": _gpt("gpt2-xl", 48, 1600, 25, 8),
    "resnet50": _vision("resnet50", contestants=CONTESTANTS, loss_steps=300),
    "vit-b16": _vision("vit_b_16"),
    "bert-large": Case(Bert, Bert, 32, (512,), 30522),
}
