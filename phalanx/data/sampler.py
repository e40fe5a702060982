"""What the user's sampler means for the order of an epoch."""

from __future__ import annotations

import operator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from phalanx.data.order import BatchPlan, Layout, Plan, SamplePlan, epoch_order
from phalanx.data.rng import derive_seed, rng_scope

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


class Order(Protocol):
    """The order of the samples in each epoch, the same on every rank."""

    def indices(self, epoch: int) -> Sequence[Any]:
        """Return what the epoch visits, one entry a sample (a batch, for a batch sampler)."""
        ...

    def plan(self, epoch: int, layout: Layout, *, drop_last: bool) -> Plan:
        """Cut the epoch for one rank."""
        ...


class IndexOrder:
    """All of `length` samples, shuffled or not, by Phalanx itself."""

    def __init__(self, length: int, *, seed: int, shuffle: bool) -> None:
        self._length = length
        self._seed = seed
        self._shuffle = shuffle

    def indices(self, epoch: int) -> list[int]:
        """Return what the epoch visits."""
        return list(self._order(epoch).tolist())

    def plan(self, epoch: int, layout: Layout, *, drop_last: bool) -> Plan:
        """Cut the epoch for one rank."""
        return SamplePlan(self._order(epoch), layout, drop_last=drop_last)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return epoch_order(self._length, seed=self._seed, epoch=epoch, shuffle=self._shuffle)


class DrawnOrder:
    """What a sampler of the user's draws when its random numbers come from (seed, epoch)."""

    def __init__(self, sampler: Any, *, seed: int, batches: bool = False) -> None:
        self._sampler = sampler
        self._seed = seed
        self._batches = batches

    def plan(self, epoch: int, layout: Layout, *, drop_last: bool) -> Plan:
        """Cut the epoch for one rank."""
        drawn = self.indices(epoch)
        if self._batches:
            return BatchPlan([as_index_array(batch) for batch in drawn if len(batch)], layout, drop_last=drop_last)
        return SamplePlan(as_index_array(drawn), layout, drop_last=drop_last)

    def indices(self, epoch: int) -> list[Any]:
        """Return what the sampler draws for the epoch."""
        seed = derive_seed(self._seed, epoch)
        if callable(getattr(self._sampler, "set_epoch", None)):
            self._sampler.set_epoch(epoch)
        with rng_scope(seed), _seeded_generators(self._sampler, seed):
            return list(self._sampler)


def order_of(sampler: Any, dataset: Any, *, seed: int, training: bool, notes: list[str]) -> Order:
    """Read a DataLoader's sampler: Phalanx shuffles by itself where the sampler only shuffles, else draws from it."""
    if isinstance(sampler, DistributedSampler):
        notes.append(f"{type(sampler).__name__} replaced: Phalanx shards the data itself.")
        return IndexOrder(len(dataset), seed=seed, shuffle=training and sampler.shuffle)
    if type(sampler) is SequentialSampler:
        return IndexOrder(len(sampler), seed=seed, shuffle=False)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return IndexOrder(len(sampler), seed=seed, shuffle=training)
    return DrawnOrder(sampler, seed=seed)


def as_index_array(drawn: Sequence[Any]) -> NDArray[np.int64] | list[Any]:
    """Return plain positions as an array, which is quick to slice and gather; other keys stay what the sampler drew."""
    try:
        indices = np.fromiter((operator.index(each) for each in drawn), dtype=np.int64, count=len(drawn))
    except TypeError:
        return list(drawn)
    return indices if not len(indices) or indices.min() >= 0 else list(drawn)


@contextmanager
def _seeded_generators(sampler: Any, seed: int) -> Iterator[None]:
    """Seed the torch generators a sampler (or the sampler inside it) owns, and put them back afterwards."""
    owned = []
    while sampler is not None:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            owned.append((generator, generator.get_state()))
            generator.manual_seed(seed)
        sampler = getattr(sampler, "sampler", None)
    try:
        yield
    finally:
        for generator, state in owned:
            generator.set_state(state)
