"""The gradients of a step as a transaction: accumulation, scaling, clipping; all ranks step or none does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.errors import ModelError, UsageError, a_type
from phalanx.loop.loss_log import LossWeights
from phalanx.loop.optimizer_parameters import ConcurrentLoaders, HeldParameters, UnfinishedSteps
from phalanx.loop.precision import LossScale, Precision
from phalanx.strategies.base import Strategy
from phalanx.world.abort import complete, raise_if_aborted
from phalanx.world.world import World

if TYPE_CHECKING:
    from phalanx.data.loader import ShardedLoader
    from phalanx.data.order import MicroInfo


def _one_pass(strategy: str) -> UsageError:
    return UsageError(
        f"backward was called twice for one micro-batch, and {strategy} does not add the gradients of the calls up",
        hint="Add the losses up and call backward once: f.backward(first + second).",
    )


def _no_gradient(loss: object) -> ModelError | UsageError:
    if not isinstance(loss, torch.Tensor):
        return UsageError(f"backward() got {a_type(loss)}", hint="Give it the loss, a tensor with one number.")
    return ModelError(
        "the loss has no gradient: it does not depend on a trained parameter",
        hint="Compute it from the model's output without detach(), item(), numpy() or torch.no_grad() on the way.",
    )


def _one_step() -> UsageError:
    return UsageError(
        "an optimizer stepped twice before the other one stepped; they share one fp16 loss scale",
        hint="Step each optimizer once per batch, or write mixed_precision='bf16', which has no scale.",
    )


class GpuGate(Protocol):
    """Holds a step back on the GPU if its gradients may be incomplete (`phalanx.recovery`)."""

    has_lost_state: bool
    """Whether a step that may be wrong could not be undone."""

    def run(self, step: Callable[[], object], optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer's step; raise if it was held back."""


class StepCounts:
    """How often the step of each optimizer, by its id, was tried, and skipped because its gradient was not finite."""

    def __init__(self) -> None:
        self.tried: dict[int, int] = {}
        self.skipped: Counter[int] = Counter()

    def taken(self, key: int, scale: LossScale | None) -> int | None:
        """Return how many steps an optimizer has taken; None before the first call of its step."""
        if key not in self.tried:
            return None
        overflows = scale.skipped(key) if scale is not None else 0
        return self.tried[key] - self.skipped[key] - overflows


class Gradients:
    """Accumulates, scales, clips and applies the gradients of the prepared models."""

    def __init__(
        self,
        config: DistributedConfig,
        world: World,
        strategy: Strategy,
        precision: Precision,
        followed: Callable[[], None] = lambda: None,
    ) -> None:
        """`followed`: called after parameters were frozen or unfrozen during training."""
        self._strategy = strategy
        self._take_scale = strategy.takes_loss_scale
        self.scale: LossScale | None = None
        if precision.scaler is not None:
            self.scale = LossScale(precision.scaler, world.device, agree=strategy.shards and world.world_size > 1)
        self._skip_nonfinite = config.on_nonfinite == "skip"
        self._accumulation = config.gradient_accumulation_steps
        self._fixed_order = config.fixed_order
        self._counted = 0
        self._wrapped: list[nn.Module] = []
        self._followed = followed
        self.held = HeldParameters(strategy, unused_allowed=config.find_unused_parameters)
        self._weight = LossWeights(world.device, 1 if strategy.local_steps else world.world_size, config.timeout)
        self._ready = self._direct = False
        self._primary: torch.optim.Optimizer | None = None
        self._adopted: list[int] = []
        self._unfinished = UnfinishedSteps()
        self._calls = self._passes = 0
        self._loaders = ConcurrentLoaders()
        self.steps = 0
        self.micro: MicroInfo | None = None
        self.boundary = self._accumulation == 1
        self._counts = StepCounts()
        self.batches = 0
        """How many batches of prepared loaders were begun."""
        self.on_step: Callable[[], None] | None = None
        """Called after each step that `steps` counts."""
        self.gate: GpuGate | None = None
        """Where lost ranks are replaced and gradients are reduced on a GPU: a step waits there for complete ones."""

    def watch(self, wrapped: nn.Module) -> None:
        """Add a wrapped model."""
        self._wrapped.append(wrapped)
        self.held.add_model(wrapped)
        if self._accumulation > 1:
            self._strategy.set_sync(wrapped, False)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer whose step goes through the transaction; the first one counts the steps."""
        self._primary = self._primary or optimizer
        self._adopted.append(id(optimizer))
        if len(self._adopted) > 1:
            self._set_sync(self.boundary)
        self.held.add_optimizer(optimizer)

    def begin(self, micro: MicroInfo, loader: ShardedLoader | None = None) -> None:
        """Set the description of the batch whose passes are next; `loader`: which is about to yield it."""
        if loader is not None:
            self._loaders.add(loader, micro, self._passes)
        self.micro = micro
        self._calls = 0
        self.batches += 1
        if micro.boundary is not self.boundary:
            self.boundary = micro.boundary
            self._set_sync(micro.boundary)

    def _set_sync(self, boundary: bool) -> None:
        """Let gradients be synchronised at a boundary; with several optimizers `step` and zero_grad must see them."""
        sync = boundary or (len(self._adopted) > 1 and self._strategy.hides_gradients)
        for wrapped in self._wrapped:
            self._strategy.set_sync(wrapped, sync)

    def _follow(self) -> None:
        """Let the strategy adapt where parameters were frozen or unfrozen since the last backward pass."""
        if self.held.were_frozen():
            for wrapped in self._wrapped:
                self._strategy.follow(wrapped)
            self._followed()

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Add this micro-batch's gradient; `weight`: how many units (tokens, say) the loss is the mean of."""
        if not getattr(loss, "requires_grad", False):
            raise _no_gradient(loss)
        factor = self.enter(weight)
        scaled = loss if isinstance(factor, float) and factor == 1.0 else loss * factor
        self._strategy.backward(scaled)
        self.leave()

    def announce(self, weight: float | torch.Tensor | None) -> None:
        """Say before a prepared loader's batch is passed forward which weight its backward pass will have.

        The ranks add up the weight meanwhile, if it is that of a step's only micro-batch.
        """
        if weight is not None and self.micro is not None and not self._calls and self._is_only_batch:
            self._weight.announce(self._units(weight))

    @property
    def _is_only_batch(self) -> bool:
        """Whether the next backward pass is of a step's only micro-batch.

        It is divided before its backward pass: that spares a pass over all gradients. Not in a fixed order, whose bits
        are those of any number of micro-batches.
        """
        return self.boundary and self._weight.is_empty and not self._fixed_order

    def _units(self, weight: float | torch.Tensor) -> float | torch.Tensor:
        """Return the weight of a batch's loss: 0 for a placeholder without samples."""
        return 0.0 if self.micro is not None and self.micro.samples == 0 else weight

    def enter(self, weight: float | torch.Tensor | None = None) -> float | torch.Tensor:
        """Begin a backward pass; return the factor on its loss. `leave` ends it."""
        self._ready = False
        self._follow()
        if self.micro is None:  # not a prepared loader: count the micro-batches here
            self._counted += 1
            self.boundary = self._counted % self._accumulation == 0
            if self._accumulation > 1:
                self._calls = 0
        if self._calls and not self._strategy.adds_passes:
            raise _one_pass(self._strategy.name)
        factor: float | torch.Tensor
        if weight is not None:
            weigh = self._weight.whole if self._is_only_batch else self._weight.add
            factor = weigh(self._units(weight), self._calls)
        else:
            self._weight.none()
            factor = 1.0 / self._accumulation if self.micro is None else self.micro.scale
        self._calls += 1
        self._passes += 1
        scale: torch.Tensor | None = None
        if self.scale is not None:
            # While an optimizer waits for its step with micro-batches of this scale, another's must not change it.
            if not (self._unfinished and self.boundary) or self.scale.is_removed_from(self._adopted):
                self.scale.update()
            scale = self.scale.current()
            factor = scale * factor
        if self._take_scale is not None and self.boundary:  # gradients are averaged, and compressed, in this pass
            self._take_scale(self._weight.mean(), scale)
        return factor

    def leave(self) -> None:
        """End a backward pass: note whether the gradient is complete."""
        if self.micro is None:
            # Here, for DDP reads its flag in forward, and FSDP in backward.
            self._set_sync((self._counted + 1) % self._accumulation == 0)
        if not self.boundary:
            self._unfinished.add(self._adopted)
        elif len(self._adopted) == 1:  # the gradient is complete: it may be dropped without a step
            self._unfinished.clear()

    def zeroed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Do what zero_grad must do instead of dropping all of an optimizer's gradients, if that is something else.

        Between the micro-batches of one step it drops what was added since the optimizer's last call of `step`, such as
        another optimizer's loss; an engine drops its own buffers.
        """
        if self._unfinished.put_back(optimizer, self._passes):
            return True
        if self._strategy.owns_step:
            self._strategy.step(None)
        return self._strategy.owns_step

    def finish(self) -> None:
        """At a boundary: unscale, divide by the global weight; once per step, at the first call (clip or step)."""
        if self._ready or not self.boundary:
            return
        self._ready = True
        if (weight := self._weight.mean()) is not None:
            self._strategy.divide_gradients(self.held.trained, weight)
        self._weight.clear()

    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove fp16's loss scale from an optimizer's gradients, once per step."""
        if self.scale is not None and self.boundary:
            self.scale.unscale(optimizer, self.steps)

    def clip(
        self,
        max_norm: float,
        optimizers: Sequence[torch.optim.Optimizer],
        part: nn.Module | torch.optim.Optimizer | None = None,
    ) -> torch.Tensor | None:
        """Clip to one norm at a boundary, over all or a part; return the norm before, or None between boundaries."""
        if max_norm <= 0:  # torch would turn the gradient around, or remove it
            raise UsageError(
                f"clip_grad_norm({max_norm:g}): the norm must be greater than 0",
                hint="To clip nothing, leave the call out.",
            )
        if not self.boundary:
            return None
        self.finish()
        chosen = self.held.trained if part is None else self.held.part(part)
        for optimizer in [part] if isinstance(part, torch.optim.Optimizer) else optimizers:
            self._unscale(optimizer)
        return self._strategy.clip_grad_norm(chosen, max_norm)

    def norm(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> torch.Tensor:
        """Return the global gradient norm of the finished gradient."""
        self.finish()
        for optimizer in optimizers:
            self._unscale(optimizer)
        return self._strategy.grad_norm(self.held.trained)

    @property
    def current(self) -> MicroInfo:
        """The prepared loader's description of the current batch."""
        if self.micro is None:
            raise UsageError("no batch of a prepared loader is under way", hint="Iterate over what prepare() returned.")
        return self.micro

    @contextmanager
    def direct(self) -> Iterator[None]:
        """Pass `optimizer.step()` through: GradScaler and torch's state-dict code call it themselves."""
        self._direct = True
        try:
            yield
        finally:
            self._direct = False

    def step(self, optimizer: torch.optim.Optimizer, inner: Callable[[], object]) -> None:
        """Take an optimizer's step at a boundary; between boundaries do nothing."""
        if self._direct:
            inner()
            return
        self._counts.tried.setdefault(id(optimizer), 0)
        if not self.boundary:
            if len(self._adopted) > 1 and not self._strategy.owns_step:
                self._unfinished.keep(optimizer, self._passes)
            return
        if self._unfinished and self.scale is not None and self.scale.has_stepped(optimizer):
            raise _one_step()
        self._unfinished.discard(optimizer)
        self.held.check(optimizer)
        self.finish()
        self._unscale(optimizer)
        self._apply(optimizer, inner)
        self._calls = 0
        if optimizer is self._primary:  # `steps` counts global batches: with two optimizers, one of them counts
            self.steps += 1  # after the last collective: a step that lost ranks interrupt was not taken
            self._strategy.after_step()
            if self.on_step is not None:
                self.on_step()

    def _apply(self, optimizer: torch.optim.Optimizer, inner: Callable[[], object]) -> None:
        self._counts.tried[id(optimizer)] += 1
        if self._skip_nonfinite and not bool(torch.isfinite(self._norm_of(optimizer))):
            raise_if_aborted()  # the norm may be that of a part of a sum
            self._counts.skipped[id(optimizer)] += 1
            return
        self._direct = True  # not `with self.direct()`, which costs a microsecond per step
        try:
            if self.scale is not None:
                complete()  # the scaler waits for the GPU anyway
                self.scale.step(optimizer)
            elif self.gate is not None:
                self.gate.run(partial(self._strategy.step, inner), optimizer)
            else:
                self._strategy.step(inner)
        finally:
            self._direct = False

    def _norm_of(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return the norm that an optimizer's step depends on: what another one has left does not count."""
        one = self._strategy.owns_step or len(self._adopted) == 1
        return self._strategy.grad_norm(self.held.trained if one else self.held.part(optimizer))

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped because the gradient was not finite; waits for the device with fp16."""
        return sum(self._counts.skipped.values()) + (self.scale.skipped() if self.scale is not None else 0)

    def taken(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return how many steps an optimizer has taken; None before the first call of its step."""
        # An engine replaces the user's optimizer by its own.
        key = id(optimizer) if id(optimizer) in self._adopted else id(self._primary)
        return self._counts.taken(key, self.scale)

    def abandon(self) -> None:
        """Drop the gradients of micro-batches whose step will not come: their epoch was interrupted."""
        for parameter in (*self.held.trained, *self.held.strays):
            parameter.grad = None
        self._strategy.step(None)
        self._unfinished.clear()
        self._weight.clear()


def count_replayed(gradients: Gradients, passes: int) -> None:
    """Count a step that the device has taken by itself, with this many backward passes."""
    gradients._passes += passes
    gradients._calls = 0
    gradients._counts.tried[id(gradients._primary)] += 1
    gradients.steps += 1
    gradients._strategy.after_step()


@contextmanager
def undone_on_error(gradients: Gradients) -> Iterator[None]:
    """Take back what is counted within where an error is raised: nothing of it was executed."""
    counted = gradients.steps, gradients._passes, dict(gradients._counts.tried)
    try:
        yield
    except BaseException:
        gradients.steps, gradients._passes, gradients._counts.tried = counted
        gradients._calls = 0
        if gradients.scale is not None:
            gradients.scale.forget()
        gradients.abandon()
        raise
