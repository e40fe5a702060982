"""Batches of any nesting on their way to the device."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from phalanx.data.device import batch_length, map_batch, to_device
from phalanx.data.loader import shard_loader


class Pair(NamedTuple):
    left: object
    right: object


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str
    derived: int = field(default=3, init=False)


class Encoding(UserDict):
    """Moves itself, as the encodings of tokenizers do, and knows nothing of non_blocking."""

    def to(self, device):
        return Encoding({key: value.to(device) for key, value in self.data.items()})


def test_every_nesting_keeps_its_type_and_moves_its_tensors():
    tensor = torch.ones(2)
    batch = {
        "list": [tensor, "text"],
        "tuple": (tensor, 3),
        "named": Pair(tensor, None),
        "ordered": OrderedDict(a=tensor),
        "sample": Sample(tensor, "cat"),
        "encoding": Encoding(ids=tensor),
    }
    moved = to_device(batch, "meta", non_blocking=True)
    assert {key: type(value) for key, value in moved.items()} == {key: type(value) for key, value in batch.items()}
    tensors = [
        moved["list"][0],
        moved["tuple"][0],
        moved["named"].left,
        moved["ordered"]["a"],
        moved["sample"].image,
        moved["encoding"]["ids"],
    ]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert (moved["list"][1], moved["tuple"][1], moved["named"].right) == ("text", 3, None)
    assert (moved["sample"].name, moved["sample"].derived) == ("cat", 3)
    assert tensor.device.type == batch["sample"].image.device.type == "cpu"


def test_map_batch_visits_leaves_only():
    doubled = map_batch([1, (2, {"a": 3})], lambda leaf: 2 * leaf, lambda part: isinstance(part, int))
    assert doubled == [2, (4, {"a": 6})]


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(5, 2),
        [torch.zeros(5, 2), torch.zeros(5)],
        {"inputs": torch.zeros(5, 2)},
        Sample(torch.zeros(5), "x"),
        ["a", "b", "c", "d", "e"],
        ({"ids": torch.zeros(5, 2)}, {"labels": torch.zeros(5)}),
        ([torch.zeros(5, 2), torch.zeros(5, 3)], torch.zeros(5)),  # two inputs
        ([torch.zeros(5, 2), torch.zeros(5, 3)], [torch.zeros(5), torch.zeros(5)]),
        ([torch.zeros(length) for length in (17, 3, 4, 5, 9)], torch.zeros(5)),  # sequences
        {"sequences": [torch.zeros(length) for length in (17, 3, 4, 5, 9)]},
        (
            tuple(torch.zeros(3, side, 8) for side in range(5, 10)),
            tuple({"boxes": torch.zeros(2, 4)} for _ in range(5)),
        ),
        [{"image": torch.zeros(3, 8, 8), "height": 8}] * 5,
        (["a", "b", "c", "d", "e"], [0, 1, 2, 3, 4]),
        [torch.tensor(1.0)] * 5,
    ],
)
def test_the_length_of_a_batch(batch):
    assert batch_length(batch) == 5


def test_the_loader_moves_its_batches():
    loader = shard_loader(TensorDataset(torch.ones(4, 2)), batch_size=2, device="meta")
    assert [(batch[0].device.type, batch[0].shape) for batch in loader] == [("meta", (2, 2))] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_copies_run_ahead_on_cuda_and_arrive_complete(pin_memory, workers):
    values = torch.arange(64.0).repeat_interleave(1 << 16).reshape(64, -1)
    source = DataLoader(TensorDataset(values), batch_size=4, pin_memory=pin_memory, num_workers=workers)
    loader = shard_loader(source, batch_size=None, device="cuda")
    total = torch.zeros((), device="cuda", dtype=torch.float64)
    for number, (batch,) in enumerate(loader):
        assert batch.is_cuda
        assert loader.current.offset == 4 * number
        # Work long enough that a copy which came too early would overwrite what is still being read.
        for _ in range(20):
            total += (batch.double() * batch.double()).sum().sqrt() * 0
        total += (batch.double().mean(1) - torch.arange(4 * number, 4 * number + 4, device="cuda")).abs().sum()
    assert total.item() == 0
    assert number == 15
