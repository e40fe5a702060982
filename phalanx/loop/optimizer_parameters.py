"""Which parameters of the prepared models an optimizer holds, and their gradients between two boundaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import nn

from phalanx.errors import UsageError, unused_parameters
from phalanx.strategies.base import Strategy

if TYPE_CHECKING:
    from phalanx.data.loader import ShardedLoader
    from phalanx.data.order import MicroInfo


_wants_gradient = attrgetter("requires_grad")


class HeldParameters:
    """Sorts the models' parameters by whether an optimizer holds them; an engine's optimizer holds all."""

    def __init__(self, strategy: Strategy, *, unused_allowed: bool) -> None:
        self._strategy = strategy
        self._unused_allowed = unused_allowed
        self._models: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._checked: set[int] = set()
        self._group_sizes: list[int] | None = None
        self._trained: list[nn.Parameter] = []
        self._strays: list[nn.Parameter] = []
        self._parameters: list[nn.Parameter] = []
        self._requires_grad: list[bool] = []

    def add_model(self, wrapped: nn.Module) -> None:
        """Add a prepared model."""
        self._models.append(wrapped)
        self._group_sizes = None
        self._parameters += wrapped.parameters()
        self._requires_grad = list(map(_wants_gradient, self._parameters))

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add a prepared optimizer."""
        self._optimizers.append(optimizer)
        self._group_sizes = None

    def were_frozen(self) -> bool:
        """Whether parameters were frozen or unfrozen since the last call."""
        before, self._requires_grad = self._requires_grad, list(map(_wants_gradient, self._parameters))
        return self._requires_grad != before

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters of the models that the optimizers hold; all parameters without an optimizer."""
        self._sort()
        return self._trained

    @property
    def strays(self) -> list[nn.Parameter]:
        """The other parameters: zero_grad clears their gradients, and no norm counts them."""
        self._sort()
        return self._strays

    def _sort(self) -> None:
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        sizes = [len(group) for group in groups]  # a group may be added later, for a layer that was frozen
        if self._group_sizes == sizes:
            return
        everything = {id(p): p for wrapped in self._models for p in wrapped.parameters()}
        ids = {id(parameter) for group in groups for parameter in group}
        if self._strategy.owns_step or not self._optimizers:
            ids = set(everything)
        self._trained = [p for key, p in everything.items() if key in ids]
        self._strays = [p for key, p in everything.items() if key not in ids]
        self._group_sizes = sizes

    def part(self, of: nn.Module | torch.optim.Optimizer) -> list[nn.Parameter]:
        """Return the trained parameters of a model or of an optimizer."""
        if self._strategy.owns_step:
            raise UsageError(
                f"strategy = {self._strategy.name!r} clips all gradients together",
                hint="Leave the model or optimizer out: f.clip_grad_norm(max_norm).",
            )
        ids = _ids(of) if isinstance(of, torch.optim.Optimizer) else {id(parameter) for parameter in of.parameters()}
        return [parameter for parameter in self.trained if id(parameter) in ids]

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """At an optimizer's first step, raise for parameters that no model has, and for those without a gradient."""
        if id(optimizer) in self._checked:
            return
        self._checked.add(id(optimizer))
        if not self._strategy.owns_step and self._models:
            self._check_known(optimizer)
        if not self._unused_allowed and not self._strategy.owns_gradients:
            trained = _ids(optimizer)
            unused = [
                name
                for wrapped in self._models
                for name, p in self._strategy.unwrap(wrapped).named_parameters()
                if p.requires_grad and p.grad is None and id(p) in trained
            ]
            if unused:
                raise unused_parameters(unused)

    def _check_known(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise for a parameter of no prepared model: ranks would train it separately, and no checkpoint has it."""
        ids = {id(parameter) for wrapped in self._models for parameter in wrapped.parameters()}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in ids:
                    raise UsageError(
                        f"a parameter of shape {list(parameter.shape)} in group {number} of the optimizer "
                        f"({type(optimizer).__name__}) belongs to no prepared model",
                        hint="Make it a parameter of the model, or prepare() the module that has it.",
                    )


class GradientCopy:
    """An optimizer's gradients at its last call of `step` between two boundaries, after `passes` backward passes."""

    def __init__(self, optimizer: torch.optim.Optimizer, passes: int) -> None:
        self.passes = passes
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._gradients = [(p, None if p.grad is None else p.grad.detach().clone()) for p in parameters]

    @torch.no_grad()
    def put_back(self) -> None:
        """Drop what was added to the gradients since."""
        for parameter, gradient in self._gradients:
            if gradient is None or parameter.grad is None:
                parameter.grad = None if gradient is None else gradient.clone()
            else:
                parameter.grad.copy_(gradient)


class UnfinishedSteps:
    """Optimizers that have micro-batches and no step yet, by their ids; true where there are any."""

    def __init__(self) -> None:
        self._waiting: set[int] = set()
        self._copies: dict[int, GradientCopy] = {}
        """Where several optimizers share gradients: those of each at its last call of `step` between boundaries."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, optimizers: Iterable[int]) -> None:
        """Note that a micro-batch was added for these optimizers, by their ids."""
        self._waiting.update(optimizers)

    def keep(self, optimizer: torch.optim.Optimizer, passes: int) -> None:
        """Keep the gradients that an optimizer has after this many backward passes."""
        self._copies[id(optimizer)] = GradientCopy(optimizer, passes)

    def put_back(self, optimizer: torch.optim.Optimizer, passes: int) -> bool:
        """Drop what was added since its gradients were kept; return whether the optimizer waits for its step."""
        if id(optimizer) not in self._waiting:
            return False
        copy = self._copies.get(id(optimizer))
        if copy is not None and copy.passes != passes:
            copy.put_back()
        return True

    def discard(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer takes its step."""
        self._waiting.discard(id(optimizer))
        self._copies.pop(id(optimizer), None)

    def clear(self) -> None:
        """Note that no optimizer waits for its step."""
        self._waiting.clear()
        self._copies.clear()


class ConcurrentLoaders:
    """The loaders that are read between two backward passes, with their latest batches."""

    def __init__(self) -> None:
        self._read: dict[ShardedLoader, MicroInfo] = {}
        self._passes = 0

    def add(self, loader: ShardedLoader, micro: MicroInfo, passes: int) -> None:
        """Add a batch that is read after this many backward passes."""
        if self._passes != passes or loader in self._read:
            self._read, self._passes = {}, passes
        self._read[loader] = micro
        if len(self._read) > 1:
            _check_weights(self._read)


def _check_weights(read: Mapping[ShardedLoader, MicroInfo]) -> None:
    """Raise for batches of several loaders that one backward call cannot weigh: it takes the last one's share.

    A loader whose end is ragged, and comes first, is found with its first batch.
    """
    differs = len({(micro.scale, micro.boundary) for micro in read.values()}) > 1
    ends = [(steps, _last(loader)) for loader in read if (steps := loader.steps_per_epoch) is not None]
    if len(ends) == len(read) and min(ends)[1] != 1.0 and any(loader.layout.blocks > 1 for loader in read):
        differs = differs or len(set(ends)) > 1
    if differs:
        raise UsageError(
            f"{len(read)} prepared loaders are read together, but their last batches are not equally full: a sample of "
            "one would count more than it should",
            hint="Leave such batches out: Formation(drop_last=True); or give the loaders as many samples each.",
        )


def _last(loader: ShardedLoader) -> float:
    """Return how full the last global batch of an epoch is."""
    samples, whole = loader.num_samples or 0, loader.layout.global_batch
    return (samples % whole or whole) / whole


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
