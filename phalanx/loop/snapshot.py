"""What a run is made of, into a checkpoint and back: weights, optimizers, schedulers, scaler, data position, RNG."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from phalanx import checkpoint
from phalanx.loop.residuals import rank_state, restore_residuals
from phalanx.loop.schedulers import load_scheduler_state, scheduler_state
from phalanx.strategies.optimizer_state import fill_state
from phalanx.world.seed import set_rng_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

    from phalanx.loop.formation import Formation


def save_snapshot(formation: Formation, directory: str | Path, shared: dict[str, Any]) -> checkpoint.SavedCheckpoint:
    """Publish a checkpoint of everything the formation prepared; all ranks must call this."""
    formation.gradients.update_scale()
    for wrapped in formation.models:
        formation.strategy.consolidate(wrapped)
    state = {**shared_state(formation), **shared}
    epoch = formation.loaders[0].epoch if formation.loaders else 0
    saved = checkpoint.save(
        directory,
        checkpoint.Snapshot(formation.step, epoch, tensors_of(formation), rank_state(formation), state),
        run_id=formation.run_id,
        keep_last=formation.config.keep_last,
        lineage=formation.lineage,
        mesh=formation.world.mesh.sizes,
        config=formation.config.to_dict(),
    )
    formation.hold(saved.path.parent)
    return saved


def restore_snapshot(
    formation: Formation, directory: str | Path, *, required: bool = True, this_run: bool = False
) -> dict[str, Any] | None:
    """Restore the newest complete checkpoint; return its shared state, with "path" and "notes" beside it.

    `this_run`: of those that this run has saved, in this attempt or an earlier one.
    """
    choice = checkpoint.choose(directory, required=required, run_id=formation.run_id if this_run else None)
    formation.notes += choice.notes
    if choice.checkpoint is None:
        return None
    checkpoint.compare_model(choice.checkpoint.manifest, _described(formation))
    template = _template(formation, choice.checkpoint)
    loaded = checkpoint.load(choice.checkpoint, template)
    formation.lineage = _lineage(formation, choice.checkpoint.manifest)
    formation.notes += loaded.notes
    shared = put_back(formation, template, loaded.step, dict(loaded.shared))
    if loaded.rank_state is not None:
        set_rng_state(loaded.rank_state)
    restore_residuals(formation, choice.checkpoint, loaded.rank_state)
    return {**shared, "path": str(choice.checkpoint.path)}


def _lineage(formation: Formation, resumed_from: checkpoint.Manifest) -> list[dict[str, Any]]:
    """Return the runs that this one now continues: two runs that take up one checkpoint stay two."""
    before = resumed_from.lineage
    if resumed_from.run_id == formation.run_id:
        return before
    return [*before, {"run_id": resumed_from.run_id, "step": resumed_from.step}]


def shared_state(formation: Formation) -> dict[str, Any]:
    """Return what all ranks hold alike beside tensors: data positions, schedulers, fp16's scale."""
    scaler = formation.precision.scaler
    return {
        "loaders": [loader.sharded.state_dict() for loader in formation.loaders],
        "schedulers": [scheduler_state(scheduler) for scheduler in formation.schedulers],
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def put_back(formation: Formation, tensors: dict[str, Any], step: int, shared: dict[str, Any]) -> dict[str, Any]:
    """Go on from a state; return what of `shared` is not the formation's own."""
    _put_back_tensors(formation, tensors)
    formation.gradients.steps = step
    for loader, state in zip(formation.loaders, shared.pop("loaders"), strict=False):
        loader.sharded.load_state_dict(state)
    for scheduler, state in zip(formation.schedulers, shared.pop("schedulers"), strict=False):
        load_scheduler_state(scheduler, state)
    scaler_state = shared.pop("scaler")
    if formation.precision.scaler is not None and scaler_state is not None:
        formation.precision.scaler.load_state_dict(scaler_state)
    return shared


def _described(formation: Formation) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of every model tensor by name, those of all pipeline stages together."""
    here = {name: (tensor.shape, tensor.dtype) for name, tensor in _named_tensors(formation)}
    if formation.world.mesh.pp == 1:
        return here
    parts: list[Any] = [None] * formation.world_size
    dist.all_gather_object(parts, here)
    return {name: info for part in parts for name, info in part.items()}


def _named_tensors(formation: Formation) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model tensors a checkpoint holds, by canonical name."""
    for number, wrapped in enumerate(formation.models):
        prefix = f"model{number}." if number else ""
        for name, tensor in formation.strategy.state(wrapped, [])["model"].items():
            if isinstance(tensor, torch.Tensor):
                yield prefix + name, tensor


def tensors_of(formation: Formation) -> dict[str, Any]:
    """Return the nested state dict of all models and their optimizers, under canonical names."""
    with formation.gradients.direct():  # torch takes an empty step to give a fresh optimizer its state
        state: dict[str, Any] = {}
        trained = _optimizers_of_models(formation)
        for number, wrapped in enumerate(formation.models):
            for key, value in formation.strategy.state(wrapped, trained[number]).items():
                state[f"{key}{number or ''}" if key == "model" else f"{key}@{number}" if number else key] = value
        return state


def _template(formation: Formation, saved: checkpoint.Checkpoint) -> dict[str, Any]:
    """Return the tensors to be read into: those that the checkpoint has."""
    with formation.gradients.direct():
        for wrapped in formation.models:
            for optimizer in formation.optimizers:
                if _trains(optimizer, wrapped):  # an engine's partitions have their states already
                    fill_state(formation.unwrap(wrapped), optimizer)
    template = tensors_of(formation)
    entries = checkpoint.entries(saved)
    for name, value in template.items():
        if "state" in value and "param_groups" in value and f"{name}.state" not in entries:
            value["state"] = {}  # saved before the optimizer's first step
    _drop_what_was_not_saved(formation, entries, template)
    return template


def _drop_what_was_not_saved(formation: Formation, entries: set[str], template: dict[str, Any]) -> None:
    """A checkpoint of another strategy lacks what only this one keeps: it stays as it is, from the start."""
    optional = [name for name in template if name.split("@")[0] in formation.strategy.optional_state]
    missing = sorted(set(optional) - entries)
    for name in missing:
        del template[name]
    if missing:
        formation.notes.append(f"the checkpoint was saved by another strategy: {', '.join(missing)} starts afresh")


def _put_back_tensors(formation: Formation, state: dict[str, Any]) -> None:
    with formation.gradients.direct():
        trained = _optimizers_of_models(formation)
        for number, wrapped in enumerate(formation.models):
            own = {
                key.removesuffix(f"@{number}"): value
                for key, value in state.items()
                if (key.endswith(f"@{number}") if number else "@" not in key and not key.startswith("model"))
            }
            own["model"] = state[f"model{number or ''}"]
            formation.strategy.load_state(wrapped, trained[number], own)


def _optimizers_of_models(formation: Formation) -> list[list[torch.optim.Optimizer]]:
    """Return, for each model, the optimizers that train its parameters, on any rank; an engine's trains partitions.

    Their place in the list is their name in a checkpoint. So all ranks must have the same list, also a pipeline stage
    that holds none of an optimizer's parameters.
    """
    if formation.strategy.owns_step:
        return [formation.optimizers for _ in formation.models]
    trains = [[_trains(optimizer, wrapped) for optimizer in formation.optimizers] for wrapped in formation.models]
    if formation.world.mesh.pp > 1 and formation.models and formation.optimizers:
        trains = formation.reduce(torch.tensor(trains).int(), "max").bool().tolist()
    return [list(compress(formation.optimizers, chosen)) for chosen in trains]


def _trains(optimizer: torch.optim.Optimizer, wrapped: nn.Module) -> bool:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in held for parameter in wrapped.parameters())
