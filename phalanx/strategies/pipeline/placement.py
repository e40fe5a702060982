"""Stage placement: cut the model, keep this rank's units, and find parameters that several stages share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from phalanx import torch_compat
from phalanx.config import DistributedConfig
from phalanx.models.contract import SequenceShards, implements
from phalanx.strategies.pipeline.stages import (
    check_count,
    cut_at,
    cut_evenly,
    drop_units,
    measured_costs,
    parameter_costs,
    part_of,
    units_of,
)
from phalanx.strategies.pipeline.strategy import Row, Tie
from phalanx.strategies.tensors import PLACED
from phalanx.world.splits import SCHEDULES
from phalanx.world.world import World


@dataclass(frozen=True)
class Placed:
    """This rank's part of a model."""

    row: Row
    stages: dict[int, nn.Module]
    ties: list[Tie]
    smallest: int
    """The smallest possible microbatch: a batch norm needs two samples."""


def placed_before(model: nn.Module) -> Placed | None:
    """Return how an earlier run placed this model."""
    placed: Placed | None = model.__dict__.get(PLACED)
    return placed


class StagePlan(NamedTuple):
    """Which units make which stage, and which rank holds it."""

    row: Row
    units: list[str]
    parts: list[list[str]]
    has_batch_norm: bool


def plan_stages(model: nn.Module, config: DistributedConfig, mesh: DeviceMesh) -> StagePlan:
    """Cut the model's units into stages. All ranks must call this."""
    row = Row(mesh.get_group(), mesh.get_local_rank(), mesh.size(), SCHEDULES[config.pipeline_schedule])
    units = units_of(model)
    check_count(model, units, row.num_stages)
    has_batch_norm = any(torch_compat.is_batch_norm(module) for module in model.modules())
    if config.pipeline_cuts in (None, "measured"):
        measure = parameter_costs if config.pipeline_cuts is None else measured_costs
        parts = cut_evenly(units, measure(model, units), row.num_stages)
    else:
        parts = cut_at(units, config.pipeline_cuts, row.num_stages)
    return StagePlan(row, units, parts, has_batch_norm)


def place_stages(model: nn.Module, plan: StagePlan, world: World) -> Placed:
    """Keep the units of this rank's stages only. All ranks must call this."""
    row, units, parts = plan.row, plan.units, plan.parts
    ties = _find_ties(model, parts, row, world)
    mine = {stage: parts[stage] for stage in row.schedule.stages_of(row.position, row.size)}
    drop_units(model, units, [unit for kept in mine.values() for unit in kept])
    stages = {stage: part_of(model, units, kept) for stage, kept in mine.items()}
    placed = Placed(row, stages, ties, 2 if plan.has_batch_norm else 1)
    for part in placed.stages.values():
        if implements(part, SequenceShards):  # hidden states between stages are slices of the sequence
            part.sequence_shards = world.mesh.tp
    model.__dict__[PLACED] = placed  # not by setattr: the stages are not submodules, their units are
    return placed


def share_buffers(model: nn.Module, stages: Mapping[int, nn.Module]) -> None:
    """Take the buffers outside of units from the stages, in which they were allocated."""
    for name, buffer in list(model.named_buffers()):
        found = [stage.get_buffer(name) for stage in stages.values() if name in dict(stage.named_buffers())]
        if buffer.is_meta and found:
            holder, _, key = name.rpartition(".")
            torch_compat.own_buffers(model.get_submodule(holder))[key] = found[0]


def join_stages(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Gather the state of all stages; for a model without stages, return it unchanged."""
    placed = placed_before(model)
    if placed is None:
        return state
    parts: list[Any] = [None] * placed.row.size
    dist.all_gather_object(parts, state, group=placed.row.group)
    return {name: value for part in parts for name, value in part.items()}


def _find_ties(model: nn.Module, parts: list[list[str]], row: Row, world: World) -> list[Tie]:
    """Find parameters that units on different ranks share, and create the groups of those ranks."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    ties = []
    for shared in names.values():
        owners = {name: row.owner(_stage_of(name, parts)) for name in shared}
        holders = sorted(set(owners.values()))
        if len(holders) == 1:
            continue
        for ranks in world.mesh.groups("pp"):
            group = dist.new_group([ranks[position] for position in holders])
            if world.rank in ranks and row.position in holders:
                mine = next(name for name, position in owners.items() if position == row.position)
                ties.append(Tie(mine, shared[0], len(holders), group))
    return ties


def _stage_of(parameter: str, parts: list[list[str]]) -> int:
    return next(stage for stage, units in enumerate(parts) if any(parameter.startswith(f"{unit}.") for unit in units))


def rename_tied(state: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Rename the optimizer states of tied parameters: a checkpoint has the copies once."""
    if not names:
        return state
    renamed = dict(state)
    for key, part in state.items():
        if key.startswith("optimizer"):
            renamed[key] = {
                "state": {names.get(name, name): value for name, value in part["state"].items()},
                "param_groups": [
                    {**group, "params": [names.get(name, name) for name in group["params"]]}
                    for group in part["param_groups"]
                ],
            }
    return renamed
