"""Gather sharded tensors to full CPU tensors on chosen ranks; write and read weights alone.

Ranks that do not keep the gathered tensors hold one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from phalanx import checkpoint, torch_compat
from phalanx.errors import CheckpointError, a_type, nearest
from phalanx.strategies.base import part_like, whole
from phalanx.strategies.tensors import PLACED, is_meta, is_placed, materialise

if TYPE_CHECKING:
    from phalanx.strategies.pipeline.strategy import Row


def whole_weights(model: nn.Module, *, keep: bool = True) -> dict[str, torch.Tensor] | None:
    """Return all weights of a model on the CPU, gathered from every rank that holds a part of them.

    Every rank calls this; those that do not `keep` them get None.
    """
    return whole_tensors(model, model.state_dict(), keep=keep)


def whole_tensors(model: nn.Module, tensors: Mapping[str, Any], *, keep: bool = True) -> dict[str, Any] | None:
    """Return what is named after parts of a model (weights, gradients), whole and from all stages; as `whole_weights`.

    Tensors that are whole on this CPU already are the memory itself, not a copy.
    """
    if not is_placed(model):
        return whole_state(dict(tensors), keep=keep)
    gathered = _of_all_stages(tensors, model.__dict__[PLACED].row, keep=keep)
    return gathered if keep else None


def whole_state(state: dict[str, Any], *, keep: bool = True) -> dict[str, Any] | None:
    """Return a nested state dict with every tensor whole and on the CPU; None where it is not kept."""
    gathered: dict[str, Any] = _gathered(state, keep=keep)
    return gathered if keep else None


def _gathered(value: Any, *, keep: bool) -> Any:
    """Gather every tensor; ranks that do not keep them only take part, and free each before the next."""
    if isinstance(value, torch.Tensor):
        tensor = whole(value.detach())
        return tensor.cpu().contiguous() if keep else None
    if isinstance(value, dict):
        return {key: _gathered(item, keep=keep) for key, item in value.items()}
    if isinstance(value, list):
        return [_gathered(item, keep=keep) for item in value]
    return value


class _Part(NamedTuple):
    """What one rank of a pipeline sends to the others before any tensor."""

    shapes: dict[str, tuple[torch.Size, torch.dtype] | None]
    """By name; None: not a tensor."""
    keeps: bool


def _of_all_stages(tensors: Mapping[str, Any], row: Row, *, keep: bool) -> dict[str, Any]:
    """Send each stage's tensors, one by one, to the ranks of its row, if any of them keeps them."""
    shapes = {n: (v.shape, v.dtype) if isinstance(v, torch.Tensor) else None for n, v in tensors.items()}
    parts: list[Any] = [None] * row.size
    dist.all_gather_object(parts, _Part(shapes, keep), group=row.group)
    is_kept = any(part.keeps for part in parts)
    tensors_here: dict[str, Any] = {}
    for stage, part in enumerate(parts):
        for name, shape in part.shapes.items():
            value = whole(tensors[name].detach()) if stage == row.position and shape is not None else tensors.get(name)
            if is_kept:
                value = _sent(value, shape, row, stage)
            if keep:
                tensors_here[name] = value.cpu().contiguous() if isinstance(value, torch.Tensor) else value
    return tensors_here


def _sent(value: Any, shape: tuple[torch.Size, torch.dtype] | None, row: Row, source: int) -> Any:
    """Broadcast one stage's value to all ranks of the row."""
    is_source = source == row.position
    if shape is None:
        box = [value if is_source else None]
        dist.broadcast_object_list(box, group=row.group, group_src=source)
        return box[0]
    device = _device_of(row.group)
    tensor = value.to(device).contiguous() if is_source else torch.empty(shape[0], dtype=shape[1], device=device)
    dist.broadcast(tensor, group=row.group, group_src=source)
    return value if is_source else tensor


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return where a group can broadcast from: nccl works on GPUs only, gloo on the CPU."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


_TORCH_SUFFIXES = {".pt", ".pth"}
_Info = tuple[torch.Size, torch.dtype]


def save_weights(model: nn.Module, path: Path, *, writes: bool = True) -> None:
    """Write the weights, all or none: safetensors, or torch's own format for .pt and .pth.

    Every rank calls this, since sharded weights are gathered from all of them; only the one with `writes` writes.
    """
    state = whole_weights(model, keep=writes)
    if state is None:
        return
    state = {torch_compat.uncompiled_name(name): value for name, value in state.items()}
    temporary = path.with_name(f".{path.name}.writing")
    try:
        try:
            _write(state, temporary, torch_format=path.suffix in _TORCH_SUFFIXES)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except Exception as error:  # torch and safetensors have different errors for a full disk
        raise CheckpointError(f"the weights cannot be written to {path}: {error}") from error


def return_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load weights that ranks trained into the user's model; one on the meta device gets memory for them first."""
    if is_meta(model):
        with torch.random.fork_rng(devices=[]):  # what it draws is overwritten
            materialise(model, "cpu")
    model.load_state_dict(weights)


def _write(state: dict[str, torch.Tensor], path: Path, *, torch_format: bool) -> None:
    if torch_format:
        torch.save(state, str(path))
        return
    from safetensors.torch import save_file

    save_file(_without_sharing(state), str(path))


def load_weights(model: nn.Module, path: Path) -> None:
    """Read weights from a file, or from the newest complete checkpoint of a directory (or the one given).

    Every rank that holds a part of the model calls this, and takes its part.
    """
    if path.is_dir():
        _load_from_checkpoint(model, path)
        return
    if not path.is_file():
        near = nearest(path.name, [file.name for file in path.parent.glob("*")])
        raise CheckpointError(
            f"no weights at {path}: there is neither a file nor a checkpoint directory",
            hint=f"Did you mean '{path.with_name(near)}'?" if near else "Files end with .safetensors, .pt or .pth.",
        )
    saved = read_weights(path)
    state = model.state_dict()
    names = {name: torch_compat.uncompiled_name(name) for name in state}
    _compare(path, saved, {torch_compat.uncompiled_name(n): info for n, info in _described(model, state).items()})
    model.load_state_dict({name: part_like(saved[names[name]], value) for name, value in state.items()})


def read_weights(path: Path) -> Mapping[str, Any]:
    """Return the weights in a file by name: safetensors, or torch's own format for .pt and .pth."""
    try:
        if path.suffix in _TORCH_SUFFIXES:
            state: Any = torch.load(path, map_location="cpu", weights_only=True)
        else:
            from safetensors.torch import load_file

            state = load_file(str(path))
    except Exception as error:  # each reader has its own errors for a damaged file
        raise CheckpointError(f"{path} cannot be read as weights: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds {a_type(state)}, not a state dict of weights")
    return {torch_compat.uncompiled_name(name): value for name, value in state.items()}


def _described(model: nn.Module, state: Mapping[str, Any]) -> dict[str, _Info | None]:
    """Return whole shape and dtype of every entry by name, those of all pipeline stages; None: not a tensor."""
    infos = {n: (v.shape, v.dtype) if isinstance(v, torch.Tensor) else None for n, v in state.items()}
    if not is_placed(model):
        return infos
    from phalanx.strategies.pipeline.placement import join_stages

    return join_stages(model, infos)


def _compare(path: Path, saved: Mapping[str, Any], infos: Mapping[str, _Info | None]) -> None:
    """Raise for the first parameter in which a file and the model differ."""
    for name, info in infos.items():
        if name not in saved:
            close = nearest(name, saved)
            has = f" (it has '{close}')" if close else ""
            raise CheckpointError(f"{path} has no '{name}'{has}, which the model has")
        tensor = saved[name]
        if info is not None and isinstance(tensor, torch.Tensor) and tensor.shape != info[0]:
            then, now = list(tensor.shape), list(info[0])
            raise CheckpointError(f"{path} belongs to another model: '{name}' is {then} in it and {now} in the model")
    extra = next((name for name in saved if name not in infos), None)
    if extra is not None:
        raise CheckpointError(f"{path} has '{extra}', which the model does not have")


def _load_from_checkpoint(model: nn.Module, path: Path) -> None:
    state = get_model_state_dict(model)
    tensors = {name: info for name, info in _described(model, state).items() if info is not None}

    def template_of(stored: checkpoint.Checkpoint) -> dict[str, Any]:
        checkpoint.compare_model(stored.manifest, tensors)
        return {"model": state}

    checkpoint.load_newest(path, template_of, required=True)
    set_model_state_dict(model, state)


def _without_sharing(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors that share memory (tied weights): safetensors stores each once."""
    pointers: set[int] = set()
    separate = {}
    for name, value in state.items():
        separate[name] = value.clone() if value.data_ptr() in pointers and value.numel() else value
        pointers.add(value.data_ptr())
    return separate
