"""A training step that the user writes, inside the trainer: several optimizers, each for a part of the model.

def training_step(step, batch):
    critic, generator = step.optimizers["critic"], step.optimizers["generator"]
    fake = step.model.generator(noise)
    step.backward(loss_of(step.model.critic(fake.detach()), step.model.critic(batch)))
    critic.step()
    critic.zero_grad()
    ...
    return loss

Each part is prepared as its own model, as in a loop of the user's, so that strategies and accumulation act as
there; the loop around it (checkpoints, recovery, evaluation, callbacks, logging) is that of every training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx import torch_compat
from phalanx.config import DistributedConfig
from phalanx.errors import UsageError, a_type, unknown_name
from phalanx.loop.loss_log import LossLog
from phalanx.loop.script import log
from phalanx.loop.step import StepOutcome
from phalanx.loop.values import Values

if TYPE_CHECKING:
    from phalanx.loop.formation import Formation

_EXAMPLE = "optimizer={'critic': Adam(model.critic.parameters()), 'generator': Adam(model.generator.parameters())}"


class _Parts:
    """The user's model, whose parts are the prepared ones: only calls of these are seen by the strategy."""

    def __init__(self, model: nn.Module, parts: Mapping[str, nn.Module]) -> None:
        self._model, self._parts = model, parts

    def __getattr__(self, name: str) -> Any:
        return self._parts[name] if name in self._parts else getattr(self._model, name)


class _AllGroups:
    """The groups of several optimizers as those of one, for the schedule of their rates."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, the first one's first."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


class TrainingStep:
    """What `training_step(step, batch)` gets: the parts of the model, their optimizers, and `backward`."""

    def __init__(
        self, formation: Formation, run: Callable[..., Any], model: nn.Module, optimizers: Mapping[str, Any]
    ) -> None:
        self._formation, self._run = formation, run
        others = [name for name, child in model.named_children() if name not in optimizers and child.state_dict()]
        parts = {name: formation.prepare(getattr(model, name)) for name in (*optimizers, *others)}
        formation.part_names = list(parts)
        self.model: Any = _Parts(model, parts)
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        """By the names that were given; the first one counts the steps, and steps once for each batch."""
        for name, optimizer in optimizers.items():
            part = getattr(model, name)
            instance = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(list(part.parameters()))
            self.optimizers[name] = formation.prepare(instance)
        self._weight: float | torch.Tensor | None = None
        self.number = 0
        """The number of the step that is being taken, from 1."""
        self.groups: Any = _AllGroups(list(self.optimizers.values()))

    @property
    def device(self) -> torch.device:
        """Where the batch and the parts are."""
        return self._formation.device

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Add the gradient of a micro-batch's mean loss; `weight`: the units (such as tokens) that it averages."""
        self._formation.require_weight(weight, "step")
        self._weight = weight
        self._formation.clock.enter("backward")
        self._formation.gradients.backward(loss, weight)
        self._formation.clock.enter("forward")

    def clip_grad_norm(self, max_norm: float, name: str | None = None) -> torch.Tensor | None:
        """Clip the gradients of one optimizer, or of all, to one norm over the ranks; return the norm before."""
        return self._formation.clip_grad_norm(max_norm, None if name is None else self.optimizers[name])

    def log(self, values: Values, value: Any = None, *, reduce: str | None = None) -> None:
        """Record your own numbers, at this step; see `phalanx.log`."""
        log(values, value, step=self.number, reduce=reduce)

    def _share(self, samples: int) -> float | torch.Tensor:
        """Return how much a micro-batch counts in the loss of its step: as its backward calls said, or its samples."""
        return float(samples) if self._weight is None or not samples else self._weight

    def run(
        self, batches: Iterator[Any], loss_log: LossLog, reseed: Callable[[int, int], None] | None
    ) -> StepOutcome | None:
        """Call the function for micro-batches up to the next step's boundary; None when the epoch has none left."""
        gradients, clock = self._formation.gradients, self._formation.clock
        number = self.number = gradients.steps + 1
        loss_log.sum_step()  # of the last step: on a GPU the gate of this one says whether the sum is complete
        clock.enter("data")
        for batch in batches:
            clock.enter("forward")
            self._weight = None
            if reseed is not None:
                reseed(number, gradients.current.offset)
            with self._formation.autocast():
                loss, others = _loss_and_others(self._run(self, batch))
            if others and gradients.current.samples:
                self.log(others)
            loss_log.add(number, loss.detach(), self._share(gradients.current.samples))
            if gradients.boundary:
                break
            clock.enter("data")
        else:
            clock.enter("other")
            return None
        clock.enter("other")
        if self.device.type == "cpu":  # the function returns the loss after its step; here the sum is complete at once
            loss_log.sum_step()
        if gradients.steps != number:
            first = next(iter(self.optimizers))
            raise UsageError(
                f"training_step took {gradients.steps - number + 1} steps of the optimizer '{first}' for one batch; "
                "the first optimizer counts the steps",
                hint=f"Call step.optimizers['{first}'].step() once, or name first the one that steps for each batch.",
            )
        return StepOutcome(loss.detach(), None)


def _loss_and_others(returned: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the loss that training_step has returned, by itself or among other values, and these."""
    loss, others = returned, {}
    if isinstance(returned, Mapping):
        if "loss" not in returned:
            names = ", ".join(repr(name) for name in returned) or "nothing"
            raise UsageError(
                f"training_step returned a dict without 'loss', the loss of the batch: it has {names}",
                hint="Return {'loss': loss, 'critic': critic_loss}; the other values are logged.",
            )
        others = {name: value for name, value in returned.items() if name != "loss"}
        loss = returned["loss"]
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        description = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise UsageError(
            f"training_step returned {description}, not the loss of the batch as one number",
            hint="Return the loss to report, a scalar tensor; or {'loss': loss, 'critic': critic_loss} to log more.",
        )
    return loss, others


def check_training_step(
    function: object, model: nn.Module, optimizers: Any, scheduler: Any, config: DistributedConfig
) -> None:
    """Raise for a step that cannot be taken, before any process starts."""
    if not callable(function):
        raise UsageError(f"training_step = {function!r}: expected a function (step, batch) -> loss")
    if not isinstance(optimizers, Mapping) or not optimizers:
        raise UsageError(
            "training_step goes with the optimizers of the model's parts, by name", hint=f"Write {_EXAMPLE}"
        )
    children = dict(model.named_children())
    for name, value in optimizers.items():
        if name not in children:
            kind = f"part of {type(model).__name__} for an optimizer"
            raise UsageError(unknown_name(kind, str(name), list(children)), hint=f"Write {_EXAMPLE}")
        if isinstance(value, torch.optim.Optimizer):
            _check_part(name, children[name], value)
        elif not callable(value):
            raise UsageError(
                f"optimizer['{name}'] is {a_type(value)}",
                hint="Give a torch optimizer, or a function of parameters.",
            )
    outside = [n for n, p in model.named_parameters() if p.requires_grad and n.split(".")[0] not in optimizers]
    direct = [*torch_compat.direct_parameters(model), *torch_compat.direct_buffers(model)]
    if outside or direct:
        name = (outside or direct)[0]
        raise UsageError(
            f"'{name}' of {type(model).__name__} belongs to no part that has an optimizer",
            hint=f"Make it a part of a child with an optimizer, or freeze its child: {_EXAMPLE}",
        )
    instead = {
        "scheduler": "lr_schedule='cosine', for all rates",
        "gradient_clipping": "step.clip_grad_norm(1.0, 'critic')",
    }
    for setting, value in {"scheduler": scheduler, "gradient_clipping": config.gradient_clipping}.items():
        if value is not None:
            raise UsageError(f"{setting} does not go with training_step", hint=f"Write instead: {instead[setting]}.")
    if config.pipeline_parallel > 1 or config.facts.shards_by_engine or config.facts.has_servers:
        layout = "pipeline_parallel" if config.pipeline_parallel > 1 else f"strategy = {config.resolved_strategy!r}"
        raise UsageError(
            f"{layout} takes its steps itself, so training_step cannot", hint="Choose ddp or fsdp, or a loss_fn."
        )


def _check_part(name: str, part: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    part_ids = {id(parameter) for parameter in part.parameters()}
    if optimizer_ids - part_ids:
        raise UsageError(
            f"optimizer['{name}'] holds {len(optimizer_ids - part_ids)} parameters that are not of model.{name}",
            hint=f"Build it from model.{name}.parameters().",
        )
