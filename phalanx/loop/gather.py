"""Outputs of all ranks in one tensor: `f.gather`, and `f.gather_for_metrics` without placeholders."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from phalanx.errors import UsageError, a_type
from phalanx.torch_compat import pytree
from phalanx.world.abort import raise_if_aborted
from phalanx.world.world import World

if TYPE_CHECKING:
    from phalanx.loop.loader import PreparedLoader


def gather(world: World, values: Any) -> Any:
    """Return each tensor with the rows of all ranks that read different samples, in the order of ranks.

    `values`: a tensor, or tensors in tuples, lists and dicts; the number of rows may differ between ranks.
    """
    leaves, structure = pytree.tree_flatten(values)
    rows = [_rows(leaf, world.device) for leaf in leaves]
    if world.world_size > 1:
        rows = _of_all_ranks(world, rows)
    return pytree.tree_unflatten(rows, structure)


def gather_samples(world: World, values: Any, loader: PreparedLoader | None) -> Any:
    """Return what `gather` does, of the samples of the last batch: each sample of the data set once."""
    if loader is None:
        raise UsageError(
            "gather_for_metrics knows the samples of a batch by its loader, and no prepared loader was read yet",
            hint="Read one that f.prepare or f.prepare_loader has returned, or call f.gather.",
        )
    samples = loader.current.samples

    def real(leaf: Any) -> torch.Tensor:
        tensor = _rows(leaf, world.device)
        if samples and len(tensor) != samples:
            raise UsageError(
                f"gather_for_metrics got {len(tensor)} rows for a batch of {samples} samples",
                hint="Give one row per sample, or call f.gather, which takes any number of rows.",
            )
        return tensor[:samples]  # none of a placeholder, which keeps this rank in step with the others

    return gather(world, pytree.tree_map(real, values))


def _rows(leaf: Any, device: torch.device) -> torch.Tensor:
    if not isinstance(leaf, (torch.Tensor, bool, int, float)):
        raise UsageError(
            f"gather got {a_type(leaf)}, which is not a tensor",
            hint="Give tensors, or a tuple or dict of them.",
        )
    tensor = torch.as_tensor(leaf).detach().to(device)
    return tensor if tensor.ndim else tensor[None]


def _of_all_ranks(world: World, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Concatenate tensors of the same form over the ranks: one all-gather of their lengths, and one for each tensor."""
    form = zlib.crc32(repr([(tensor.shape[1:], tensor.dtype) for tensor in tensors]).encode())
    lengths = _all_gather(world, torch.tensor([form, len(tensors)], device=world.device))
    if len({tuple(length.tolist()) for length in lengths}) > 1:
        descriptions = ", ".join(f"{list(tensor.shape)} of {tensor.dtype}" for tensor in tensors)
        raise UsageError(
            f"gather got tensors that differ between the ranks in more than their number of rows; here {descriptions}",
            hint="Give the same tensors on every rank, with equal shapes after the first dimension.",
        )
    counts = torch.stack(_all_gather(world, torch.tensor([len(tensor) for tensor in tensors], device=world.device)))
    leading = [rank for rank in range(world.world_size) if world.mesh.leads_samples(rank)]
    gathered = []
    for tensor, rows in zip(tensors, counts.T.tolist(), strict=True):
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = _all_gather(world, padded)
        gathered.append(torch.cat([parts[rank][: rows[rank]] for rank in leading]))
    raise_if_aborted()  # else a part of them
    return gathered


def _all_gather(world: World, tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(world.world_size)]
    dist.all_gather(parts, tensor)
    return parts
