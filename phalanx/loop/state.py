"""Training state to and from a checkpoint: what all ranks share, and what each rank keeps for itself."""

from __future__ import annotations

import dataclasses
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx import checkpoint
from phalanx.errors import CheckpointError
from phalanx.loop.optimizer_binding import load_scheduler_state, scheduler_state
from phalanx.strategies.base import local
from phalanx.strategies.optimizer_state import check_groups, fill_state, match_groups
from phalanx.strategies.tensors import drop_gathered
from phalanx.world.abort import raise_if_aborted
from phalanx.world.seed import rng_state, set_rng_state

if TYPE_CHECKING:
    from phalanx.loop.ema import WeightAverage
    from phalanx.loop.formation_state import FormationState

_AVERAGE = "average"
"""The entry for the averaged weights (ema_decay), in memory."""
_TRAINED = "trained"
"""The entry for the weights that are trained where "model" is their average, in a checkpoint."""


def begin_save(formation: FormationState, saver: checkpoint.Saver, directory: Path, shared: dict[str, Any]) -> None:
    """Start saving a checkpoint of everything that was prepared; all ranks must call this.

    When it returns the state may change: it has been copied.
    """
    with formation.averaged():  # other tools that read weights get the average
        snapshot = snapshot_of(formation, {})
        # Apart, so that values of any name are neither taken for our own nor replaced by them.
        snapshot = dataclasses.replace(snapshot, shared={"prepared": snapshot.shared, "values": shared})
        if formation.average is not None:
            snapshot.tensors[_TRAINED] = snapshot.tensors.pop(_AVERAGE)
        request = checkpoint.Request(
            directory=directory,
            run_id=formation.run_id,
            group=formation.world.env.group,
            kind=formation.config.checkpoint_kind,
            keep_last=formation.config.keep_last,
            keep_every=formation.config.keep_every,
            best=formation.best_path,
            lineage=formation.lineage,
            mesh=formation.world.mesh.sizes,
            config=formation.config.to_dict(),
        )
        saver.begin(snapshot, request)


def snapshot_of(formation: FormationState, shared: dict[str, Any], *, alone: bool = False) -> checkpoint.Snapshot:
    """Return the state of everything that was prepared, not copied; all ranks must call this.

    `alone`: without communication, because other ranks may be lost; this rank then has what it needs.
    """
    if formation.gradients.scale is not None:
        formation.gradients.scale.settle(formation.gradients.steps)
    for wrapped in () if alone else formation.models:
        formation.strategy.consolidate(wrapped)
    strategy = formation.strategy
    rank_state = {**rng_state(), **(strategy.rank_state() if strategy.keeps_rank_state else {})}
    epoch = formation.loaders[0].epoch if formation.loaders else 0
    state = {**shared_state(formation), **shared}
    return checkpoint.Snapshot(formation.step, epoch, state_tensors(formation, alone=alone), rank_state, state)


def state_tensors(formation: FormationState, *, alone: bool = False) -> dict[str, Any]:
    """Return the tensors of a state in memory: those of models and optimizers, and the averaged weights."""
    tensors = tensors_of(formation, alone=alone)
    if formation.average is not None:
        tensors[_AVERAGE] = formation.average.other
    return tensors


def expected_bytes(formation: FormationState) -> int:
    """Return about the bytes of this rank's part of a checkpoint."""
    tensors = [tensor for wrapped in formation.models for tensor in wrapped.state_dict().values()]
    for optimizer in formation.optimizers:
        tensors += [value for state in optimizer.state.values() for value in state.values()]
    if formation.average is not None:
        tensors += formation.average.other.values()
    tensor_bytes = sum(local(tensor).nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
    return tensor_bytes if formation.strategy.shards else -(-tensor_bytes * 11 // (10 * formation.world_size))


def restore_snapshot(
    formation: FormationState, directory: str | Path, *, required: bool = True, this_run: bool = False
) -> dict[str, Any] | None:
    """Restore the newest complete checkpoint; return its shared state, with its "path".

    `this_run`: of those that this run has saved, in this attempt or an earlier one.
    """

    def template_of(stored: checkpoint.Checkpoint) -> dict[str, Any]:
        checkpoint.compare_model(stored.manifest, _described(formation))
        _check_schedulers(formation, stored.manifest.shared["prepared"])
        return _template(formation, stored)

    run_id = formation.run_id if this_run else None
    residuals = formation.strategy.keeps_rank_state
    choice, template, loaded = checkpoint.load_newest(
        directory, template_of, required=required, run_id=run_id, with_lost_ranks=residuals
    )
    formation.notes += choice.notes
    if choice.checkpoint is None or loaded is None:
        return None
    saved_by = choice.checkpoint.manifest
    formation.state_of = saved_by.run_id
    formation.lineage = list(saved_by.lineage)
    if saved_by.run_id != formation.run_id:  # two runs that resume one checkpoint stay two
        formation.lineage.append({"run_id": saved_by.run_id, "step": saved_by.step})
    formation.notes += loaded.notes
    put_back(formation, template, loaded.step, dict(loaded.shared["prepared"]))
    if loaded.rank_state is not None:
        set_rng_state(loaded.rank_state)
    if residuals:
        _restore_residuals(formation, saved_by.world_size, loaded.taken_over)
    return {"path": str(choice.checkpoint.path), **loaded.shared["values"]}


def _restore_residuals(formation: FormationState, then: int, parts: list[dict[str, Any]]) -> None:
    """Restore the residuals of the ranks, `then` in number, that this one takes over.

    Where their number changed, they are scaled so that their average stays the same.
    """
    # More ranks than before: this one has no residuals yet, but the steps are known to all.
    factor = formation.world_size / then if formation.rank < then else 0.0
    if not formation.strategy.load_rank_state(parts, factor):
        formation.notes.append("the checkpoint was saved without compression: nothing is kept back yet")


def shared_state(formation: FormationState) -> dict[str, Any]:
    """Return what is equal on all ranks apart from tensors: data positions, schedulers, fp16's loss scale."""
    scaler = formation.precision.scaler
    return {
        "loaders": [loader.sharded.state_dict() for loader in formation.loaders],
        "schedulers": [scheduler_state(scheduler) for scheduler in formation.schedulers],
        "scheduler_names": _scheduler_names(formation),
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def put_back(
    formation: FormationState, tensors: dict[str, Any], step: int, shared: dict[str, Any], *, same_run: bool = False
) -> dict[str, Any]:
    """Load a state; return the entries of `shared` that do not belong to the formation.

    `same_run`: the run goes on with other ranks, so optimizers get the groups that were added while it trained.
    """
    trained, averaged = tensors.pop(_TRAINED, None), tensors.pop(_AVERAGE, None)
    with formation.gradients.direct():
        optimizers = _optimizers_of_models(formation)
        for number, wrapped in enumerate(formation.models):
            parts = {
                key.removesuffix(f"@{number}"): value
                for key, value in tensors.items()
                if (key.endswith(f"@{number}") if number else "@" not in key and not key.startswith("model"))
            }
            parts["model"] = _own_weights(formation, number, tensors)
            for position, optimizer in enumerate(optimizers[number] if same_run else ()):
                match_groups(
                    formation.strategy.unwrap(wrapped), optimizer, parts[f"optimizer{position or ''}"]["param_groups"]
                )
            formation.strategy.load_state(wrapped, optimizers[number], parts)
    if formation.average is not None:
        _put_average_back(formation.average, averaged, swapped=trained is not None)
    formation.gradients.steps = step
    for loader, state in zip(formation.loaders, shared.pop("loaders"), strict=False):
        loader.sharded.load_state_dict(state)
    for scheduler, state in zip(formation.schedulers, shared.pop("schedulers"), strict=False):
        load_scheduler_state(scheduler, state)
    shared.pop("scheduler_names", None)
    scaler_state = shared.pop("scaler")
    if formation.precision.scaler is not None and scaler_state is not None:
        formation.precision.scaler.load_state_dict(scaler_state)
    return shared


def _put_average_back(average: WeightAverage, saved: dict[str, torch.Tensor] | None, *, swapped: bool) -> None:
    """Load the average; `swapped`: a checkpoint has put it into the model, and the trained weights in its place."""
    if swapped:
        average.swap()
    elif saved is None:
        average.restart()
    else:
        average.load(saved)


def _described(formation: FormationState) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of every model tensor by name, those of all pipeline stages together."""
    tensors = {}
    for number, wrapped in enumerate(formation.models):
        prefix = _prefix(formation, number) if formation.part_names else f"model{number}." if number else ""
        for name, tensor in formation.strategy.state(wrapped, [])["model"].items():
            if isinstance(tensor, torch.Tensor):
                tensors[prefix + name] = (tensor.shape, tensor.dtype)
    if formation.world.mesh.pp == 1:
        return tensors
    parts: list[Any] = [None] * formation.world_size
    dist.all_gather_object(parts, tensors)
    return {name: info for part in parts for name, info in part.items()}


def tensors_of(formation: FormationState, *, alone: bool = False) -> dict[str, Any]:
    """Return the nested state dict of all models and their optimizers, under canonical names.

    `alone`: without communication, because other ranks may be lost.
    """
    state_of = formation.strategy.own_state if alone else formation.strategy.state
    with formation.gradients.direct():  # torch takes an empty step to give a fresh optimizer its state
        state: dict[str, Any] = {}
        trained = _optimizers_of_models(formation)
        for number, wrapped in enumerate(formation.models):
            for key, value in state_of(wrapped, trained[number]).items():
                if key == "model" and formation.part_names:
                    prefix = _prefix(formation, number)
                    state.setdefault("model", {}).update({prefix + name: tensor for name, tensor in value.items()})
                else:
                    state[f"{key}{number or ''}" if key == "model" else f"{key}@{number}" if number else key] = value
        return state


def _prefix(formation: FormationState, number: int) -> str:
    return f"{formation.part_names[number]}."


def _own_weights(formation: FormationState, number: int, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of one prepared model, under its own names."""
    if not formation.part_names:
        weights: dict[str, Any] = tensors[f"model{number or ''}"]
        return weights
    prefix = _prefix(formation, number)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors["model"].items() if name.startswith(prefix)}


def fill_optimizers(formation: FormationState) -> None:
    """Give fresh optimizers their states, for a saved state to be read into."""
    with formation.gradients.direct():
        for wrapped in formation.models:
            for optimizer in formation.optimizers:
                if _trains(optimizer, wrapped):  # an engine's partitions have their states already
                    fill_state(formation.strategy.unwrap(wrapped), optimizer)


def _template(formation: FormationState, saved: checkpoint.Checkpoint) -> dict[str, Any]:
    """Return the tensors to be read into: those that the checkpoint has.

    What only this strategy keeps is left out where another one saved the checkpoint.
    """
    fill_optimizers(formation)
    template = tensors_of(formation)
    entries = checkpoint.entries(saved)
    if formation.average is not None and _TRAINED in entries:
        template[_TRAINED] = formation.average.other
    elif formation.average is not None:
        formation.notes.append("the checkpoint has no averaged weights (ema_decay): the average begins at its weights")
    elif _TRAINED in entries:
        formation.notes.append("the checkpoint has averaged weights (ema_decay): this run continues from the average")
    for name, value in template.items():
        if "state" in value and "param_groups" in value:
            # Nothing was saved before the optimizer's first step, and for parameters that never had a gradient.
            present = {key: state for key, state in value["state"].items() if f"{name}.state.{key}" in entries}
            check_groups(value, *_saved_groups(formation, name, entries, present))
            _check_states(name, present, entries)
            formation.notes += _leave_new_options(name, value["param_groups"], entries)
            value["state"] = present
    optional = [name for name in template if name.split("@")[0] in formation.strategy.optional_state]
    missing = sorted(set(optional) - entries)
    for name in missing:
        del template[name]
    if missing:
        formation.notes.append(f"the checkpoint was saved by another strategy: {', '.join(missing)} starts afresh")
    return template


_OR_BEGIN = "or begin a new run with its weights: trainer.load(path)."


def _check_states(name: str, present: dict[str, Any], entries: set[str]) -> None:
    """Raise where an optimizer of another kind, or with other settings, was saved."""
    for key, state in present.items():
        missing = [item for item in state if f"{name}.state.{key}.{item}" not in entries]
        if missing:
            raise CheckpointError(
                f"the saved optimizer has no {', '.join(missing)}, which this run's optimizer keeps of {key}",
                hint=f"Resume with the optimizer that was saved, {_OR_BEGIN}",
            )


def _leave_new_options(name: str, groups: list[dict[str, Any]], entries: set[str]) -> list[str]:
    """Leave options that were not saved as this run has set them; return notes about them.

    A newer version of an optimizer has more options than the saved one. If each has options that the other lacks, they
    are of different kinds.
    """
    notes = []
    for number, group in enumerate(groups):
        prefix = f"{name}.param_groups.{number}."
        saved = {entry.removeprefix(prefix).partition(".")[0] for entry in entries if entry.startswith(prefix)}
        missing = [option for option in group if option not in saved]
        if missing and saved - group.keys():
            raise CheckpointError(
                f"the saved optimizer is of another kind: it has no {', '.join(missing)}, which this run's has",
                hint=f"Resume with the optimizer that was saved, {_OR_BEGIN}",
            )
        for option in missing:
            del group[option]
        if missing:
            notes.append(f"the saved optimizer has no {', '.join(missing)}: group {number} keeps this run's")
    return notes


def _scheduler_names(formation: FormationState) -> list[str]:
    return [type(scheduler).__name__ for scheduler in formation.schedulers]


def _check_schedulers(formation: FormationState, saved: dict[str, Any]) -> None:
    """Raise where another kind of scheduler was saved: its numbers would be taken for those of this one."""
    names, there = _scheduler_names(formation), saved.get("scheduler_names")
    if there is not None and not names and there:
        formation.notes.append(f"the checkpoint has the state of {', '.join(there)}, which this run does not have")
    if there is None or not names or names == there:
        return
    raise CheckpointError(
        f"this run's scheduler is {', '.join(names)}, and the checkpoint has {', '.join(there) or 'none'}",
        hint=f"Resume with the scheduler that was saved, {_OR_BEGIN}",
    )


def _saved_groups(
    formation: FormationState, name: str, entries: set[str], present: dict[str, Any]
) -> tuple[int, list[str]]:
    """Return how many groups a saved optimizer has, and which parameters of the model only it has trained."""
    groups = sum(entry.startswith(f"{name}.param_groups.") and entry.count(".") == 2 for entry in entries)
    parameters = [key for model in formation.models for key, _ in formation.strategy.unwrap(model).named_parameters()]
    return groups, [key for key in parameters if f"{name}.state.{key}" in entries and key not in present]


def _optimizers_of_models(formation: FormationState) -> list[list[torch.optim.Optimizer]]:
    """Return, for each model, the optimizers that train its parameters, on any rank; an engine's trains partitions.

    Their position in the list is their name in a checkpoint. So all ranks must have the same list, also a pipeline
    stage that holds none of an optimizer's parameters.
    """
    if formation.strategy.owns_step:
        return [formation.optimizers for _ in formation.models]
    for wrapped in formation.models:
        drop_gathered(wrapped)  # an evaluation may have left whole parameters, which no optimizer trains
    trains = [[_trains(optimizer, wrapped) for optimizer in formation.optimizers] for wrapped in formation.models]
    if formation.world.mesh.pp > 1 and formation.models and formation.optimizers:
        trains = _on_any_stage(formation, trains)
    return [list(compress(formation.optimizers, chosen)) for chosen in trains]


def _on_any_stage(formation: FormationState, trains: list[list[bool]]) -> list[list[bool]]:
    """Return which optimizer trains which model on any rank.

    Asked once, and again when groups were added: the state is kept every few steps, which must not wait for the device
    and for other ranks, one of which may be lost.
    """
    form = (len(formation.models), *(len(optimizer.param_groups) for optimizer in formation.optimizers))
    if formation.trained_anywhere is None or formation.trained_anywhere[0] != form:
        anywhere = torch.tensor(trains, device=formation.device).int()
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        trained = anywhere.bool().tolist()
        raise_if_aborted()  # else a part of it
        formation.trained_anywhere = (form, trained)
    return formation.trained_anywhere[1]


def _trains(optimizer: torch.optim.Optimizer, wrapped: nn.Module) -> bool:
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in ids for parameter in wrapped.parameters())
