"""Fetch one micro-batch of a map-style data set, here or in a worker process; whole batches at once where possible."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from phalanx.data.rng import derive_seed, rng_scope, seed_process


class GatherDataset(Dataset[tuple[torch.Tensor, ...]], ABC):
    """A deterministic data set that writes `gather` only: single samples follow from it, so the two cannot disagree."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, index: torch.Tensor) -> list[torch.Tensor]:
        """Return the batch of the samples at `index` (1-D, int64): one tensor a field, samples along dimension 0."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        return tuple(field[0] for field in self.gather(torch.tensor([index % len(self)])))


def gather_function(dataset: Any) -> Callable[[torch.Tensor], list[torch.Tensor]] | None:
    """Return how to fetch a whole batch of `dataset` as default_collate would build it, or None if there is no way."""
    # Exact types: a subclass may have a __getitem__ of its own, which the short cut would pass by.
    if type(dataset) is TensorDataset:
        return _select_rows(dataset.tensors)
    if isinstance(dataset, GatherDataset) and type(dataset).__getitem__ is GatherDataset.__getitem__:
        return dataset.gather
    if type(dataset) is Subset:
        inner = gather_function(dataset.dataset)
        return _through(torch.as_tensor(dataset.indices), inner) if inner and _plain_indices(dataset) else None
    return None


def is_deterministic(dataset: Any) -> bool:
    """Say whether reading `dataset` draws no random numbers, so that fetching need not seed anything.

    A data set of your own says so with an attribute `deterministic = True`.
    """
    if type(dataset) in (TensorDataset, list, tuple) or isinstance(dataset, GatherDataset):
        return True
    if type(dataset) is Subset:
        return is_deterministic(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(is_deterministic(part) for part in dataset.datasets)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return all(is_deterministic(part) for part in (parts.values() if isinstance(parts, dict) else parts))
    return getattr(dataset, "deterministic", False) is True


def _select_rows(tensors: tuple[torch.Tensor, ...]) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    def gather(index: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.index_select(0, index.to(tensor.device)) for tensor in tensors]

    return gather


def _through(
    indices: torch.Tensor, inner: Callable[[torch.Tensor], list[torch.Tensor]]
) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    def gather(index: torch.Tensor) -> list[torch.Tensor]:
        return inner(indices.index_select(0, index))

    return gather


def _plain_indices(subset: Subset[Any]) -> bool:
    """Negative and non-integer indices are legal in a Subset; index_select knows neither."""
    indices = subset.indices
    if isinstance(indices, range):
        return len(indices) == 0 or min(indices[0], indices[-1]) >= 0
    return all(type(index) is int and index >= 0 for index in indices)


class BatchRequest(NamedTuple):
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

    def __getitem__(self, request: BatchRequest) -> Any:
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
