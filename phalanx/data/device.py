"""Moving batches of any nesting to the device, on CUDA one batch ahead of the computation."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from phalanx.data.order import MicroInfo


_SMALL_BYTES = 64 << 10
"""Up to this size CUDA stages a copy from pageable memory itself, and returns without waiting for the device."""


def map_batch(batch: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool]) -> Any:
    """Rebuild `batch` with `function` applied to every leaf of its lists, (named) tuples, mappings and dataclasses."""
    if is_leaf(batch):
        return function(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_batch(part, function, is_leaf) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)([map_batch(part, function, is_leaf) for part in batch])
    if type(batch) is dict:
        return {key: map_batch(value, function, is_leaf) for key, value in batch.items()}
    if isinstance(batch, Mapping):
        mapping: Any = copy.copy(batch)
        for key, value in batch.items():
            mapping[key] = map_batch(value, function, is_leaf)
        return mapping
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # object.__setattr__ reaches frozen dataclasses and fields that __init__ does not take.
            object.__setattr__(moved, field.name, map_batch(getattr(batch, field.name), function, is_leaf))
        return moved
    return batch


def to_device(batch: Any, device: torch.device | str, *, non_blocking: bool = False) -> Any:
    """Return `batch` on `device`; objects with a method `to` (BatchEncoding, graphs) move themselves."""
    if type(batch) in (list, tuple) and all(type(part) is torch.Tensor for part in batch):  # a tenth of the time
        return type(batch)([part.to(device, non_blocking=non_blocking) for part in batch])

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) or _takes_non_blocking(type(leaf).to):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device)

    return map_batch(batch, move, lambda part: isinstance(part, torch.Tensor) or callable(getattr(part, "to", None)))


def pin(batch: Any) -> Any:
    """Return `batch` in page-locked memory, from which copies to the accelerator overlap with computation."""

    def pinned(leaf: Any) -> Any:
        return leaf if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" else leaf.pin_memory()

    return map_batch(batch, pinned, lambda part: callable(getattr(part, "pin_memory", None)))


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """Return page-locked memory for a large tensor in a process that uses CUDA (a forked one does not), else None."""
    if math.prod(shape) * dtype.itemsize <= _SMALL_BYTES or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def batch_length(batch: Any) -> int:
    """Return how many samples a ready-made batch has: the size of dimension 0 of its first tensor.

    Tensors in a list inside the batch do not tell: they are several inputs, or one sample each. Then a tensor beside
    the list does (the targets).
    """
    parts = _parts(batch)
    sizes = [_size(part) for part in ([batch] if parts is None else parts)]
    length = next((size for size in sizes if size is not None), None)
    if length is not None:
        return length
    if isinstance(batch, torch.Tensor):
        return 1
    nested = [part for part in parts or () if _parts(part)]
    if not nested or _are_samples(batch):
        return len(batch) if hasattr(batch, "__len__") else 1
    return batch_length(nested[0]) if _named(nested[0]) else _length_of_lists(nested)


def _length_of_lists(lists: list[Any]) -> int:
    """Return how many samples lists hold: several inputs have one size, samples in general do not."""
    sizes = {_size(item) for part in lists for item in (_parts(part) or ())}
    only = sizes.pop()
    return len(lists[0]) if sizes or only is None else only


def _parts(batch: Any) -> list[Any] | None:
    """Return what a list, tuple, mapping or dataclass holds; None for anything else."""
    if isinstance(batch, (list, tuple)):
        return list(batch)
    return list(_named(batch).values()) if _named(batch) else None


def _named(batch: Any) -> dict[Any, Any]:
    """Return the values of a mapping or a dataclass by name; nothing for anything else."""
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return dict(batch) if isinstance(batch, Mapping) else {}


def _are_samples(batch: Any) -> bool:
    """Whether a list holds one mapping of the same names per sample."""
    return isinstance(batch, list) and all(
        isinstance(part, Mapping) and part.keys() == batch[0].keys() for part in batch
    )


def _size(part: Any) -> int | None:
    """Return the size of dimension 0 of a tensor or an array; None for anything else."""
    shape = None if isinstance(part, type) else getattr(part, "shape", None)
    return int(shape[0]) if shape else None


def staged(
    pairs: Iterator[tuple[MicroInfo, Any]],
    device: torch.device,
    *,
    pin_first: bool,
    leave_small: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[MicroInfo, Any]]:
    """Move each batch to `device`: on CUDA one batch ahead, large ones in a side stream; on the CPU at no cost.

    `leave_small`: whether small batches stay on the host, for what copies them to its own place on the device.
    """
    if device.type == "cpu":
        return pairs
    if device.type == "cuda":
        return _one_ahead(pairs, device, pin_first, leave_small)
    return ((info, to_device(batch, device, non_blocking=True)) for info, batch in pairs)


def _one_ahead(
    pairs: Iterator[tuple[MicroInfo, Any]], device: torch.device, pin_first: bool, leave_small: Callable[[], bool]
) -> Iterator[tuple[MicroInfo, Any]]:
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def stage(pair: tuple[MicroInfo, Any]) -> tuple[MicroInfo, Any, bool]:
        info, batch = pair
        if _is_small(batch):
            return info, batch, False
        batch = pin(batch) if pin_first else batch
        with torch.cuda.stream(side):
            return info, to_device(batch, device, non_blocking=True), True

    following = next(pairs, None)
    ahead = stage(following) if following is not None else None
    while ahead is not None:
        info, batch, aside = ahead
        if aside:  # before the next copy is queued, so that the computation waits for its own batch only
            _hand_over(batch, side, device)
        following = next(pairs, None)
        ahead = stage(following) if following is not None else None
        if not aside and not leave_small():
            batch = to_device(batch, device, non_blocking=True)
        yield info, batch


def _is_small(batch: Any) -> bool:
    """Whether a batch of plain tensors is so small that pinning it and a second stream cost more than the copy."""
    parts = batch if isinstance(batch, (list, tuple)) else batch.values() if type(batch) is dict else (batch,)
    total = 0
    for part in parts:
        if type(part) is not torch.Tensor:
            return False
        total += part.nbytes
    return total <= _SMALL_BYTES


def _hand_over(batch: Any, side: torch.cuda.Stream, device: torch.device) -> None:
    """Make the computing stream wait for the copy, and keep the memory until the computation is done."""
    current = torch.cuda.current_stream(device)
    current.wait_stream(side)

    def record(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.is_cuda:
            leaf.record_stream(current)
        return leaf

    map_batch(batch, record, lambda part: callable(getattr(part, "record_stream", None)))


@lru_cache(maxsize=64)
def _takes_non_blocking(move: Callable[..., Any]) -> bool:
    parameters = inspect.signature(move).parameters.values()
    return any(parameter.name == "non_blocking" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
