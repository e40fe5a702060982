"""Load a chosen checkpoint: compare it with the model, then read the tensors in place and the rest of the state."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadItemType

from phalanx.checkpoint import chunks, collectives
from phalanx.checkpoint.fetch import Box, Opener, read_boxes
from phalanx.checkpoint.find import Checkpoint, Choice, choose, read_file, read_index
from phalanx.checkpoint.hashed_files import Leaf
from phalanx.checkpoint.index import DamagedError, Index
from phalanx.checkpoint.locations import storage_and_name
from phalanx.checkpoint.manifest import Manifest, TensorInfo
from phalanx.checkpoint.plain import from_plain, rank_file_name
from phalanx.checkpoint.storage import Reader
from phalanx.errors import CheckpointError, nearest


@dataclass(frozen=True)
class LoadedState:
    """The contents of a checkpoint except the tensors, which are loaded into the template."""

    step: int
    epoch: int
    shared: dict[str, Any]
    rank_state: Any
    """That of this rank; None where the number of ranks has changed."""
    notes: list[str] = field(default_factory=list)
    taken_over: list[Any] = field(default_factory=list)
    """The states of the ranks that saved it which fall to this one; where there are more ranks now, that of rank 0."""


def load(checkpoint: Checkpoint, template: dict[str, Any], *, with_lost_ranks: bool = False) -> LoadedState:
    """Read a checkpoint into `template`, a state dict in the layout of this run; collective with a process group.

    `template` may have fewer top-level entries than the checkpoint (for instance only the model). Tensors are filled in
    place from any layout; numbers are replaced. `with_lost_ranks`: also read the states of lost ranks.
    An error on any rank is raised on all of them.
    """

    def read() -> LoadedState:
        _fill(checkpoint, template)
        return _loaded(checkpoint, with_lost_ranks=with_lost_ranks)

    return collectives.on_all(read)


def load_newest(
    path: Path | str,
    template_of: Callable[[Checkpoint], dict[str, Any]],
    *,
    required: bool = False,
    run_id: str | None = None,
    with_lost_ranks: bool = False,
) -> tuple[Choice, dict[str, Any], LoadedState | None]:
    """Choose as `choose` does and load into the template for it; what is read is verified while it is read.

    Where that finds damage, all checkpoints are verified, and the newest intact one is loaded instead.
    """
    choice = choose(path, required=required, run_id=run_id, deep=False)
    if choice.checkpoint is None:
        return choice, {}, None
    try:
        template = template_of(choice.checkpoint)
        return choice, template, load(choice.checkpoint, template, with_lost_ranks=with_lost_ranks)
    except DamagedError:  # the state may be half loaded: only an intact checkpoint helps
        choice = choose(path, required=True, run_id=run_id)
        assert choice.checkpoint is not None, "required"
        template = template_of(choice.checkpoint)
        return choice, template, load(choice.checkpoint, template, with_lost_ranks=with_lost_ranks)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """torch's planner, which knows every kind of sharded tensor."""

    def put(self, name: str, value: Any) -> None:
        """Put a value that is not a tensor into the state dict."""
        path = self.mappings[name]
        holder: Any = self.original_state_dict
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value


def read_tensors(checkpoint: Checkpoint, template: dict[str, Any]) -> None:
    """Fill `template` from a checkpoint; collective with a process group."""
    collectives.on_all(lambda: _fill(checkpoint, template))


def _fill(checkpoint: Checkpoint, template: dict[str, Any]) -> None:
    index = read_index(checkpoint)
    boxes = plan_reads(index, template, lambda rank: _rank_file(checkpoint, rank)["objects"], str(checkpoint.path))
    read_boxes(index, data_opener(checkpoint, index), boxes)


def data_opener(checkpoint: Checkpoint, index: Index) -> Opener:
    """Return what opens the data files of a checkpoint, or the chunks of an incremental one."""
    storage, name = storage_and_name(checkpoint.path)

    def opener(file: str, leaf: Leaf | None) -> Reader:
        if leaf is not None and index.chunk_folder is not None:
            return storage.open(*chunks.location(index.chunk_folder, leaf.hash))
        return storage.open(name, file)

    return opener


def plan_reads(
    index: Index, template: dict[str, Any], objects_of: Callable[[int], dict[str, Any]], where: str
) -> list[Box]:
    """Put the values that are not tensors into `template`, and return the boxes that its tensors need."""
    planner = _LoadPlanner()
    try:
        planner.set_up_planner(template, index.metadata(), is_coordinator=collectives.rank() == 0)
        items = planner.create_local_plan().items
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"rank {collectives.rank()} could not read {where}: {type(error).__name__}: {error}",
            hint="Resume with the model, optimizer and strategy that the checkpoint was saved with.",
        ) from error
    parts = {(name, part.offsets): part for name, tensor in index.tensors.items() for part in tensor.parts}
    boxes: list[Box] = []
    values: dict[int, dict[str, Any]] = {}
    for item in items:
        name = item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO:
            rank = index.objects[name]
            if rank not in values:
                values[rank] = objects_of(rank)
            planner.put(item.dest_index.fqn, values[rank][name])
            continue
        part = parts[name, tuple(item.storage_index.offset or (0,) * len(item.lengths))]
        target = planner.resolve_tensor(item).detach()
        dtype = index.tensors[name].torch_dtype
        boxes.append(Box(part, dtype, tuple(item.storage_offsets), tuple(item.lengths), target))
    return boxes


def entries(checkpoint: Checkpoint) -> set[str]:
    """Return the entries of a checkpoint's state at all levels: "model", "optimizer.state", "model.head.weight", ..."""
    index = read_index(checkpoint)
    parts = (name.split(".") for name in [*index.tensors, *index.objects])
    return {".".join(words[:count]) for words in parts for count in range(1, len(words) + 1)}


def stored_tensors(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """Return the whole shape and the dtype of every tensor of a checkpoint, by its flat name: "model.head.weight"."""
    return {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in read_index(checkpoint).tensors.items()}


def _loaded(checkpoint: Checkpoint, *, with_lost_ranks: bool) -> LoadedState:
    """Return everything of a checkpoint that is not a tensor."""
    manifest, rank = checkpoint.manifest, collectives.rank()
    then, now = manifest.world_size, collectives.world_size()
    about = manifest.step, manifest.epoch, manifest.shared
    if then == now:
        state = _rank_file(checkpoint, rank)["state"]
        return LoadedState(*about, state, taken_over=[state])
    note = f"saved by {then} ranks and resumed by {now}: each rank's random state starts afresh"
    old = (range(rank, then, now) or [0]) if with_lost_ranks else []
    return LoadedState(*about, None, [note], [_rank_file(checkpoint, old_rank)["state"] for old_rank in old])


def _rank_file(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    file = rank_file_name(rank)
    if file not in checkpoint.manifest.files:
        raise DamagedError(f"{checkpoint.path} has no state of rank {rank}")
    data = read_file(checkpoint, file)
    try:
        content: dict[str, Any] = from_plain(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
        return {"objects": content["objects"], "state": content["state"]}
    except (RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{checkpoint.path / file} cannot be read: {error}") from error


def compare_model(manifest: Manifest, model: Mapping[str, tuple[Sequence[int], str | torch.dtype]]) -> None:
    """Raise a CheckpointError with the first parameter in which the checkpoint and the model differ.

    `model` maps each canonical name to its global shape and dtype, in the model's order.
    """
    saved = manifest.tensors
    for name, (shape, dtype) in model.items():
        info = TensorInfo(tuple(shape), str(dtype).removeprefix("torch."))
        if name not in saved:
            raise _other_names(saved, model, name)
        if saved[name] != info:
            raise _different(name, saved[name], info)
    if len(saved) > len(model):
        raise _other_names(saved, model, next(name for name in saved if name not in model))


def _different(name: str, saved: TensorInfo, info: TensorInfo) -> CheckpointError:
    then, now = (list(saved.shape), list(info.shape)) if saved.shape != info.shape else (saved.dtype, info.dtype)
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
