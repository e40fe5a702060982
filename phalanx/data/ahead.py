"""Fetch small batches of a plain data set ahead, in worker processes that write several batches for one message.

A message between processes costs as much as fetching a small batch, so a message stands for a group of batches, which
are in memory that the processes share from the start: to send memory costs more than to fill it. The order and the
random numbers are those of the process itself: requests are the same, and each has its seed. Only where nothing can
tell the difference: the data set can be pickled, so that it holds no open file or connection, whose position forked
processes would share.
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
HELD = 65
"""Batches that may still be in use when the next one is asked for: the micro-batches of a step, and one ahead."""
_SHARED_BYTES = 48 << 20
"""Free shared memory for each rank without which nothing is fetched ahead; a container has 64 MiB unless told so."""
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
        if space.f_bavail * space.f_frsize >= ranks_here * _SHARED_BYTES:
            return min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // ranks_here - 2)
    return 0


class _ByteCounter(io.RawIOBase):
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
        _Pickler(_ByteCounter(), protocol=5).dump(dataset)
    except Exception:  # noqa: BLE001 - objects raise anything where they cannot be pickled
        return False
    return True


class SharedGroups:
    """Shared memory for groups of batches of one form: workers write, the process that trains reads."""

    def __init__(self, batch: Any, size: int, count: int) -> None:
        self._kind, self._names = type(batch), list(batch) if type(batch) is dict else None
        fields = self._fields(batch)
        self._forms = [(field.shape, field.dtype) for field in fields]
        self._memory = [
            [torch.empty((size, *shape), dtype=dtype) for shape, dtype in self._forms] for _ in range(count)
        ]
        for memory in itertools.chain(*self._memory):
            memory.share_memory_()  # type: ignore[no-untyped-call]

    def _fields(self, batch: Any) -> list[torch.Tensor]:
        return list(batch.values()) if self._names else list(batch)

    def _has_form(self, batch: Any) -> bool:
        if type(batch) is not self._kind or (self._names is not None and list(batch) != self._names):
            return False
        fields = self._fields(batch)
        plain = all(type(field) is torch.Tensor and not field.requires_grad for field in fields)
        return plain and [(field.shape, field.dtype) for field in fields] == self._forms

    def write(self, slot: int, batches: list[Any]) -> int | None:
        """Write batches, and return how many; None where one of them has another form."""
        if not all(map(self._has_form, batches)):
            return None
        for field, memory in zip(zip(*map(self._fields, batches), strict=True), self._memory[slot], strict=True):
            torch.stack(field, out=memory[: len(batches)])
        return len(batches)

    def read(self, slot: int, count: int) -> Iterator[Any]:
        """Yield the batches, where they are: they are written over when all other slots have been."""
        for parts in zip(*(memory[:count].unbind() for memory in self._memory[slot]), strict=True):
            yield dict(zip(self._names, parts, strict=True)) if self._names else self._kind(parts)


class GroupFetcher(Dataset[Any]):
    """Fetches a group of batches into a slot; in a worker process."""

    def __init__(self, fetcher: BatchFetcher, slots: SharedGroups) -> None:
        self._fetcher, self._slots = fetcher, slots

    def __getitem__(self, group: tuple[int, list[BatchRequest]]) -> tuple[int, Any]:
        """Return the slot, and how many batches are in it; batches of another form instead."""
        slot, requests = group
        batches = [self._fetcher[request] for request in requests]
        count = self._slots.write(slot, batches)
        return slot, batches if count is None else count


def fetch_ahead(
    fetcher: BatchFetcher, cuts: Iterator[Cut], epoch: int, first: Any, workers: int, generator: torch.Generator
) -> Iterator[tuple[MicroInfo, Any]]:
    """Yield the micro-batches of the cuts, fetched by worker processes; after an error in these, by this process.

    `first`: a batch like those to come. The memory of a batch is used again when HELD more have been asked for.
    """
    pending: deque[Cut] = deque()
    size, loader = group_size(first), None
    count = workers * _MESSAGES + 1 + -(-HELD // size)

    def groups() -> Iterator[tuple[int, list[BatchRequest]]]:
        for number in itertools.count():
            if not (group := list(itertools.islice(cuts, size))):
                return
            pending.extend(group)
            yield number % count, [BatchRequest(cut.indices, epoch, cut.info.offset) for cut in group]

    try:
        slots = SharedGroups(first, size, count)
        loader = DataLoader(
            GroupFetcher(fetcher, slots),
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
        for slot, item in loader:
            for batch in slots.read(slot, item) if isinstance(item, int) else item:
                yield pending.popleft().info, batch
    except Exception as error:  # noqa: BLE001 - what the data set itself raises, it raises here again
        why = str(error).strip().splitlines()[-1:]
        warnings.warn(f"batches are fetched by the training process again: {' '.join(why)}", stacklevel=2)
    finally:
        torch_compat.shutdown_workers(loader)
    for cut in itertools.chain(list(pending), cuts):
        yield cut.info, fetcher[BatchRequest(cut.indices, epoch, cut.info.offset)]


def _as_here(worker_id: int) -> None:
    """Let the data set find in a worker process what it finds in the process that trains."""
    torch_compat.hide_worker_info()
