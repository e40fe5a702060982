"""Batches that worker processes fetch in groups: equal to those of the process itself, in order, with their seeds."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from phalanx.data import ahead, mapped
from phalanx.data.ahead import group_size, grouped, holds_data_only, taken_apart
from phalanx.data.loader import shard_loader


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
    monkeypatch.setattr(ahead, "worker_count", lambda ranks_here: workers)
    monkeypatch.setattr(ahead, "_MOST_IN_GROUP", 3)
    loader = shard_loader(dataset, batch_size=batch_size, seed=5)
    found = []
    for batch in loader:
        found.append((loader.current, batch))
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
    monkeypatch.setattr(ahead, "holds_data_only", lambda dataset: True)
    with pytest.warns(UserWarning, match="fetched by the training process again"):
        there = read(FailsInWorkers(), workers=1, monkeypatch=monkeypatch)
    assert [info for info, _ in there] == [info for info, _ in here]
    assert all(torch.equal(a[1][0], b[1][0]) for a, b in zip(here, there, strict=True))


def test_an_error_of_the_data_set_is_raised(monkeypatch):
    with pytest.warns(UserWarning, match="again"), pytest.raises(KeyError, match="sample 77"):
        read(Plain("raises"), workers=1, monkeypatch=monkeypatch)


def test_groups():
    batches = [[torch.full((2, 3), float(n)), torch.tensor([n, n])] for n in range(4)]
    form, fields = grouped(batches)
    assert [field.shape for field in fields] == [(4, 2, 3), (4, 2)]
    again = list(taken_apart(form, fields))
    assert all(type(batch) is list for batch in again)
    assert all(
        torch.equal(a, b) for one, two in zip(again, batches, strict=True) for a, b in zip(one, two, strict=True)
    )
    ragged = [*batches, [torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)]]
    assert grouped(ragged) == (None, ragged)
    assert list(taken_apart(None, ragged)) == ragged
    assert group_size(batches[0]) == 32
    assert group_size([torch.zeros(300, 1000)]) == group_size(["text"]) == group_size(torch.zeros(3)) == 0


def test_only_data_without_handles_is_fetched_elsewhere(tmp_path):
    assert holds_data_only(Plain())
    for handle in ((tmp_path / "file").open("w"), threading.Lock(), lambda sample: sample):
        dataset = Plain()
        dataset.handle = handle
        assert not holds_data_only(dataset)
    dataset = Plain()
    dataset.text = "x" * (17 << 20)
    assert not holds_data_only(dataset)
