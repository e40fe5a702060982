"""Fetch one micro-batch of a map-style data set, here or in a worker process; whole batches at once where possible."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
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

from phalanx.data.device import page_locked
from phalanx.errors import DataError
from phalanx.torch_compat import collate_with
from phalanx.world.seed import derive_seed, rng_scope, seed_process


class GatherDataset(Dataset[Any], ABC):
    """A deterministic data set that implements `gather` only; single samples are computed by it."""

    notes: tuple[str, ...] = ()
    """Messages about the data, said once at the start of a run."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, index: torch.Tensor) -> list[torch.Tensor] | dict[str, torch.Tensor]:
        """Return the batch of the samples at `index` (1-D, int64): one tensor per field, samples along dimension 0."""

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        fields = self.gather(torch.tensor([index % len(self)]))
        if isinstance(fields, dict):
            return {name: field[0] for name, field in fields.items()}
        return tuple(field[0] for field in fields)


def gather_function(dataset: Any) -> Callable[[torch.Tensor], Any] | None:
    """Return a function that fetches a batch of `dataset` as default_collate would build it, or None."""
    # Exact types: a subclass may override __getitem__, which this would not call.
    if type(dataset) is TensorDataset:
        tensors = dataset.tensors
        return lambda index: [_rows(tensor, index) for tensor in tensors]
    if isinstance(dataset, GatherDataset) and type(dataset).__getitem__ is GatherDataset.__getitem__:
        return dataset.gather
    if type(dataset) is Subset:
        inner = gather_function(dataset.dataset)
        if inner is not None and _plain_indices(dataset):
            indices = torch.as_tensor(dataset.indices)
            return lambda index: inner(indices.index_select(0, index))
    return None


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu" or tensor.requires_grad:
        return tensor.index_select(0, index.to(tensor.device))
    return torch.index_select(tensor, 0, index, out=page_locked((len(index), *tensor.shape[1:]), tensor.dtype))


def _stacked(samples: list[torch.Tensor]) -> torch.Tensor:
    """Stack a batch, a large one into page-locked memory: new pages cost several times the copy."""
    first = samples[0]
    alike = all(
        type(sample) is torch.Tensor and sample.dtype is first.dtype and not sample.requires_grad for sample in samples
    )
    if not alike or first.layout is not torch.strided or first.device.type != "cpu":
        refused_or_stacked: torch.Tensor = default_collate(samples)
        return refused_or_stacked
    return torch.stack(samples, out=page_locked((len(samples), *first.shape), first.dtype))


def collated(collate: Callable[[Any], Any], samples: Any) -> Any:
    """Return the batch of some samples; raise a DataError where they have different shapes."""
    try:
        return collate(samples)
    except RuntimeError as error:
        if "stack expects each tensor to be equal size" not in str(error):
            raise
        raise DataError(
            f"the samples of a batch have different shapes: {error}",
            hint="Pad them to one shape: give a DataLoader with a collate_fn that does.",
        ) from error


def is_deterministic(dataset: Any) -> bool:
    """Whether reading `dataset` draws no random numbers; a user's data set declares `deterministic = True`."""
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


def _plain_indices(subset: Subset[Any]) -> bool:
    """Whether all indices are non-negative integers, as index_select requires; a Subset allows others."""
    indices = subset.indices
    if isinstance(indices, range):
        return len(indices) == 0 or min(indices[0], indices[-1]) >= 0
    return all(type(index) is int and index >= 0 for index in indices)


class BatchRequest(NamedTuple):
    """One micro-batch to fetch; epoch and offset seed the data set's random numbers."""

    indices: Any
    epoch: int
    offset: int


class BatchFetcher(Dataset[Any]):
    """The user's data set and collate function as one data set whose items are micro-batches.

    Random numbers that they draw depend on (seed, epoch, offset) only, so a resumed epoch repeats them, and every
    layout with equal micro-batches draws the same.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], *, seed: int, pinned: bool = False) -> None:
        """`pinned`: batches are for a GPU, and default ones are put into page-locked memory at once."""
        self.dataset = dataset
        self._collate = partial(collate_with, _stacked) if pinned and collate_fn is default_collate else collate_fn
        self._seed = seed
        self._wants_epoch = callable(getattr(dataset, "set_epoch", None))
        self._epoch: int | None = None
        self._gather = gather_function(dataset) if collate_fn is default_collate else None
        self._seeded = collate_fn is not default_collate or not is_deterministic(dataset)

    @property
    def is_fast(self) -> bool:
        """Whether whole batches are fetched at once."""
        return self._gather is not None

    @property
    def is_in_memory(self) -> bool:
        """Whether a batch is a selection of rows of tensors: then several are selected in one call."""
        inner = self.dataset
        while type(inner) is Subset:
            inner = inner.dataset
        return self._gather is not None and not self._seeded and type(inner) is TensorDataset

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of a data set that has `set_epoch`."""
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

    def fetch_several(self, several: list[Any]) -> Iterator[list[torch.Tensor]]:
        """Yield a batch for each of some arrays of indices into tensors in memory."""
        assert self._gather is not None, "asked before"
        fields = self._gather(torch.from_numpy(np.concatenate(several)))
        sizes = [len(indices) for indices in several]
        for parts in zip(*(field.split(sizes) for field in fields), strict=True):
            yield list(parts)

    def _fetch(self, indices: Any) -> Any:
        if not isinstance(indices, np.ndarray):
            return collated(self._collate, self._items(list(indices)))
        if self._gather is not None:
            return self._gather(torch.from_numpy(indices))
        return collated(self._collate, self._items(indices.tolist()))

    def _items(self, indices: list[Any]) -> Any:
        # Data sets with batched reading have __getitems__, as torch's loader expects.
        batched = getattr(self.dataset, "__getitems__", None)
        return batched(indices) if batched else [self.dataset[index] for index in indices]


class WorkerInit:
    """Initialise a worker process: make the user's data set visible, then run the user's worker_init_fn."""

    def __init__(self, user_init: Callable[[int], None] | None) -> None:
        self._user_init = user_init

    def __call__(self, worker_id: int) -> None:
        """Run in the new worker process, before its first batch."""
        info = get_worker_info()
        # User code reads get_worker_info().dataset; it must find its data set there, not the wrapper.
        inner = getattr(info.dataset, "dataset", None) if info is not None else None
        if inner is not None:
            object.__setattr__(info, "dataset", inner)
        if self._user_init is not None:
            self._user_init(worker_id)


def return_as_is(batch: Any) -> Any:
    """Return a ready-made batch unchanged."""
    return batch
