"""Which parameters of the prepared models the prepared optimizers hold, and which they do not."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from phalanx.errors import UsageError, unused_parameters
from phalanx.strategies.base import Strategy


class _Sorted(NamedTuple):
    group_sizes: list[int]
    trained: list[nn.Parameter]
    strays: list[nn.Parameter]


class HeldParameters:
    """Sorts the models' parameters by whether an optimizer holds them; an engine holds all."""

    def __init__(self, strategy: Strategy, *, unused_allowed: bool) -> None:
        self._strategy = strategy
        self._unused_allowed = unused_allowed
        self._models: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._checked: set[int] = set()
        self._found: _Sorted | None = None

    def add_model(self, wrapped: nn.Module) -> None:
        """Add a prepared model."""
        self._models.append(wrapped)
        self._found = None

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add a prepared optimizer."""
        self._optimizers.append(optimizer)
        self._found = None

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters of the models that the optimizers hold; all parameters without an optimizer."""
        return self._sort().trained

    @property
    def strays(self) -> list[nn.Parameter]:
        """The other ones: zero_grad empties their gradients, and no norm counts them."""
        return self._sort().strays

    def _sort(self) -> _Sorted:
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        sizes = [len(group) for group in groups]  # a group may be added later, for a layer that was frozen
        if self._found is None or self._found.group_sizes != sizes:
            everything = {id(p): p for wrapped in self._models for p in wrapped.parameters()}
            held = {id(parameter) for group in groups for parameter in group}
            if self._strategy.owns_step or not self._optimizers:
                held = set(everything)
            trained = [p for key, p in everything.items() if key in held]
            self._found = _Sorted(sizes, trained, [p for key, p in everything.items() if key not in held])
        return self._found

    def part(self, of: nn.Module | torch.optim.Optimizer) -> list[nn.Parameter]:
        """Return those of the trained parameters that a model or an optimizer has."""
        if self._strategy.owns_step:
            raise UsageError(
                f"strategy = {self._strategy.name!r} clips all gradients together",
                hint="Leave the model or optimizer out: f.clip_grad_norm(max_norm).",
            )
        if isinstance(of, torch.optim.Optimizer):
            held = {id(parameter) for group in of.param_groups for parameter in group["params"]}
        else:
            held = {id(parameter) for parameter in of.parameters()}
        return [parameter for parameter in self.trained if id(parameter) in held]

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """At an optimizer's first step, refuse parameters that no model has, and those that get no gradient."""
        if id(optimizer) in self._checked:
            return
        self._checked.add(id(optimizer))
        if not self._strategy.owns_step and self._models:
            self._name_outsiders(optimizer)
        if not self._unused_allowed and not self._strategy.owns_gradients:
            self._name_unused(optimizer)

    def _name_outsiders(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a parameter of no prepared model: ranks would train it apart, and no checkpoint would hold it."""
        known = {id(parameter) for wrapped in self._models for parameter in wrapped.parameters()}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise UsageError(
                        f"a parameter of shape {list(parameter.shape)} in group {number} of the optimizer "
                        f"({type(optimizer).__name__}) belongs to no prepared model",
                        hint="Make it a parameter of the model, or prepare() the module that has it.",
                    )

    def _name_unused(self, optimizer: torch.optim.Optimizer) -> None:
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        unused = [
            name
            for wrapped in self._models
            for name, p in self._strategy.unwrap(wrapped).named_parameters()
            if p.requires_grad and p.grad is None and id(p) in trained
        ]
        if unused:
            raise unused_parameters(unused)
