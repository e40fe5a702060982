"""Micro-batches of a map-style data set: the epoch's plan, fetched here or by worker processes."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from phalanx import torch_compat
from phalanx.data.ahead import fetch_ahead, group_size, holds_data_only, worker_count
from phalanx.data.fetch import BatchFetcher, BatchRequest
from phalanx.data.hints import describe_problems, hints_of
from phalanx.data.order import BatchSplit, Cut, DrawnOrder, EpochPlan, GroupedOrder, MicroInfo, Order
from phalanx.data.source import Source
from phalanx.errors import OrderError
from phalanx.world.seed import derive_seed

_MOST_SELECTED, _SELECTED_BYTES = 16, 512 << 10
"""How many batches of tensors in memory are selected in one call, and their size."""
_WORTH_WORKERS = 2000
"""Batches of an epoch that must be left for worker processes to be started: that takes tenths of a second."""


class _Requests:
    """The sampler of the inner DataLoader, changed each epoch, as persistent workers keep their DataLoader."""

    def __init__(self) -> None:
        self.plan: EpochPlan | None = None
        self.epoch = 0
        self.start = 0

    def __iter__(self) -> Iterator[BatchRequest]:
        if self.plan is not None:
            for cut in self.plan.cuts(self.start):
                yield BatchRequest(cut.indices, self.epoch, cut.info.offset)


class Batches(ABC):
    """The micro-batches of a source, fetched here or by worker processes."""

    shards: list[int] | None = None
    """What a position in data that shard themselves is valid for: ranks, workers, batch size."""
    fixes_ranks = False
    """Whether a position within an epoch is valid for this number of ranks only."""

    def __init__(self, source: Source, layout: BatchSplit, seed: int, drop_last: bool) -> None:
        self._source, self._layout, self._seed, self._drop_last = source, layout, seed, drop_last
        self._workers = source.workers
        self.num_workers = source.workers.num_workers
        self._loader: DataLoader[Any] | None = None

    @abstractmethod
    def batches(self, epoch: int, start: int, skipped: int) -> Iterator[tuple[MicroInfo, Any]]:
        """Yield this rank's micro-batches from sample `start` (of a self-sharding stream, block `skipped`) on."""

    @abstractmethod
    def micro_batches(self, epoch: int) -> int | None:
        """Micro-batches of this rank in the epoch; None where the length is not known."""

    @abstractmethod
    def steps(self, epoch: int) -> int | None:
        """Optimizer steps in the epoch; None where the length is not known."""

    @abstractmethod
    def num_samples(self, epoch: int) -> int | None:
        """Samples that all ranks together visit in the epoch; None where the length is not known."""

    def fingerprint(self, epoch: int) -> str | None:
        """Return a hash of what the user's sampler drew for the epoch; None for orders of Phalanx, and streams."""
        return None

    def fetch_ahead(self, ranks_here: int) -> None:  # noqa: B027 - most sources do it by themselves, or cannot
        """Fetch batches in worker processes from here on where that makes no difference but time."""

    def check_order(self, epoch: int, saved: str | None) -> None:  # noqa: B027 - a stream's order is not known before
        """Raise where an epoch that was begun cannot be continued, because its order is not what it was."""

    def problems(self) -> str:
        """Return what was wrong with the samples that all ranks have read so far; empty: nothing. All ranks call it."""
        return ""

    def close(self) -> None:
        """Stop worker processes kept between epochs."""
        torch_compat.shutdown_workers(self._loader)
        self._loader = None

    def _loader_for(self, dataset: Any, epoch: int, sampler: Any = None) -> DataLoader[Any]:
        loader = self._loader
        if loader is None:
            # A separate generator: the DataLoader would otherwise draw the workers' base seed from the process's
            # generator, and in a resumed epoch, which starts workers once more, dropout would get other numbers.
            generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch, self._layout.dp_rank))
            loader = self._workers.build(dataset, generator=generator, sampler=sampler)
        if self._workers.persistent_workers:
            self._loader = loader
        return loader


class MappedBatches(Batches):
    """Read a map-style data set in the order of each epoch's plan."""

    def __init__(
        self,
        source: Source,
        order: Order,
        layout: BatchSplit,
        *,
        seed: int,
        drop_last: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`group`: the data ranks, for comparing what the user's sampler draws on them."""
        super().__init__(source, layout, seed, drop_last)
        workers = source.workers
        pinned = workers.pin_memory and workers.num_workers == 0
        self._fetcher = BatchFetcher(source.dataset, source.collate_fn, seed=seed, pinned=pinned)
        self._order = order
        self._requests = _Requests()
        self._planned: tuple[int, EpochPlan] | None = None
        self._group = group
        self._compared = -1
        self.cuts_batches = source.batch_sampler is None
        """Whether batches are cut here; else those of the user's batch sampler are distributed whole."""
        self._ahead = 0

    def plan(self, epoch: int) -> EpochPlan:
        """Return the epoch's plan; the last one is cached, as drawing an order takes time."""
        if self._planned is None or self._planned[0] != epoch:
            self._planned = (epoch, self._order.plan(epoch, self._layout, drop_last=self._drop_last))
        return self._planned[1]

    def batches(self, epoch: int, start: int, skipped: int) -> Iterator[tuple[MicroInfo, Any]]:
        """Yield this rank's micro-batches from the epoch's sample `start` on."""
        plan = self.plan(epoch)
        if epoch != self._compared:
            self._compare_orders(epoch)
        self._fetcher.set_epoch(epoch)
        if self._workers.num_workers == 0 and self._fetcher.is_in_memory:
            return self._select_here(plan.cuts(start))
        if self._workers.num_workers == 0:
            return self._fetch_here(plan, epoch, start)
        return self._fetch_by_workers(plan, epoch, start)

    def step(self, epoch: int, start: int) -> Iterator[Any]:
        """Read this rank's micro-batches of the optimizer step that begins at sample `start`, in this process."""
        self._fetcher.set_epoch(epoch)
        for cut in self.plan(epoch).cuts(start):
            if cut.info.samples:
                yield self._fetcher[BatchRequest(cut.indices, epoch, cut.info.offset)]
            if cut.info.boundary:
                return

    def fingerprint(self, epoch: int) -> str | None:
        """Return a hash of what the user's sampler drew for the epoch; None for orders of Phalanx."""
        return self._order.fingerprint(epoch)

    def _compare_orders(self, epoch: int) -> None:
        """Raise where ranks would read the epoch in different orders, and so some samples twice and others never."""
        self._compared = epoch
        fingerprint = self._order.fingerprint(epoch)
        if fingerprint is None or self._layout.dp_size == 1 or not dist.is_initialized():
            return
        everywhere: list[Any] = [None] * self._layout.dp_size
        dist.all_gather_object(everywhere, fingerprint, group=self._group)
        if len(set(everywhere)) > 1:
            raise order_changed(self._order, f"for epoch {epoch + 1} ranks draw different orders")

    def check_order(self, epoch: int, saved: str | None) -> None:
        """Raise where an epoch that was begun cannot be continued, because its order is not what it was."""
        fingerprint = self._order.fingerprint(epoch)
        # Checkpoints of earlier versions lack the fingerprint of a sampler's order; orders by groups always had one.
        is_known = saved is not None or isinstance(self._order, GroupedOrder)
        if is_known and fingerprint != saved:
            raise order_changed(self._order, f"epoch {epoch + 1} was begun in another order than it has now")

    def problems(self) -> str:
        """Return what was wrong with the samples that all ranks have read so far; empty: nothing. All ranks call it."""
        hints = hints_of(self._source.dataset)
        if hints.problems is None:
            return ""
        everywhere: list[Any] = [hints.problems()]
        if self._layout.dp_size > 1 and dist.is_initialized():
            everywhere *= self._layout.dp_size
            dist.all_gather_object(everywhere, everywhere[self._layout.dp_rank], group=self._group)
        return describe_problems(sorted(set(itertools.chain(*everywhere))), hints.problem)

    def micro_batches(self, epoch: int) -> int | None:
        """Micro-batches of this rank in the epoch."""
        return self.plan(epoch).micro_batches

    def steps(self, epoch: int) -> int | None:
        """Optimizer steps in the epoch."""
        return self.plan(epoch).steps

    def num_samples(self, epoch: int) -> int | None:
        """Samples that all ranks together visit in the epoch."""
        return self.plan(epoch).num_samples

    def fetch_ahead(self, ranks_here: int) -> None:
        """Fetch batches in worker processes from here on where that makes no difference but time."""
        if self.num_workers == 0 and not self._fetcher.is_fast and holds_data_only(self._source.dataset):
            self._ahead = worker_count(ranks_here)

    def _select_here(self, cuts: Iterator[Cut]) -> Iterator[tuple[MicroInfo, Any]]:
        """Select rows of tensors, for several small batches in one call: it takes as long as for one."""
        count = 1
        while group := list(itertools.islice(cuts, count)):
            if not isinstance(group[0].indices, np.ndarray):
                yield from ((cut.info, self._fetcher[BatchRequest(cut.indices, 0, 0)]) for cut in group)
                continue
            for cut, batch in zip(group, self._fetcher.fetch_several([cut.indices for cut in group]), strict=True):
                yield cut.info, batch
            count = max(1, min(_MOST_SELECTED, _SELECTED_BYTES // max(1, sum(field.nbytes for field in batch))))

    def _fetch_here(self, plan: EpochPlan, epoch: int, start: int) -> Iterator[tuple[MicroInfo, Any]]:
        fetch, cuts = self._fetcher.__getitem__, plan.cuts(start)
        for number, (indices, info) in enumerate(cuts):
            batch = fetch(BatchRequest(indices, epoch, info.offset))
            yield info, batch
            if self._ahead > 0:
                batches_left = plan.micro_batches - start // self._layout.micro_step - number
                if batches_left > _WORTH_WORKERS and group_size(batch):
                    generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch, self._layout.dp_rank))
                    yield from fetch_ahead(self._fetcher, cuts, epoch, batch, self._ahead, generator)

    def _fetch_by_workers(self, plan: EpochPlan, epoch: int, start: int) -> Iterator[tuple[MicroInfo, Any]]:
        self._requests.plan, self._requests.epoch, self._requests.start = plan, epoch, start
        loader = self._loader_for(self._fetcher, epoch, self._requests)
        for cut, batch in zip(plan.cuts(start), loader, strict=True):
            yield cut.info, batch


def order_changed(order: Order, problem: str) -> OrderError:
    """Return the error for an order that is not what it was: a sampler draws by more than the seed and the epoch."""
    if not isinstance(order, DrawnOrder):
        return OrderError(
            f"{problem}: the data set is shuffled in another way.",
            hint="Resume with the same data, `shuffle` and `window`, or from the end of an epoch.",
        )
    return OrderError(
        f"{order.name}: {problem}: it draws by something that a new rank, or a resumed run, does not have.",
        hint="Give it a method set_epoch(epoch), and let the order depend on that and on random numbers alone.",
    )
