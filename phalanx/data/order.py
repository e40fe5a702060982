"""Which samples a rank gets, and when: a function of (seed, epoch, position), and the user's samplers.

An epoch is one order of all samples. A *global batch* is the next `batch_size x accumulation x dp_size` samples of it;
it is cut into blocks of `batch_size`, and micro-batch `m` of rank `r` is block `m * dp_size + r`. Two runs with the
same global batch therefore take the same optimizer steps at any number of ranks.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from phalanx import torch_compat
from phalanx.data.hints import hints_of
from phalanx.world.seed import derive_seed, rng_scope

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_FEW = 64
"""A longer list in a sampler holds data, not samplers or generators."""


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> NDArray[np.int64]:
    """Return the order in which an epoch visits `length` samples: the same on every rank and in every process."""
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    return generator.permutation(length).astype(np.int64, copy=False)


def grouped_order(groups: Sequence[int], window: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return an order in which samples that are stored together are read about the same time.

    Groups of consecutive samples are shuffled, then the samples of each `window` groups. For example 4 groups of 2
    samples and a window of 2: groups 2 0 3 1, then samples (4 1 0 5) (7 2 6 3): two groups are in use at a time.
    """
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    starts = np.cumsum([0, *groups])
    samples = [np.arange(starts[group], starts[group + 1]) for group in generator.permutation(len(groups))]
    windows = [np.concatenate(samples[first : first + window]) for first in range(0, len(samples), window)]
    return np.concatenate([generator.permutation(size) for size in windows]).astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True)
class MicroInfo:
    """The weight and position of one micro-batch.

    `scale` multiplies its mean loss, so that the average over ranks of summed gradients is the gradient of the global
    batch's mean. `samples` is 0 for a placeholder, which only keeps this rank in step with the others. `boundary` marks
    the last micro-batch of an optimizer step, `offset` is its first sample's position in the epoch.
    """

    samples: int
    global_samples: int
    scale: float
    boundary: bool
    offset: int


class SampleKey(NamedTuple):
    """Where the samples of a batch are in a run: `position` is that of the first one in the epoch's order."""

    seed: int
    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """How a global batch is split over ranks and micro-batches."""

    batch_size: int
    dp_rank: int = 0
    dp_size: int = 1
    accumulation: int = 1
    whole_blocks: bool = False
    """Cut the end of an epoch in blocks of `batch_size` too, the same at any number of ranks, so that some ranks may
    get none; otherwise it is distributed evenly."""
    blocks_per_step: int = 0
    """Blocks of an optimizer step, where the ranks' micro-batches are more: those beyond are placeholders."""

    @property
    def micro_step(self) -> int:
        """Samples that all ranks together take in one forward pass."""
        return self.batch_size * self.dp_size

    @property
    def blocks(self) -> int:
        """Blocks of one optimizer step."""
        return self.blocks_per_step or self.dp_size * self.accumulation

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""
        return self.batch_size * self.blocks

    def places(self) -> list[tuple[int, int]]:
        """Return where this rank's micro-batches begin in a step, and their samples: 0 for a placeholder."""
        blocks = [micro * self.dp_size + self.dp_rank for micro in range(self.accumulation)]
        return [(block * self.batch_size, self.batch_size) if block < self.blocks else (0, 0) for block in blocks]

    def info(self, samples: int, global_samples: int, *, boundary: bool, offset: int) -> MicroInfo:
        """Return the `MicroInfo` of a micro-batch of `samples` in its optimizer step."""
        return MicroInfo(samples, global_samples, self.dp_size * samples / global_samples, boundary, offset)


class Cut(NamedTuple):
    """The indices of one micro-batch of this rank, and its weight."""

    indices: Any
    info: MicroInfo


class SamplePlan:
    """Global batches of a fixed number of consecutive samples; the last one may be ragged."""

    def __init__(self, order: Sequence[Any] | NDArray[np.int64], layout: BatchSplit, *, drop_last: bool) -> None:
        self._order = order
        self._layout = layout
        self._drop_last = drop_last
        self.length = len(order)
        """Samples of the epoch before `drop_last`."""
        self.num_samples = self.length - self.length % layout.global_batch if drop_last else self.length
        """Samples that all ranks together visit in the epoch."""
        self.micro_batches = -(-self.num_samples // layout.micro_step)
        """Micro-batches per rank in the epoch."""
        self.steps = -(-self.num_samples // layout.global_batch)
        """Optimizer steps in the epoch."""

    def cuts(self, start: int = 0) -> Iterator[Cut]:
        """Yield this rank's micro-batches from the epoch's sample number `start` on."""
        layout, order = self._layout, self._order
        step, last, places = layout.global_batch, layout.accumulation - 1, layout.places()
        ragged_at = start + max(len(order) - start, 0) // step * step
        for first in range(start, ragged_at, step):
            for micro, (begin, count) in enumerate(places):
                at = first + begin
                info = layout.info(count, step, boundary=micro == last, offset=at)
                yield Cut(order[at : at + max(count, 1)], info)
        if not self._drop_last:
            yield from self._ragged(ragged_at)

    def _ragged(self, start: int) -> Iterator[Cut]:
        """Cut the end of the epoch: every rank takes part in every micro-step, if necessary with a placeholder."""
        layout, end = self._layout, len(self._order)
        for first in range(start, end, layout.micro_step):
            at, samples = self._ragged_share(first, min(layout.micro_step, end - first))
            boundary = first + layout.micro_step >= end
            info = layout.info(samples, end - start, boundary=boundary, offset=at)
            yield Cut(self._order[at : at + max(samples, 1)], info)

    def _ragged_share(self, first: int, count: int) -> tuple[int, int]:
        """Return the start of this rank's share of `count` samples, and its size."""
        layout = self._layout
        if layout.whole_blocks:
            before = min(layout.dp_rank * layout.batch_size, count)
            samples = min(layout.batch_size, count - before)
        else:
            share, extra = divmod(count, layout.dp_size)
            samples = share + (layout.dp_rank < extra)
            before = layout.dp_rank * share + min(layout.dp_rank, extra)
        return (first + before, samples) if samples else (first, 0)


class BatchPlan:
    """Batches of the user's batch sampler: distributed whole, one to each rank in turn, weighted by their size."""

    def __init__(self, batches: Sequence[Any], layout: BatchSplit, *, drop_last: bool) -> None:
        self._layout = layout
        self._blocks_per_step = layout.blocks
        whole = len(batches) - len(batches) % self._blocks_per_step if drop_last else len(batches)
        self.length = sum(len(batch) for batch in batches)
        self._batches = batches[:whole]
        self._offsets = np.cumsum([0, *(len(batch) for batch in self._batches)])
        self.num_samples = int(self._offsets[-1])
        self.micro_batches = -(-whole // layout.dp_size)
        self.steps = -(-whole // self._blocks_per_step)

    def cuts(self, start: int = 0) -> Iterator[Cut]:
        """Yield this rank's micro-batches from the epoch's sample number `start` on."""
        resumed = int(np.searchsorted(self._offsets, start))
        for first in range(resumed, len(self._batches), self._blocks_per_step):
            yield from self._step(first, min(first + self._blocks_per_step, len(self._batches)))

    def _step(self, first: int, end: int) -> Iterator[Cut]:
        layout = self._layout
        total = int(self._offsets[end] - self._offsets[first])
        for micro in range(first, end, layout.dp_size):
            mine = micro + layout.dp_rank
            real = mine < end
            batch = self._batches[mine] if real else self._batches[micro][:1]
            offset = int(self._offsets[mine if real else micro])
            boundary = micro + layout.dp_size >= end
            yield Cut(batch, layout.info(len(batch) if real else 0, total, boundary=boundary, offset=offset))


EpochPlan = SamplePlan | BatchPlan
"""One epoch of one rank, cut into micro-batches."""


class Order:
    """The order of the samples in each epoch, the same on every rank: all of `length` samples, shuffled or not."""

    name = "the order"

    def __init__(self, length: int, *, seed: int, shuffle: bool) -> None:
        self._length, self._seed, self._shuffle = length, seed, shuffle

    def indices(self, epoch: int) -> list[Any]:
        """Return what the epoch visits, one entry per sample (per batch, for a batch sampler)."""
        return list(self._order(epoch).tolist())

    def plan(self, epoch: int, layout: BatchSplit, *, drop_last: bool) -> EpochPlan:
        """Cut the epoch for one rank."""
        return SamplePlan(self._order(epoch), layout, drop_last=drop_last)

    def fingerprint(self, epoch: int) -> str | None:
        """Return what tells the order of an epoch from another one; None where (seed, epoch) is known to decide it."""
        return None

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return epoch_order(self._length, seed=self._seed, epoch=epoch, shuffle=self._shuffle)


class GroupedOrder(Order):
    """The order of samples that are cheap to read group by group, as a data set's `LoaderHints` say."""

    def __init__(self, groups: Sequence[int], window: int, *, seed: int) -> None:
        super().__init__(sum(groups), seed=seed, shuffle=True)
        self._groups, self._window = groups, window

    def fingerprint(self, epoch: int) -> str:
        """Return a hash of the groups and the window: a resumed epoch needs the same."""
        return hashlib.blake2b(repr((self._window, list(self._groups))).encode(), digest_size=8).hexdigest()

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return grouped_order(self._groups, self._window, seed=self._seed, epoch=epoch)


class DrawnOrder(Order):
    """What the user's sampler draws with random numbers from (seed, epoch).

    A sampler may have other state that changes with every draw, such as a counter. Then ranks that were replaced, and
    resumed runs, draw other orders: their fingerprints differ.
    """

    def __init__(self, sampler: Any, *, seed: int, batches: bool = False) -> None:
        self._sampler, self._seed, self._batches = sampler, seed, batches
        self.name = type(sampler).__name__
        self._arrays: tuple[int, list[Any]] | None = None
        self._fingerprint: tuple[int, str] | None = None

    def plan(self, epoch: int, layout: BatchSplit, *, drop_last: bool) -> EpochPlan:
        """Cut the epoch for one rank."""
        arrays = self._draw(epoch)
        if self._batches:
            return BatchPlan(arrays, layout, drop_last=drop_last)
        return SamplePlan(arrays[0], layout, drop_last=drop_last)

    def indices(self, epoch: int) -> list[Any]:
        """Return what the sampler draws for the epoch."""
        seed = derive_seed(self._seed, epoch)
        if callable(getattr(self._sampler, "set_epoch", None)):
            self._sampler.set_epoch(epoch)
        with rng_scope(seed), _seeded_generators(self._sampler, seed):
            return list(self._sampler)

    def fingerprint(self, epoch: int) -> str:
        """Return a hash of what was drawn for the epoch."""
        if self._fingerprint is None or self._fingerprint[0] != epoch:
            digest = hashlib.blake2b(digest_size=8)
            for part in self._draw(epoch):
                digest.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
            self._fingerprint = (epoch, digest.hexdigest())
        return self._fingerprint[1]

    def _draw(self, epoch: int) -> list[Any]:
        """Return the epoch's batches, or its samples as the only one; those of the last epoch are cached."""
        if self._arrays is None or self._arrays[0] != epoch:
            drawn = self.indices(epoch)
            batches = [batch for batch in drawn if len(batch)] if self._batches else [drawn]
            self._arrays = (epoch, [as_index_array(batch) for batch in batches])
        return self._arrays[1]


def own_order(dataset: Any, length: int, *, seed: int, shuffle: bool) -> Order:
    """Return the order of a data set that no sampler of the user decides."""
    hints = hints_of(dataset)
    if shuffle and hints.window and sum(hints.groups) == length:
        return GroupedOrder(hints.groups, hints.window, seed=seed)
    return Order(length, seed=seed, shuffle=shuffle)


def order_of(sampler: Any, dataset: Any, *, seed: int, training: bool, notes: list[str]) -> Order:
    """Return the order of a DataLoader's sampler: a shuffle of Phalanx if the sampler only shuffles, else its draws."""
    if isinstance(sampler, DistributedSampler):
        notes.append(f"{type(sampler).__name__} replaced: Phalanx shards the data itself.")
        return own_order(dataset, len(dataset), seed=seed, shuffle=training and sampler.shuffle)
    if type(sampler) is SequentialSampler:
        return Order(len(sampler), seed=seed, shuffle=False)
    if type(sampler) is RandomSampler and torch_compat.draws_each_once(sampler):
        return own_order(dataset, len(sampler), seed=seed, shuffle=training)
    return DrawnOrder(sampler, seed=seed)


def as_index_array(drawn: Sequence[Any]) -> NDArray[np.int64] | list[Any]:
    """Return plain indices as an array, which is quick to slice and gather; other keys as a list."""
    try:
        indices = np.fromiter((operator.index(index) for index in drawn), dtype=np.int64, count=len(drawn))
    except TypeError:
        return list(drawn)
    return indices if not len(indices) or indices.min() >= 0 else list(drawn)


@contextmanager
def _seeded_generators(sampler: Any, seed: int) -> Iterator[None]:
    """Seed the generators that a sampler (or a sampler inside it) holds, and restore them afterwards."""
    with ExitStack() as restored:
        for generator in _generators(sampler):
            restored.callback(_seeded(generator, seed))
        yield


def _generators(sampler: Any) -> Iterator[Any]:
    """Yield the random generators among a sampler's attributes, and in samplers and lists among them."""
    waiting, visited = [sampler], set[int]()
    while waiting:
        holder = waiting.pop()
        if id(holder) in visited:
            continue
        visited.add(id(holder))
        items = list(holder) if isinstance(holder, (list, tuple)) else list(getattr(holder, "__dict__", {}).values())
        yield from (item for item in items if isinstance(item, _GENERATORS))
        short = (item for item in items if isinstance(item, (list, tuple)) and len(item) <= _FEW)
        waiting += [*(item for item in items if isinstance(item, Sampler)), *short]
        waiting += [getattr(holder, "sampler", None)]  # batch samplers need not be subclasses


def _seeded(generator: Any, seed: int) -> Callable[[], object]:
    """Seed a generator; return what restores its state."""
    if isinstance(generator, torch.Generator):
        before = generator.get_state()
        generator.manual_seed(seed)
        return lambda: generator.set_state(before)
    if isinstance(generator, np.random.Generator):
        bits, state = generator.bit_generator, generator.bit_generator.state
        bits.state = type(bits)(seed).state
        return lambda: setattr(bits, "state", state)
    if isinstance(generator, np.random.RandomState):
        legacy = generator.get_state()
        generator.seed(seed & 0xFFFFFFFF)
        return lambda: generator.set_state(legacy)
    python = generator.getstate()
    generator.seed(seed)
    return lambda: generator.setstate(python)
