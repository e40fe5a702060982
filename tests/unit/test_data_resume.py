"""Stopping in the middle of an epoch and going on: nothing repeated, nothing skipped, the same random numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from phalanx.data.loader import shard_loader


class Augmented(Dataset):
    """Adds random numbers from all three generators to a sample."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return index, random.random() + np.random.rand() + torch.rand(()).item()


def read(loader, count=None):
    batches = []
    for batch in loader:
        batches.append([part.tolist() for part in batch])
        if count is not None and len(batches) == count:
            break
    return batches


def make(source, **options):
    return shard_loader(source, **{"batch_size": 2, "seed": 9} | options)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_resume_is_exact_with_random_augmentation(workers, persistent):
    source = DataLoader(Augmented(), shuffle=True, num_workers=workers, persistent_workers=persistent)
    whole = make(source, accumulation=2)
    whole.set_epoch(3)
    expected = read(whole)
    stopped = make(source, accumulation=2)
    stopped.set_epoch(3)
    read(stopped, 5)  # in the middle of the third optimizer step
    state = stopped.state_dict()
    assert state == {"epoch": 3, "samples": 8}
    resumed = make(source, accumulation=2)
    resumed.load_state_dict(state)
    resumed.set_epoch(3)
    assert read(resumed) == expected[4:]
    assert resumed.state_dict() == {"epoch": 3, "samples": 22}
    assert read(resumed) != expected  # the next epoch, from its beginning
    for loader in (whole, stopped, resumed):
        loader.close()


def test_reading_does_not_change_the_generators_of_the_process():
    loader = make(DataLoader(Augmented(), shuffle=True, num_workers=0))
    with_workers = make(DataLoader(Augmented(), shuffle=True, num_workers=1))

    def draw():
        return random.random(), np.random.randn(), torch.rand(()).item()

    def draw_between(batches):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        return [draw() for _ in batches]

    untouched = draw_between(range(len(loader)))
    assert draw_between(loader) == untouched
    assert draw_between(with_workers) == untouched


def test_random_numbers_depend_on_the_position_at_any_number_of_ranks():
    source = DataLoader(Augmented(), shuffle=True)
    single = read(make(source, accumulation=2))
    ranks = [make(source, dp_rank=rank, dp_size=2) for rank in range(2)]
    joined = [batch for pair in zip(*(read(rank) for rank in ranks), strict=True) for batch in pair]
    assert joined[:10] == single[:10]  # the ragged last step is split otherwise


def test_resume_at_another_layout_continues_the_same_order():
    data = TensorDataset(torch.arange(40))
    source = DataLoader(data, batch_size=4, shuffle=True)
    order = [sample for batch in read(shard_loader(source, batch_size=4, seed=2)) for sample in batch[0]]
    first = shard_loader(source, batch_size=4, seed=2)
    read(first, 3)
    ranks = [shard_loader(source, batch_size=5, dp_rank=rank, dp_size=3, seed=2) for rank in range(3)]
    seen = []
    for rank in ranks:
        rank.load_state_dict(first.state_dict())
    for batches in zip(*ranks, strict=True):
        for rank, batch in zip(ranks, batches, strict=True):
            seen += batch[0].tolist() if rank.current.samples else []
    assert seen == order[12:]


def test_a_finished_epoch_resumes_empty_and_the_next_is_complete():
    source = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    done = shard_loader(source, batch_size=2)
    read(done)
    again = shard_loader(source, batch_size=2)
    again.load_state_dict(done.state_dict())
    again.set_epoch(0)
    assert read(again) == []
    again.set_epoch(1)
    assert read(again) == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_an_interrupted_iteration_without_a_state_starts_again():
    loader = shard_loader(DataLoader(TensorDataset(torch.arange(6))), batch_size=2)
    assert read(loader, 1) == [[[0, 1]]]
    assert loader.state_dict()["samples"] == 2
    assert read(loader) == [[[0, 1]], [[2, 3]], [[4, 5]]]
