"""The user's data (DataLoader, data set or batches) as one description."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from phalanx.data.fetch import GatherDataset, WorkerInit, return_as_is
from phalanx.data.hints import hints_of
from phalanx.errors import DataError


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a DataLoader about worker processes and pinning."""

    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    multiprocessing_context: Any = None
    worker_init_fn: Callable[[int], None] | None = None
    timeout: float = 0

    @staticmethod
    def of(loader: DataLoader[Any]) -> WorkerOptions:
        """Copy the options of the user's DataLoader."""
        return WorkerOptions(**{option.name: getattr(loader, option.name) for option in fields(WorkerOptions)})

    def build(self, dataset: Dataset[Any], *, generator: Any, sampler: Any = None) -> DataLoader[Any]:
        """Return a DataLoader with these options over a data set whose items are micro-batches."""
        options: dict[str, Any] = {option.name: getattr(self, option.name) for option in fields(self)}
        options |= {"worker_init_fn": WorkerInit(self.worker_init_fn), "collate_fn": return_as_is, "batch_size": None}
        return DataLoader(dataset, sampler=sampler, generator=generator, **options)


@dataclass(frozen=True, slots=True)
class Source:
    """The user's data. `batch_size`: None for ready-made batches; `sampler`: None where Phalanx chooses the order."""

    dataset: Any
    is_stream: bool
    collate_fn: Callable[[Any], Any] = default_collate
    batch_size: int | None = None
    ready_batches: bool = False
    sampler: Any = None
    batch_sampler: Any = None
    drop_last: bool = False
    workers: WorkerOptions = field(default_factory=WorkerOptions)


def read_source(data: Any, *, pin_memory: bool, notes: list[str]) -> Source:
    """Recognise a DataLoader, a map-style or iterable data set, (inputs, targets), or an iterable of batches."""
    if isinstance(data, DataLoader):
        return _read_loader(data, notes)
    if isinstance(data, (torch.Tensor, np.ndarray)):
        kind = "a tensor" if isinstance(data, torch.Tensor) else "an array"
        raise DataError(
            f"{kind} of shape {list(data.shape)} is not a data set.",
            hint="Give a pair, (inputs, targets), or torch.utils.data.TensorDataset(inputs, targets).",
        )
    if isinstance(data, tuple) and _are_columns(data):
        data = TensorDataset(*map(torch.as_tensor, data))
    if isinstance(data, GatherDataset):
        notes += data.notes
    options = WorkerOptions(pin_memory=pin_memory)
    if isinstance(data, IterableDataset):
        return Source(data, is_stream=True, workers=options)
    if isinstance(data, Dataset) or _looks_like_dataset(data):
        hints = hints_of(data)
        notes += hints.notes
        options = replace(options, num_workers=hints.workers, persistent_workers=hints.workers > 0)
        return Source(data, is_stream=False, workers=options)
    if isinstance(data, Iterator):
        raise DataError(
            f"{type(data).__name__} can be read only once, and every epoch reads the data again.",
            hint="Give the DataLoader, the data set or a list of batches instead of iter(...) of it.",
        )
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, Mapping)):
        return Source(data, is_stream=True, collate_fn=return_as_is, ready_batches=True, workers=options)
    raise DataError(
        f"cannot read training data from {type(data).__name__}.",
        hint="Give a torch DataLoader, a Dataset (map-style or iterable), or a list of batches.",
    )


def _read_loader(loader: DataLoader[Any], notes: list[str]) -> Source:
    if _iterates_its_own_way(loader):
        notes.append(f"{type(loader).__name__} overrides __iter__: its batches are distributed to the ranks whole.")
        return Source(loader, is_stream=True, collate_fn=return_as_is, ready_batches=True)
    if loader.generator is not None:
        notes.append("The DataLoader's generator does not decide the order: `seed` does, equally on all ranks.")
    workers, collate = WorkerOptions.of(loader), cast("Callable[[Any], Any]", loader.collate_fn)
    if isinstance(loader.dataset, IterableDataset):
        if workers.num_workers and workers.worker_init_fn is not None:
            notes.append("worker_init_fn must not split the stream: Phalanx shards it over the worker processes.")
        ready = loader.batch_size is None
        return Source(
            loader.dataset, True, collate, loader.batch_size, ready, drop_last=loader.drop_last, workers=workers
        )
    batching: Any = loader.batch_sampler
    if batching is None:
        return Source(loader.dataset, False, collate, None, True, sampler=loader.sampler, workers=workers)
    if type(batching) is not BatchSampler:
        return Source(loader.dataset, False, collate, batch_sampler=batching, workers=workers)
    return Source(
        loader.dataset,
        False,
        collate,
        batching.batch_size,
        sampler=batching.sampler,
        drop_last=batching.drop_last,
        workers=workers,
    )


def _looks_like_dataset(data: Any) -> bool:
    """Whether an object has a length and items (Hugging Face data sets); a list or tuple contains batches."""
    if isinstance(data, (list, tuple, str, bytes, Mapping)):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _are_columns(columns: tuple[Any, ...]) -> bool:
    """Whether a tuple is (inputs, targets), tensors or arrays with as many samples each; a list contains batches."""
    lengths = {len(column) for column in columns if isinstance(column, (torch.Tensor, np.ndarray)) and column.ndim}
    return (
        len(columns) > 1
        and len(lengths) == 1
        and all(isinstance(column, (torch.Tensor, np.ndarray)) for column in columns)
    )


def _iterates_its_own_way(loader: DataLoader[Any]) -> bool:
    kind = type(loader)
    return kind.__iter__ is not DataLoader.__iter__ and not kind.__module__.startswith("torchdata.")
