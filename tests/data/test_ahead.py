"""Batches that worker processes fetch in groups: equal to those of the process itself, in order, with their seeds."""

from __future__ import annotations

import random
import threading
from collections import deque

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from phalanx.data import ahead, mapped
from phalanx.data.ahead import SharedGroups, group_size, holds_data_only
from phalanx.data.loader import shard_loader
from phalanx.speed import capture


class Plain(Dataset):
    """Draws random numbers of all kinds for each sample; `kind`: what a sample is, or what is wrong with it."""

    def __init__(self, kind: str = "tuple", samples: int = 103) -> None:
        self.kind, self.samples = kind, samples
        self.values = torch.arange(samples * 3.0).reshape(samples, 3)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int):
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        sample = (self.values[index] + noise, index)
        if self.kind == "raises" and index == 77:
            raise KeyError("sample 77 is missing")
        if self.kind == "lengths":
            return {"x": self.values[index][: 1 + index % 2] if index > 90 else self.values[index], "y": index}
        return {"x": sample[0], "y": index} if self.kind == "dict" else sample


def read(dataset: Dataset, *, workers: int, monkeypatch, batch_size: int = 4) -> list:
    """Return an epoch's batches with their descriptions, in workers from the sixth batch on."""
    monkeypatch.setattr(mapped, "_WORTH_WORKERS", 3)
    monkeypatch.setattr(mapped, "worker_count", lambda ranks_here: workers)
    monkeypatch.setattr(ahead, "_MOST_IN_GROUP", 3)
    loader = shard_loader(dataset, batch_size=batch_size, seed=5)
    found = []
    for batch in loader:
        found.append((loader.current, pytree.tree_map(torch.clone, batch)))  # its memory is used again
        if len(found) == 5 and workers:
            loader.fetch_ahead(1)
    return found


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_equal_to_the_batches_fetched_here(kind, monkeypatch):
    here = read(Plain(kind), workers=0, monkeypatch=monkeypatch)
    there = read(Plain(kind), workers=2, monkeypatch=monkeypatch)
    assert [info for info, _ in there] == [info for info, _ in here]
    for (_, one), (_, other) in zip(here, there, strict=True):
        assert type(one) is type(other)
        pairs = zip(one.values(), other.values(), strict=True) if kind == "dict" else zip(one, other, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_the_process_goes_on_where_workers_fail(monkeypatch):
    parent = torch.multiprocessing.current_process().pid

    class FailsInWorkers(Plain):
        def __getitem__(self, index: int):
            if torch.multiprocessing.current_process().pid != parent and index % 10 == 0:
                raise OSError("no such device in a worker")
            return super().__getitem__(index)

    here = read(Plain(), workers=0, monkeypatch=monkeypatch)
    monkeypatch.setattr(mapped, "holds_data_only", lambda dataset: True)
    with pytest.warns(UserWarning, match="fetched by the training process again"):
        there = read(FailsInWorkers(), workers=1, monkeypatch=monkeypatch)
    assert [info for info, _ in there] == [info for info, _ in here]
    assert all(torch.equal(a[1][0], b[1][0]) for a, b in zip(here, there, strict=True))


def test_the_process_goes_on_without_shared_memory(monkeypatch):
    def no_memory(self) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    here = read(Plain(), workers=0, monkeypatch=monkeypatch)
    monkeypatch.setattr(torch.Tensor, "share_memory_", no_memory)
    with pytest.warns(UserWarning, match="fetched by the training process again: .*No space left"):
        there = read(Plain(), workers=2, monkeypatch=monkeypatch)
    assert all(torch.equal(a[1][0], b[1][0]) for a, b in zip(here, there, strict=True))


def test_an_error_of_the_data_set_is_raised(monkeypatch):
    with pytest.warns(UserWarning, match="again"), pytest.raises(KeyError, match="sample 77"):
        read(Plain("raises"), workers=1, monkeypatch=monkeypatch)


def test_groups():
    batches = [[torch.full((2, 3), float(n)), torch.tensor([n, n])] for n in range(4)]
    slots = SharedGroups(batches[0], 5, 2)
    assert slots.write(1, batches) == 4
    again = list(slots.read(1, 4))
    assert all(type(batch) is list for batch in again)
    assert all(
        torch.equal(a, b) for one, two in zip(again, batches, strict=True) for a, b in zip(one, two, strict=True)
    )
    other = [torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)]
    assert slots.write(0, [*batches, other]) is None
    assert slots.write(0, [tuple(batches[0])]) is None
    assert slots.write(0, [[batches[0][0].double(), batches[0][1]]]) is None
    assert group_size(batches[0]) == 32
    assert group_size([torch.zeros(300, 1000)]) == group_size(["text"]) == group_size(torch.zeros(3)) == 0


def test_a_batch_stays_as_long_as_a_captured_step_may_hold_it(monkeypatch):
    assert capture._MOST_MICRO_BATCHES < ahead.HELD
    monkeypatch.setattr(ahead, "HELD", 12)
    monkeypatch.setattr(mapped, "_WORTH_WORKERS", 3)
    monkeypatch.setattr(mapped, "worker_count", lambda ranks_here: 2)
    monkeypatch.setattr(ahead, "_MOST_IN_GROUP", 3)
    loader = shard_loader(Plain(samples=412), batch_size=4, seed=5)
    loader.fetch_ahead(1)
    held: deque = deque(maxlen=12)
    for batch in loader:
        held.append((batch, pytree.tree_map(torch.clone, batch)))
        assert all(torch.equal(a, b) for pair in held for a, b in zip(*pair, strict=True))


def test_only_data_without_handles_is_fetched_elsewhere(tmp_path):
    assert holds_data_only(Plain())
    for handle in ((tmp_path / "file").open("w"), threading.Lock(), lambda sample: sample):
        dataset = Plain()
        dataset.handle = handle
        assert not holds_data_only(dataset)
    dataset = Plain()
    dataset.text = "x" * (17 << 20)
    assert not holds_data_only(dataset)
