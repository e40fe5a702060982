"""The rows of a batch, which may be a tensor or any nest of tensors: counted, cut, filled up."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree


def count_rows(batch: Any) -> int:
    """Return the samples of a batch."""
    return next(leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def cut_rows(batch: Any, start: int, end: int) -> Any:
    """Return the samples from `start` to before `end`."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[start:end], batch)


def fill_rows(batch: Any, rows: int, wanted: int) -> Any:
    """Fill a short batch up with its last row."""

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor[-1:].expand(wanted - rows, *tensor.shape[1:])])

    return tuple(pytree.tree_map_only(torch.Tensor, fill, item) for item in batch)
