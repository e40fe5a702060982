"""Stages: cut the model into parts of equal cost, keep this rank's units, find parameters that several stages share."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from phalanx import torch_compat
from phalanx.config import DistributedConfig
from phalanx.errors import UsageError, unknown_name
from phalanx.model import ExampleInputs, PipelineUnits, SequenceShards, implements
from phalanx.strategies.pipeline.strategy import Row, Tie
from phalanx.strategies.tensors import PLACED, find_blocks
from phalanx.world.splits import SCHEDULES, too_many_stages
from phalanx.world.world import World


def units_of(model: nn.Module) -> list[str]:
    """Return the names of a model's units, first to last; UsageError where it has none."""
    if implements(model, PipelineUnits):
        units = list(model.pipeline_units())
    elif isinstance(model, nn.Sequential):
        units = [name for name, _ in model.named_children()]
    else:
        raise UsageError(
            f"pipeline_parallel needs to know how {type(model).__name__} is cut, and it has no pipeline_units()",
            hint="Make it an nn.Sequential, or give it a method pipeline_units() that returns the names of modules "
            "that run one after the other, and a forward that skips those that are None; or use strategy='fsdp'.",
        )
    for name, _ in model.named_parameters():
        if not any(name.startswith(f"{unit}.") for unit in units):
            raise UsageError(
                f"the pipeline units of {type(model).__name__} do not hold {name}",
                hint="Every parameter belongs to one unit: a stage keeps its units and drops all others.",
            )
    return units


def check_count(model: nn.Module, units: Sequence[str], stages: int) -> None:
    """Raise for more stages than the model has layers."""
    blocks = [unit for unit in units if unit in find_blocks(model)]
    layers = blocks or [unit for unit in units if any(True for _ in model.get_submodule(unit).parameters())]
    if (wrong := too_many_stages(type(model).__name__, len(layers), stages)) is not None:
        raise wrong


def cut_at(units: Sequence[str], cuts: str, stages: int) -> list[list[str]]:
    """Cut the units before those that `cuts` names."""
    names = [name.strip() for name in cuts.split(",") if name.strip()]
    for name in names:
        if name not in units[1:]:
            raise UsageError(unknown_name("unit in pipeline_cuts", name, [*units[1:], "measured"]))
    starts = [units.index(name) for name in names]
    if starts != sorted(set(starts)):
        raise UsageError(
            f"pipeline_cuts = {cuts!r} is not in the model's order", hint=f"Its units: {', '.join(units)}."
        )
    if len(names) != stages - 1:
        raise UsageError(
            f"pipeline_cuts = {cuts!r} makes {len(names) + 1} stages, and the pipeline has {stages}",
            hint=f"Name {stages - 1} units, each the first of its stage.",
        )
    return [list(units[start:end]) for start, end in pairwise([0, *starts, len(units)])]


def cut_evenly(units: Sequence[str], costs: Sequence[float], stages: int) -> list[list[str]]:
    """Cut the units so that the costliest stage is as cheap as possible and the others are equal; none is empty."""
    sums = [0.0, *accumulate(costs)]
    # best[k][n], for k stages over the first n units: the costliest stage, the sum of squares, the last one's start.
    never = (float("inf"), float("inf"), 0)
    best = [[(0.0, 0.0, 0), *[never] * len(units)]]
    for stage in range(1, stages + 1):
        row = [never] * (len(units) + 1)
        for end in range(stage, len(units) + 1):
            choices = []
            for start in range(stage - 1, end):
                worst, squares, _ = best[stage - 1][start]
                cost = sums[end] - sums[start]
                choices.append((max(worst, cost), squares + cost * cost, start))
            row[end] = min(choices)
        best.append(row)
    parts: list[list[str]] = []
    end = len(units)
    for stage in range(stages, 0, -1):
        start = best[stage][end][2]
        parts.insert(0, list(units[start:end]))
        end = start
    return parts


def drop_units(model: nn.Module, units: Sequence[str], kept_units: Sequence[str]) -> None:
    """Set the units that are not kept to None, or remove them from an nn.Sequential."""
    for unit in units:
        if unit in kept_units:
            continue
        parent, _, name = unit.rpartition(".")
        holder = model.get_submodule(parent)
        if isinstance(holder, nn.Sequential):
            torch_compat.direct_modules(holder).pop(name, None)
        else:
            setattr(holder, name, None)


def part_of(model: nn.Module, units: Sequence[str], kept_units: Sequence[str]) -> nn.Module:
    """Return a copy of the modules around these units, which are not copied."""
    part = _hollow_copy(model)
    for parent in {unit.rpartition(".")[0] for unit in units} - {""}:
        holder = part
        for name in parent.split("."):
            setattr(holder, name, _hollow_copy(getattr(holder, name)))
            holder = getattr(holder, name)
    drop_units(part, units, kept_units)
    return part


def _hollow_copy(module: nn.Module) -> nn.Module:
    """Copy a module and its dicts of hooks and children, but not the children."""
    hollow = copy.copy(module)
    for name, value in list(hollow.__dict__.items()):
        if isinstance(value, dict):
            hollow.__dict__[name] = value.copy()
    return hollow


_ROUNDS = 3


def parameter_costs(model: nn.Module, units: Sequence[str]) -> list[float]:
    """Return the number of parameters of each unit."""
    return [float(sum(p.numel() for p in model.get_submodule(unit).parameters())) for unit in units]


def measured_costs(model: nn.Module, units: Sequence[str]) -> list[float]:
    """Return the seconds of each unit's forward pass, as rank 0 measures them on the model's `example_inputs()`."""
    if not implements(model, ExampleInputs):
        raise UsageError(
            f"pipeline_cuts = 'measured' needs inputs to run, and {type(model).__name__} has no example_inputs()",
            hint="Give it a method example_inputs() that returns what forward takes, or leave pipeline_cuts out.",
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "pipeline_cuts = 'measured' needs a model with weights, and this one is on the meta device",
            hint="Leave it out, or name the cuts: pipeline_cuts = 'layers.4,layers.8'.",
        )
    costs: list[Any] = [_time_units(model, units, model.example_inputs()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(costs, src=0)
    costs_of_first: list[float] = costs[0]
    return costs_of_first


@torch.no_grad()
def _time_units(model: nn.Module, units: Sequence[str], example: Sequence[torch.Tensor]) -> list[float]:
    """Return the time of each unit's quickest forward pass of a few."""
    device = next(model.parameters()).device
    inputs = tuple(tensor.to(device) for tensor in example)
    best = dict.fromkeys(units, float("inf"))
    began: dict[str, float] = {}

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def watch(unit: str) -> list[Any]:
        def enter(*_: Any) -> None:
            began[unit] = now()

        def leave(*_: Any) -> None:
            best[unit] = min(best[unit], now() - began[unit])

        module = model.get_submodule(unit)
        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    handles = [handle for unit in units for handle in watch(unit)]
    try:
        for _ in range(_ROUNDS):
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return [best[unit] if best[unit] < float("inf") else 0.0 for unit in units]


@dataclass(frozen=True)
class RankStages:
    """This rank's part of a model."""

    row: Row
    stages: dict[int, nn.Module]
    ties: list[Tie]
    smallest: int
    """The smallest possible microbatch: a batch norm needs two samples."""


def placed_before(model: nn.Module) -> RankStages | None:
    """Return how an earlier run placed this model."""
    stages: RankStages | None = model.__dict__.get(PLACED)
    return stages


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


def place_stages(model: nn.Module, plan: StagePlan, world: World) -> RankStages:
    """Keep the units of this rank's stages only. All ranks must call this."""
    row, units, parts = plan.row, plan.units, plan.parts
    ties = _find_ties(model, parts, row, world)
    mine = {stage: parts[stage] for stage in row.schedule.stages_of(row.position, row.size)}
    drop_units(model, units, [unit for kept_units in mine.values() for unit in kept_units])
    stages = {stage: part_of(model, units, kept_units) for stage, kept_units in mine.items()}
    rank_stages = RankStages(row, stages, ties, 2 if plan.has_batch_norm else 1)
    for part in rank_stages.stages.values():
        if implements(part, SequenceShards):  # hidden states between stages are slices of the sequence
            part.sequence_shards = world.mesh.tp
    model.__dict__[PLACED] = rank_stages  # not by setattr: the stages are not submodules, their units are
    return rank_stages


def share_buffers(model: nn.Module, stages: Mapping[int, nn.Module]) -> None:
    """Take the buffers outside of units from the stages, in which they were allocated."""
    for name, buffer in list(model.named_buffers()):
        buffers = [stage.get_buffer(name) for stage in stages.values() if name in dict(stage.named_buffers())]
        if buffer.is_meta and buffers:
            holder, _, key = name.rpartition(".")
            torch_compat.direct_buffers(model.get_submodule(holder))[key] = buffers[0]


def join_stages(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Gather the state of all stages; for a model without stages, return it unchanged."""
    rank_stages = placed_before(model)
    if rank_stages is None:
        return state
    parts: list[Any] = [None] * rank_stages.row.size
    dist.all_gather_object(parts, state, group=rank_stages.row.group)
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
