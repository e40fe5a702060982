"""Stopping in the middle of an epoch and going on: nothing repeated, nothing skipped, the same random numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, TensorDataset

from phalanx.data.loader import shard_loader
from phalanx.errors import DataError


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


class OwnNumbers(Sampler):
    """Shuffles with a generator of its own, which every draw advances."""

    def __init__(self, generator) -> None:
        self.generator = generator

    def __len__(self):
        return 22

    def __iter__(self):
        if isinstance(self.generator, random.Random):
            yield from self.generator.sample(range(22), 22)
        elif isinstance(self.generator, torch.Generator):
            yield from torch.randperm(22, generator=self.generator).tolist()
        else:
            yield from self.generator.permutation(22).tolist()


GENERATORS = [
    np.random.default_rng,
    np.random.RandomState,
    random.Random,
    lambda seed: torch.Generator().manual_seed(seed),
]


@pytest.mark.parametrize("make_generator", GENERATORS, ids=["numpy", "numpy's old one", "python", "torch"])
@pytest.mark.parametrize("batches", [False, True])
def test_a_sampler_with_a_generator_of_its_own_draws_by_seed_and_epoch(make_generator, batches):
    """A rank that survives has drawn from it before; one that replaces another has not."""

    def loader():
        sampler = OwnNumbers(make_generator(5))
        given = {"batch_sampler": BatchSampler(sampler, 4, drop_last=False)} if batches else {"sampler": sampler}
        return make(DataLoader(Augmented(), **given), batch_size=None if batches else 2)

    survivor, new = loader(), loader()
    epochs = [read(survivor) for _ in range(3)]
    assert epochs[0] != epochs[1]
    new.set_epoch(2)
    assert read(new) == epochs[2]


def test_an_order_that_cannot_be_drawn_again_is_refused():
    class Counts(OwnNumbers):
        drawn = 0

        def __iter__(self):
            self.drawn += 1
            return iter([(index * 3 + self.drawn) % 22 for index in range(22)])

    first, resumed = (make(DataLoader(Augmented(), sampler=Counts(None))) for _ in range(2))
    for _ in range(2):
        read(first)
    read(first, 3)
    state = first.state_dict()
    with pytest.raises(DataError, match=r"Counts: epoch 3 was begun in another order than it has now"):
        resumed.load_state_dict(state)
    at_the_end = make(DataLoader(Augmented(), sampler=Counts(None)))
    at_the_end.load_state_dict({**state, "samples": 0})
