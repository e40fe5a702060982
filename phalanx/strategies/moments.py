"""Optimizer states of ranks that took local steps, given the same entries everywhere so that they can be averaged.

A rank that skipped its first step has no moments yet, nor has one whose batches never reached a parameter. Ranks that
sent what they happen to have would wait for each other for ever; so they first tell each other what that is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from phalanx.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn


class Moment(NamedTuple):
    """A tensor of this rank's optimizer, and how many ranks brought one; the others have zeros."""

    tensor: torch.Tensor
    holders: int


class _Entry(NamedTuple):
    """What a rank holds under one key of a parameter's state; of large tensors only the form."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    on_parameter_device: bool
    value: Any

    @property
    def is_large(self) -> bool:
        return bool(self.shape)

    def made(self, parameter: torch.Tensor) -> Any:
        """Return what a rank without this entry begins with: zeros, or the number itself."""
        if self.shape is None:
            return self.value
        device = parameter.device if self.on_parameter_device else torch.device("cpu")
        if self.is_large:
            return torch.zeros(self.shape, dtype=self.dtype, device=device)
        return torch.tensor(self.value, dtype=self.dtype, device=device)


def level_moments(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Moment]:
    """Give every rank the entries that any rank has; return those to average, in one order on all ranks.

    Single numbers (the count of steps) and tensors that have no average (quantised ones) become those of the first rank
    that has them. All ranks call this.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = {name: parameter for name, parameter in parameters.items() if id(parameter) in trained}
    if not named:
        return []
    here = {name: _described(optimizer.state.get(parameter, {}), parameter) for name, parameter in named.items()}
    by_rank: list[dict[str, dict[str, _Entry]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, here)
    return [
        moment
        for name, parameter in named.items()
        for moment in _levelled(name, parameter, optimizer, [described[name] for described in by_rank])
    ]


def _described(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, _Entry]:
    return {key: _describe(value, parameter) for key, value in state.items()}


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
    """Refuse tensors that cannot be averaged; all ranks see the same entries, so all of them raise."""
    (first, expected), *others = entries.items()
    for rank, entry in others:
        if (entry.shape, entry.dtype) != (expected.shape, expected.dtype):
            raise ModelError(
                f"optimizer state ({name}) is {_form(expected)} on rank {first} and {_form(entry)} on rank {rank}: it "
                "has no average",
                hint="Build the same optimizer on all ranks.",
            )


def _form(entry: _Entry) -> str:
    return "no tensor" if entry.shape is None else f"{entry.dtype} of shape {entry.shape}"


def _send(tensor: torch.Tensor, source: int, device: torch.device) -> None:
    """Give all ranks one rank's tensor, of any type: it is sent as bytes, on a device that the backend can use."""
    message = tensor.to(device).contiguous()
    dist.broadcast(message.view(-1).view(torch.uint8), source)
    tensor.copy_(message)
