"""Optimizer state under canonical names, and moments that move when a layout changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from phalanx.errors import CheckpointError, ModelError


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state for a model's parameters by name; empty before its first step.

    torch initialises the state by a step with learning rate 0, which would count as one of Adam's steps.
    """
    with _part_of(model, optimizer):
        fresh = not optimizer.state
        state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    return {**state, "state": {}} if fresh else state


def fill_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Initialise the state of a new optimizer, so that a checkpoint can be read into it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    with _part_of(model, optimizer, empty_groups=False):
        get_optimizer_state_dict(model, optimizer)
        state = optimizer.state
    optimizer.state.update(state)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state for a model, and the settings of its groups by index.

    In a pipeline each stage has other parameters in a group, or none, and a checkpoint has the names of one stage: they
    are replaced by those of this rank. torch finds groups by names, so it gets only those that have any.
    """
    ids = {id(parameter) for parameter in model.parameters()}
    loaded: dict[Any, Any] = {}
    if state["state"]:
        with _part_of(model, optimizer, empty_groups=False) as indices:
            param_groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
            groups_here = [
                _as_here(state["param_groups"][index], group)  # type: ignore[arg-type]
                for index, group in zip(indices, param_groups, strict=True)
            ]
            if groups_here:
                saved = {"state": state["state"], "param_groups": groups_here}
                # Not strict: a parameter that never had a gradient has no state in a checkpoint.
                set_optimizer_state_dict(model, optimizer, saved, options=StateDictOptions(strict=False))
            loaded = dict(optimizer.state)
    for parameter in [parameter for parameter in optimizer.state if id(parameter) in ids]:
        del optimizer.state[parameter]
    optimizer.state.update(loaded)
    match_layouts(optimizer)
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update(_as_here(saved, group))


def match_layouts(optimizer: torch.optim.Optimizer) -> None:
    """Give the states of an optimizer the memory layout of their parameters.

    Fused kernels read both in the order of memory: those of CUDA raise where the strides differ, those of CPUs would
    take the moments of other elements. Weights become channels last after steps were taken, and states come
    contiguous from another rank's memory. States of 8 bits are contiguous in any case.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if isinstance(parameter, nn.Parameter) else ():
            is_plain = type(value) is torch.Tensor and value.layout is torch.strided and value.itemsize > 1
            if is_plain and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _as_here(saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved group with this run's parameters and kernels: sharded ones have no fused SGD, for example."""
    return {**saved, **{name: group[name] for name in ("params", "fused", "foreach", "capturable") if name in group}}


def check_groups(state: Mapping[str, Any], saved: int, more: Sequence[str]) -> None:
    """Raise where an optimizer was saved with other groups; `more`: parameters that only the saved one has trained."""
    if (groups := len(state["param_groups"])) == saved:
        return
    extra = f", with {', '.join(more[:3])}{' and others' * (len(more) > 3)}" if more else ""
    raise CheckpointError(
        f"the saved optimizer has {saved} group{'s' * (saved != 1)} of parameters{extra}, and this one has {groups}",
        hint="Give this run the same groups before it resumes: optimizer.add_param_group({'params': ...}), and "
        "requires_grad_(True) for layers that were unfrozen.",
    )


def named_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, list[str]]]:
    """Return the names of the parameters in each group, for `match_groups`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = ([names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups)
    return [{"params": named} for named in groups]


def match_groups(model: nn.Module, optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    """Add the groups that other ranks have added while they trained, to an optimizer that was made as at the start."""
    count, named = len(optimizer.param_groups), dict(model.named_parameters(remove_duplicate=False))
    added = [[named[name] for name in group["params"]] for group in saved[count:]]
    moved = {id(parameter) for group in added for parameter in group}
    for group in optimizer.param_groups if moved else ():
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved]
    for parameters in added:
        optimizer.add_param_group({"params": parameters})


@contextmanager
def _part_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, empty_groups: bool = True) -> Iterator[list[int]]:
    """Restrict an optimizer to a model's parameters for a while; yield the indices of the groups that remain."""
    ids = {id(parameter) for parameter in model.parameters()}
    groups, states = optimizer.param_groups, optimizer.state
    parts = [{**group, "params": [p for p in group["params"] if id(p) in ids]} for group in groups]
    indices = [index for index, part in enumerate(parts) if part["params"] or empty_groups]
    optimizer.param_groups = [parts[index] for index in indices]
    optimizer.state = defaultdict(dict, {p: state for p, state in states.items() if id(p) in ids})
    try:
        yield indices
    finally:
        optimizer.param_groups, optimizer.state = groups, states


class Moment(NamedTuple):
    """A tensor of this rank's optimizer, and how many ranks had one; the others have zeros."""

    tensor: torch.Tensor
    holders: int


class _Entry(NamedTuple):
    """What a rank has under one key of a parameter's state; of large tensors only shape and dtype."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    on_parameter_device: bool
    value: Any

    @property
    def is_large(self) -> bool:
        return bool(self.shape)

    def made(self, parameter: torch.Tensor) -> Any:
        """Return the initial value for a rank without this entry: zeros, or the number itself."""
        if self.shape is None:
            return self.value
        device = parameter.device if self.on_parameter_device else torch.device("cpu")
        if self.is_large:
            in_its_layout = self.shape == parameter.shape
            like = parameter if in_its_layout else torch.empty(self.shape, device="meta")
            return torch.zeros_like(like, dtype=self.dtype, device=device, requires_grad=False)
        return torch.tensor(self.value, dtype=self.dtype, device=device)


def level_moments(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Moment]:
    """Add the entries that any rank has on every rank; return those to average, in the same order on all ranks.

    Single numbers (step counts) and tensors that have no average (quantised ones) become those of the first rank that
    has them. All ranks call this.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = {name: parameter for name, parameter in parameters.items() if id(parameter) in trained}
    if not named:
        return []
    moments = {
        name: {key: _describe(value, parameter) for key, value in optimizer.state.get(parameter, {}).items()}
        for name, parameter in named.items()
    }
    by_rank: list[dict[str, dict[str, _Entry]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, moments)
    return [
        moment
        for name, parameter in named.items()
        for moment in _levelled(name, parameter, optimizer, [described[name] for described in by_rank])
    ]


def _describe(value: Any, parameter: torch.Tensor) -> _Entry:
    if not isinstance(value, torch.Tensor):
        return _Entry(None, None, False, value)
    same_device = value.device == parameter.device
    return _Entry(tuple(value.shape), value.dtype, same_device, None if value.dim() else value.item())


def _levelled(
    name: str, parameter: nn.Parameter, optimizer: torch.optim.Optimizer, by_rank: list[dict[str, _Entry]]
) -> Iterator[Moment]:
    for key in dict.fromkeys(key for entries in by_rank for key in entries):
        holders = [rank for rank, entries in enumerate(by_rank) if key in entries]
        first = by_rank[holders[0]][key]
        _check_forms(f"{name}, {key}", {rank: by_rank[rank][key] for rank in holders})
        state = optimizer.state[parameter]
        if key not in state or first.shape is None:
            state[key] = first.made(parameter)
        value = state[key]
        if first.is_large and value.is_floating_point():
            yield Moment(value, len(holders))
        elif first.is_large:
            _send(value, holders[0], parameter.device)
        elif first.shape is not None:
            value.fill_(first.value)


def _check_forms(name: str, entries: dict[int, _Entry]) -> None:
    """Raise for tensors that cannot be averaged; all ranks have the same entries, so all of them raise."""
    (first, expected), *others = entries.items()
    for rank, entry in others:
        if (entry.shape, entry.dtype) != (expected.shape, expected.dtype):
            raise ModelError(
                f"optimizer state ({name}) is {_form(expected)} on rank {first} and {_form(entry)} on rank {rank}: it "
                "has no average",
                hint="Build the same optimizer on all ranks.",
            )


def _form(entry: _Entry) -> str:
    return "not a tensor" if entry.shape is None else f"{entry.dtype} of shape {entry.shape}"


def _send(tensor: torch.Tensor, source: int, device: torch.device) -> None:
    """Broadcast one rank's tensor of any dtype: as bytes, on a device that the backend can use."""
    message = tensor.to(device).contiguous()
    dist.broadcast(message.view(-1).view(torch.uint8), source)
    tensor.copy_(message)
