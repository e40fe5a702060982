"""Data sets that hand out a whole batch at once: one index_select a tensor instead of a Python call a sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable


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
