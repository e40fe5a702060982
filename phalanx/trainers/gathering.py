"""What ranks hold parts of, made whole on the CPUs of those that keep it; the rest hold one tensor at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from phalanx.strategies.base import whole
from phalanx.strategies.placing import placed_before

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from phalanx.strategies.pipeline import Row


def whole_weights(model: nn.Module, *, keep: bool = True) -> dict[str, torch.Tensor] | None:
    """Return all weights of a model on the CPU, gathered from every rank that holds a part of them.

    Every rank calls this; those that do not `keep` them get None.
    """
    return whole_tensors(model, model.state_dict(), keep=keep)


def whole_tensors(model: nn.Module, tensors: Mapping[str, Any], *, keep: bool = True) -> dict[str, Any] | None:
    """Return what is named after parts of a model (weights, gradients), whole and from all stages; as `whole_weights`.

    Tensors that are whole on this CPU already are the memory itself, not a copy.
    """
    placed = placed_before(model)
    found = _of_one_stage(tensors, keep=keep) if placed is None else _of_all_stages(tensors, placed.row, keep=keep)
    return found if keep else None


def whole_state(state: dict[str, Any], *, keep: bool = True) -> dict[str, Any] | None:
    """Return a nested state dict with every tensor whole and on the CPU; None where it is not kept."""
    found: dict[str, Any] = _gathered(state, keep=keep)
    return found if keep else None


def _gathered(value: Any, *, keep: bool) -> Any:
    """Gather every tensor; ranks that do not keep them only help, and let go of each before the next."""
    if isinstance(value, torch.Tensor):
        tensor = whole(value.detach())
        return tensor.cpu().contiguous() if keep else None
    if isinstance(value, dict):
        return {key: _gathered(item, keep=keep) for key, item in value.items()}
    if isinstance(value, list):
        return [_gathered(item, keep=keep) for item in value]
    return value


def _of_one_stage(tensors: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    return {name: _gathered(value, keep=keep) for name, value in tensors.items()}


class _Part(NamedTuple):
    """What one rank of a pipeline tells the others before anything is sent."""

    shapes: dict[str, tuple[torch.Size, torch.dtype] | None]
    """By name; None: not a tensor."""
    keeps: bool


def _of_all_stages(tensors: Mapping[str, Any], row: Row, *, keep: bool) -> dict[str, Any]:
    """Let each stage send its tensors, one by one, to the ranks of its row, if any of them keeps what it gets."""
    shapes = {n: (v.shape, v.dtype) if isinstance(v, torch.Tensor) else None for n, v in tensors.items()}
    parts: list[Any] = [None] * row.size
    dist.all_gather_object(parts, _Part(shapes, keep), group=row.group)
    wanted = any(part.keeps for part in parts)
    found: dict[str, Any] = {}
    for place, part in enumerate(parts):
        for name, shape in part.shapes.items():
            value = whole(tensors[name].detach()) if place == row.place and shape is not None else tensors.get(name)
            if wanted:
                value = _sent(value, shape, row, place)
            if keep:
                found[name] = value.cpu().contiguous() if isinstance(value, torch.Tensor) else value
    return found


def _sent(value: Any, shape: tuple[torch.Size, torch.dtype] | None, row: Row, source: int) -> Any:
    """Give one stage's value to all ranks of the row."""
    mine = source == row.place
    if shape is None:
        box = [value if mine else None]
        dist.broadcast_object_list(box, group=row.group, group_src=source)
        return box[0]
    device = _device_of(row.group)
    tensor = value.to(device).contiguous() if mine else torch.empty(shape[0], dtype=shape[1], device=device)
    dist.broadcast(tensor, group=row.group, group_src=source)
    return value if mine else tensor


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return where a group can broadcast from: nccl knows GPUs only, and gloo is at home on the CPU."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
