"""Fetch small batches of a plain data set ahead, in worker processes that return several batches in one message.

A message between processes costs as much as fetching a small batch, so a message holds a group of batches, stacked into
one tensor per field. The order and the random numbers are those of the process itself: requests are the same, and each
has its seed. Only where nothing can tell the difference: the data set can be pickled, so that it holds no open file or
connection, whose position forked processes would share.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from phalanx import torch_compat
from phalanx.data.fetch import BatchFetcher, BatchRequest, return_as_is
from phalanx.data.order import Cut, MicroInfo

_GROUP_BYTES = 1 << 20
_MOST_IN_GROUP = 32
_MOST_WORKERS = 4
_MESSAGES = 3
"""Groups that each worker prepares in advance."""
_SHARED_BYTES = 64 << 20
"""Free shared memory without which nothing is fetched ahead; a container has 64 MiB unless it is given more."""
_PICKLED_BYTES = 16 << 20
_PICKLING = ("__getstate__", "__reduce__", "__reduce_ex__")


def group_size(batch: Any) -> int:
    """Return how many batches like this one make a message; 0: they are not small tensors in a list, tuple or dict."""
    fields = batch.values() if type(batch) is dict else batch if type(batch) in (list, tuple) else ()
    tensors = [field for field in fields if type(field) is torch.Tensor and field.device.type == "cpu"]
    size = sum(tensor.nbytes for tensor in tensors)
    if not tensors or len(tensors) != len(fields) or 4 * size > _GROUP_BYTES:
        return 0
    return min(_MOST_IN_GROUP, _GROUP_BYTES // max(size, 1))


def worker_count(ranks_here: int) -> int:
    """Return how many processes may fetch for this rank; 0 where cores or shared memory are scarce."""
    with suppress(OSError):
        space = os.statvfs("/dev/shm")
        if space.f_bavail * space.f_frsize >= _SHARED_BYTES:
            return min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // ranks_here - 2)
    return 0


class _Counting(io.RawIOBase):
    """Takes bytes and drops them; raises where there are too many."""

    def __init__(self) -> None:
        self._bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._bytes += len(data)
        if self._bytes > _PICKLED_BYTES:
            raise pickle.PicklingError("too large to look through")
        return len(data)


class _Pickler(pickle.Pickler):
    """Pickles an object apart from the contents of arrays and tensors."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if item.device.type != "cpu":
                raise pickle.PicklingError("a tensor on a device, which a forked process cannot use")
            return str, ()
        if type(item) is np.ndarray and item.dtype != object:
            return str, ()
        if _pickles_itself(type(item)):
            raise pickle.PicklingError("it may leave out a file, which a forked process shares")
        return NotImplemented


def _pickles_itself(kind: type) -> bool:
    """Whether a class that is not of a library says itself what of it is pickled."""
    if kind.__module__.partition(".")[0] in (*sys.stdlib_module_names, "numpy", "torch"):
        return False
    return any(getattr(kind, name, None) is not getattr(object, name, None) for name in _PICKLING)


def holds_data_only(dataset: Any) -> bool:
    """Whether a data set can be pickled: then it holds no file, connection or lock that processes would share."""
    try:
        _Pickler(_Counting(), protocol=5).dump(dataset)
    except Exception:  # noqa: BLE001 - objects raise anything where they cannot be pickled
        return False
    return True


class GroupFetcher(Dataset[Any]):
    """Fetches a group of batches; in a worker process."""

    def __init__(self, fetcher: BatchFetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, requests: list[BatchRequest]) -> Any:
        return grouped([self._fetcher[request] for request in requests])


def grouped(batches: list[Any]) -> tuple[Any, list[Any]]:
    """Return the batches as one tensor per field, and how to take them apart; other batches as they are."""
    first = batches[0]
    names = list(first) if type(first) is dict else None
    fields = [list(batch.values()) if names else list(batch) for batch in batches] if group_size(first) else []
    forms = {tuple((field.shape, field.dtype) for field in batch) for batch in fields}
    if len(forms) != 1 or any(type(batch) is not type(first) for batch in batches):
        return None, batches
    return (type(first), names), [torch.stack(field) for field in zip(*fields, strict=True)]


def taken_apart(form: Any, fields: list[Any]) -> Iterator[Any]:
    """Yield the batches of `grouped`."""
    if form is None:
        yield from fields
        return
    kind, names = form
    for parts in zip(*(field.unbind() for field in fields), strict=True):
        yield dict(zip(names, parts, strict=True)) if names else kind(parts)


def fetch_ahead(
    fetcher: BatchFetcher, cuts: Iterator[Cut], epoch: int, size: int, workers: int, generator: torch.Generator
) -> Iterator[tuple[MicroInfo, Any]]:
    """Yield the micro-batches of the cuts, fetched by worker processes; after an error in these, by this process."""
    pending: deque[Cut] = deque()

    def groups() -> Iterator[list[BatchRequest]]:
        while group := list(itertools.islice(cuts, size)):
            pending.extend(group)
            yield [BatchRequest(cut.indices, epoch, cut.info.offset) for cut in group]

    loader: DataLoader[Any] = DataLoader(
        GroupFetcher(fetcher),
        batch_size=None,
        sampler=groups(),  # iterated once
        num_workers=workers,
        prefetch_factor=_MESSAGES,
        collate_fn=return_as_is,
        worker_init_fn=_as_here,
        multiprocessing_context="fork",
        persistent_workers=True,  # so that they can be ended here
        generator=generator,
    )
    try:
        for form, fields in loader:
            for batch in taken_apart(form, fields):
                yield pending.popleft().info, batch
    except Exception as error:  # noqa: BLE001 - what the data set itself raises, it raises here again
        first = str(error).strip().splitlines()[-1:]
        warnings.warn(f"batches are fetched by the training process again: {' '.join(first)}", stacklevel=2)
    finally:
        torch_compat.shutdown_workers(loader)
    for cut in itertools.chain(list(pending), cuts):
        yield cut.info, fetcher[BatchRequest(cut.indices, epoch, cut.info.offset)]


def _as_here(worker_id: int) -> None:
    """Let the data set find in a worker process what it finds in the process that trains."""
    torch_compat.hide_worker_info()
