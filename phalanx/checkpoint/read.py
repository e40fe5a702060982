"""Load a chosen checkpoint: compare it with the model, then read the tensors in place and the rest of the state."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from phalanx.checkpoint import group
from phalanx.checkpoint.find import Checkpoint
from phalanx.checkpoint.manifest import Manifest, TensorInfo
from phalanx.checkpoint.storage import (
    PlainLoadPlanner,
    ShardReader,
    first_cause,
    from_plain,
    quiet_without_group,
    rank_file_name,
)
from phalanx.errors import CheckpointError, nearest


@dataclass(frozen=True)
class Loaded:
    """The contents of a checkpoint except the tensors, which are loaded into the template."""

    step: int
    epoch: int
    shared: dict[str, Any]
    rank_state: Any
    notes: list[str] = field(default_factory=list)


def load(checkpoint: Checkpoint, template: dict[str, Any]) -> Loaded:
    """Read a checkpoint into `template`, a state dict in the layout of this run; collective with a process group.

    `template` may have fewer top-level entries than the checkpoint (for instance only the model). Tensors are filled in
    place from any layout; numbers are replaced.
    """
    read_tensors(checkpoint, template)
    rank_state, notes = read_rank_state(checkpoint)
    manifest = checkpoint.manifest
    return Loaded(manifest.step, manifest.epoch, manifest.shared, rank_state, notes)


def read_tensors(checkpoint: Checkpoint, template: dict[str, Any]) -> None:
    """Fill `template` from the shards of a checkpoint; collective with a process group."""
    try:
        with quiet_without_group():
            dcp.load(
                template,
                storage_reader=ShardReader(checkpoint.path),
                planner=PlainLoadPlanner(),
                no_dist=not group.has_peers(),
            )
    except CheckpointException as failure:
        rank, cause = first_cause(failure)
        raise CheckpointError(
            f"rank {rank} could not read {checkpoint.path}: {type(cause).__name__}: {cause}",
            hint="Resume with the model, optimizer and strategy that the checkpoint was saved with.",
        ) from failure


def entries(checkpoint: Checkpoint) -> set[str]:
    """Return the entries of a checkpoint's state at all levels: "model", "optimizer.state", "model.head.weight", ..."""
    saved = ShardReader(checkpoint.path).read_metadata().state_dict_metadata
    parts = (name.split(".") for name in saved)
    return {".".join(words[:count]) for words in parts for count in range(1, len(words) + 1)}


def read_rank_state(checkpoint: Checkpoint) -> tuple[Any, list[str]]:
    """Return this rank's state, or None and a note where the number of ranks has changed."""
    then, now = checkpoint.manifest.world_size, group.world_size()
    if then != now:
        note = f"saved by {then} ranks and resumed by {now}: each rank's random state starts afresh"
        return None, [note]
    return read_state_of(checkpoint, group.rank()), []


def read_state_of(checkpoint: Checkpoint, rank: int) -> Any:
    """Return the state of one of the ranks that saved a checkpoint."""
    path = checkpoint.path / rank_file_name(rank)
    try:
        return from_plain(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def compare_model(manifest: Manifest, model: Mapping[str, tuple[Sequence[int], str | torch.dtype]]) -> None:
    """Raise a CheckpointError with the first parameter in which the checkpoint and the model differ.

    `model` maps each canonical name to its global shape and dtype, in the model's order.
    """
    saved = manifest.tensors
    for name, (shape, dtype) in model.items():
        here = TensorInfo(tuple(shape), str(dtype).removeprefix("torch."))
        if name not in saved:
            raise _other_names(saved, model, name)
        if saved[name] != here:
            raise _different(name, saved[name], here)
    if len(saved) > len(model):
        raise _other_names(saved, model, next(name for name in saved if name not in model))


def _different(name: str, saved: TensorInfo, here: TensorInfo) -> CheckpointError:
    then, now = (list(saved.shape), list(here.shape)) if saved.shape != here.shape else (saved.dtype, here.dtype)
    return CheckpointError(
        f"the checkpoint belongs to another model: {name} is {then} in the checkpoint and {now} in the model",
        hint="Build the model as it was when the checkpoint was saved, or set another checkpoint_dir.",
    )


def _other_names(
    saved: Mapping[str, TensorInfo], model: Mapping[str, tuple[Sequence[int], str | torch.dtype]], first: str
) -> CheckpointError:
    missing = [name for name in model if name not in saved]
    extra = [name for name in saved if name not in model]
    where = "model" if first in model else "checkpoint"
    other = "checkpoint" if where == "model" else "model"
    close = nearest(first, extra if where == "model" else missing)
    guess = f" (the {other} has {close})" if close else ""
    counts = f"in total {len(missing)} of the model's {len(model)} are missing and {len(extra)} are unexpected"
    return CheckpointError(
        f"the checkpoint belongs to another model: {first} is in the {where} and not in the {other}{guess}; {counts}",
        hint="Build the model as it was when the checkpoint was saved, or set another checkpoint_dir.",
    )
