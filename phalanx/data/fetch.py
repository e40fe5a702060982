"""Fetching one micro-batch of a map-style data set, in this process or in a worker process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from phalanx.data.gather import gather_function, is_deterministic
from phalanx.data.rng import derive_seed, rng_scope, seed_process

if TYPE_CHECKING:
    from collections.abc import Callable


class Request(NamedTuple):
    """One micro-batch to fetch. Epoch and offset travel along because they seed the data set's random numbers."""

    indices: Any
    epoch: int
    offset: int


class BatchFetcher(Dataset[Any]):
    """The user's data set and collate function as one data set whose items are micro-batches.

    Random numbers drawn by the data set or by the collate function depend on (seed, epoch, offset) only: not on the
    rank, the worker process or what was fetched before. A resumed epoch repeats them, and every layout with equal
    micro-batches shares them.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], *, seed: int) -> None:
        self.dataset = dataset
        self._collate = collate_fn
        self._seed = seed
        self._wants_epoch = callable(getattr(dataset, "set_epoch", None))
        self._epoch: int | None = None
        self._gather = gather_function(dataset) if collate_fn is default_collate else None
        self._seeded = collate_fn is not default_collate or not is_deterministic(dataset)

    def set_epoch(self, epoch: int) -> None:
        """Tell a data set that wants to know which epoch it is."""
        if self._wants_epoch:
            self._epoch = epoch
            self.dataset.set_epoch(epoch)

    def __getitem__(self, request: Request) -> Any:
        if self._epoch is not None and self._epoch != request.epoch:  # the copy of a worker that outlives an epoch
            self.set_epoch(request.epoch)
        if not self._seeded:
            return self._fetch(request.indices)
        seed = derive_seed(self._seed, request.epoch, request.offset)
        if get_worker_info() is not None:
            seed_process(seed)
            return self._fetch(request.indices)
        with rng_scope(seed):
            return self._fetch(request.indices)

    def _fetch(self, indices: Any) -> Any:
        if not isinstance(indices, np.ndarray):
            return self._collate(self._items(list(indices)))
        if self._gather is not None:
            return self._gather(torch.from_numpy(indices))
        return self._collate(self._items(indices.tolist()))

    def _items(self, indices: list[Any]) -> Any:
        # Data sets with batched reading say so with __getitems__, as torch's own loader expects.
        batched = getattr(self.dataset, "__getitems__", None)
        return batched(indices) if batched else [self.dataset[index] for index in indices]


class WorkerInit:
    """Start a worker process: show the user's code the user's data set, then run the user's worker_init_fn."""

    def __init__(self, user_init: Callable[[int], None] | None) -> None:
        self._user_init = user_init

    def __call__(self, worker_id: int) -> None:
        """Run in the new worker process, before its first batch."""
        info = get_worker_info()
        # Code in the wild reads get_worker_info().dataset; it must find its own data set there, not our wrapper.
        inner = getattr(info.dataset, "dataset", None) if info is not None else None
        if inner is not None:
            object.__setattr__(info, "dataset", inner)
        if self._user_init is not None:
            self._user_init(worker_id)


def return_as_is(batch: Any) -> Any:
    """Collate nothing: the batch is ready."""
    return batch
