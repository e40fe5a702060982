"""Cutting a stream into the micro-batches of one rank.

The stream must be the same on every rank: block `b` of `batch_size` samples belongs to rank `b % dp_size`, and each
rank skips the blocks of the others. With a data set that has `shard(num_shards, index)` each rank reads its shard only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, default_collate, default_convert, get_worker_info

from phalanx import torch_compat
from phalanx.data.device import batch_length
from phalanx.data.fetch import collated, is_deterministic, return_as_is
from phalanx.data.order import BatchSplit, Order
from phalanx.world.seed import derive_seed, rng_scope, seed_process


class StreamBlock(NamedTuple):
    """One micro-batch of a stream: `samples` is 0 for a placeholder, `batch` None where a resumed run skips it.

    Offsets are positions in the whole stream, or in the shard of a data set that shards itself.
    """

    batch: Any
    samples: int
    offset: int


class StreamSlot(NamedTuple):
    """Which of a rank's worker processes this is."""

    worker: int = 0
    workers: int = 1
    in_worker: bool = False


class BlockStream(IterableDataset[StreamBlock]):
    """The blocks of one rank, in the order of the stream, in this process or sharded over worker processes."""

    def __init__(
        self,
        dataset: Any,
        layout: BatchSplit,
        collate_fn: Callable[[Any], Any],
        *,
        seed: int,
        ready: bool,
        workers: int,
        in_order: bool = False,
    ) -> None:
        self.dataset = dataset
        self._layout = layout
        self._collate = collate_fn
        self._seed = seed
        self._ready = ready
        self.items_per_block = 1 if ready else layout.batch_size
        self._reads_randomly = not is_deterministic(dataset)
        self._collates_randomly = collate_fn not in (default_collate, default_convert, return_as_is)
        self._slot: StreamSlot | None = None
        parts = layout.dp_size * max(workers, 1)
        # The position of a sample of a user's shard in the whole stream is not known; that of ReadyItems is.
        keeps_order = not in_order or isinstance(dataset, ReadyItems)
        self.shards_itself = parts > 1 and keeps_order and _can_shard(dataset, parts)
        self.may_shard = keeps_order and _can_shard(dataset, 1)
        """Whether it shards itself at some number of ranks, though perhaps not at this one."""
        # Shared with the worker processes, as persistent ones keep the copy of this object they were started with.
        self._start = torch.zeros(3, dtype=torch.int64)
        if workers:
            self._start.share_memory_()  # type: ignore[no-untyped-call]

    def seek(self, epoch: int, start: int, skipped: int) -> None:
        """Set what the next iteration reads: the epoch, from sample `start` (or this rank's block `skipped`) on."""
        self._start.copy_(torch.tensor([epoch, start, skipped]))

    def __iter__(self) -> Iterator[StreamBlock]:
        self._slot = self._slot or _current_slot()
        epoch, start, skipped = self._start.tolist()
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)
        if self.shards_itself:
            return self._read_shard(epoch, skipped, self._slot)
        return self._strided(epoch, start, self._slot)

    def _strided(self, epoch: int, start: int, slot: StreamSlot) -> Iterator[StreamBlock]:
        """Read everything, keep every `dp_size x workers`-th block; DataLoader's round robin restores their order."""
        layout = self._layout
        stride, offset = layout.dp_size * slot.workers, slot.worker * layout.dp_size + layout.dp_rank
        reader = _Reader(self, self.dataset, (epoch,))
        first = reader.skip(start)
        number = 0
        while items := reader.read(self.items_per_block):
            first = first or items[:1]
            if number % stride == offset:
                yield reader.block(items)
            number += 1
        if number <= offset and slot.worker == 0 and first:
            yield reader.block(first)._replace(samples=0)

    def _read_shard(self, epoch: int, skipped: int, slot: StreamSlot) -> Iterator[StreamBlock]:
        layout = self._layout
        index, parts = layout.dp_rank * slot.workers + slot.worker, layout.dp_size * slot.workers
        reader = _Reader(self, self.dataset.shard(num_shards=parts, index=index), (epoch, index))
        number, position = slot.worker, index
        while items := reader.read(self.items_per_block):
            # The consumer drops the first `skipped` blocks: those need no collating.
            block = reader.block(items) if number >= skipped else StreamBlock(None, 0, 0)
            yield block._replace(offset=position) if isinstance(self.dataset, ReadyItems) else block
            number += slot.workers
            position += parts

    def scope(self, *parts: int, collating: bool = False) -> AbstractContextManager[None]:
        """Seed by position, so that all ranks and a resumed run read the same stream, also where it shuffles."""
        if not (self._collates_randomly if collating else self._reads_randomly):
            return nullcontext()
        seed = derive_seed(self._seed, *parts)
        if self._slot is not None and self._slot.in_worker:
            seed_process(seed)
            return nullcontext()
        return rng_scope(seed)

    def size(self, items: list[Any]) -> int:
        """Count the samples of a block."""
        return batch_length(items[0]) if self._ready else len(items)

    def collate(self, items: list[Any]) -> Any:
        """Return the batch of a block."""
        return collated(self._collate, items[0] if self._ready else items)


class _Reader:
    """Reads a stream block by block, each with random numbers seeded by its position."""

    def __init__(self, blocks: BlockStream, stream: Any, seed_parts: tuple[int, ...]) -> None:
        self._blocks = blocks
        self._seed_parts = seed_parts
        self._ended = False
        self.offset = 0
        self._next_offset = 0
        with blocks.scope(*seed_parts):
            self._items = iter(stream)

    def read(self, count: int) -> list[Any]:
        """Return the next `count` samples, or fewer at the end."""
        if self._ended:
            return []
        self.offset = self._next_offset
        with self._blocks.scope(*self._seed_parts, self.offset):
            items = list(itertools.islice(self._items, count))
        self._ended = len(items) < count
        self._next_offset += self._blocks.size(items) if items else 0
        return items

    def skip(self, start: int) -> list[Any]:
        """Read up to sample `start` in the blocks of the first run; return a sample for a placeholder."""
        first: list[Any] = []
        count = self._blocks.items_per_block
        while self._next_offset < start:
            items = self.read(min(count, start - self._next_offset))
            if not items:
                break
            first = first or items[:1]
        return first

    def block(self, items: list[Any]) -> StreamBlock:
        with self._blocks.scope(*self._seed_parts, self.offset, 1, collating=True):
            return StreamBlock(self._blocks.collate(items), self._blocks.size(items), self.offset)


class ReadyItems(IterableDataset[Any]):
    """A map-style data set whose items are whole batches, as a stream that shards itself."""

    def __init__(self, dataset: Any, order: Order, *, epoch: int = 0, part: slice = slice(None)) -> None:
        self.dataset = dataset
        self._order = order
        self._epoch = epoch
        self._part = part

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order is used."""
        self._epoch = epoch

    def shard(self, num_shards: int, index: int) -> ReadyItems:
        """Return every `num_shards`-th batch, from `index` on."""
        return ReadyItems(self.dataset, self._order, epoch=self._epoch, part=slice(index, None, num_shards))

    def __iter__(self) -> Iterator[Any]:
        for index in self._order.indices(self._epoch)[self._part]:
            yield self.dataset[index]


def _can_shard(dataset: Any, parts: int) -> bool:
    """Whether a data set has `shard` (on its type: some objects have every attribute) and enough `num_shards`."""
    if not callable(getattr(type(dataset), "shard", None)):
        return False
    available = getattr(dataset, "num_shards", None)
    return not isinstance(available, int) or available >= parts


def _current_slot() -> StreamSlot:
    """Return this worker's number, and hide it from the user's data set.

    Data sets split themselves by get_worker_info(); here each worker must read the whole stream.
    """
    info = get_worker_info()
    if info is None:
        return StreamSlot()
    torch_compat.hide_worker_info()
    return StreamSlot(info.id, info.num_workers, in_worker=True)
