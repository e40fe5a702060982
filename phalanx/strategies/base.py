"""The strategy contract: every method the loop may call, each with a plain default.

A strategy decides how ranks share one training run. Subclasses override what their way of sharing changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate

from phalanx import torch_compat
from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.observe.call_ring import GRADIENTS
from phalanx.observe.events import Event
from phalanx.strategies.optimizer_state import load_optimizer_state, optimizer_state
from phalanx.world.env import read_rank_env
from phalanx.world.world import World

_LAYOUT = "_phalanx_layout"


OWN_SHARDS: list[Callable[[torch.Tensor], torch.Tensor | None]] = []
"""Functions of engines whose shards are not DTensors: each returns this rank's shard of a tensor, or None."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor: the memory itself, not a copy."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return next((part for shard in OWN_SHARDS if (part := shard(tensor)) is not None), tensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor: a sharded one is gathered from all ranks, any other is returned unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for axis in range(len(placements)):  # one gather per axis: torch warns where one redistribute needs several
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def part_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shard a tensor that all ranks hold whole as `like` is sharded: the inverse of `whole`."""
    if not isinstance(like, DTensor):
        return tensor
    mesh = like.device_mesh
    placements: list[Any] = [Replicate()] * mesh.ndim
    part = DTensor.from_local(tensor.to(like.device), mesh, placements, run_check=False)
    for axis in reversed(range(mesh.ndim)):  # each rank cuts its own shard: nothing is sent
        placements[axis] = like.placements[axis]
        part = part.redistribute(placements=placements)
    return part


def share_weights(model: nn.Module, *, always: bool = False) -> None:
    """Broadcast rank 0's weights and buffers: ranks that initialised their own would hold different models.

    Unless `always`, not after ranks were replaced: rank 0 may be new, and the others hold the state of the run.
    """
    env = read_rank_env()
    if env is not None and env.generation > 0 and not always:
        return
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    if tensors:
        torch_compat.broadcast_coalesced(tensors)


def equalise(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Broadcast parameters from the first rank of a group to the others."""
    parts = [local(parameter.detach()) for parameter in parameters]
    if parts:
        torch_compat.broadcast_coalesced(parts, group)


def newly_trained(model: nn.Module, known_ids: Collection[int]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that want gradients, with their names, apart from the known ones (by id)."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in known_ids]


def is_laid_out(model: nn.Module) -> bool:
    """Whether a run in this process has sharded a model, or cut it into stages."""
    return _LAYOUT in model.__dict__


def claim_layout(model: nn.Module, layout: str | None) -> None:
    """Refuse a model that an earlier run in this process sharded in another way; mark it with this layout."""
    before = model.__dict__.get(_LAYOUT)
    if before is not None and before != layout:
        raise UsageError(
            f"this model is laid out over the ranks as {before}, and cannot be laid out as {layout or 'whole copies'}",
            hint="Build a new model, and move the weights by trainer.save() and load(), or by checkpoints.",
        )
    if layout is not None:
        model.__dict__[_LAYOUT] = layout


@dataclass(frozen=True)
class CommStats:
    """What this rank has sent, what ddp would have sent, how long that took, and how long the rank waited for it."""

    sent_bytes: int | None
    """None where only times are known."""
    plain_bytes: int | None
    busy_s: float | None
    """None where only the wait is known."""
    waited_s: float

    @property
    def hidden_s(self) -> float | None:
        """Communication time that overlapped with computation."""
        return None if self.busy_s is None else max(0.0, self.busy_s - self.waited_s)


class BatchPass(Protocol):
    """Forward and backward of one batch, as the loop hands them to `Strategy.train_batch`."""

    autocast: Callable[[], AbstractContextManager[Any]]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    """The mean loss of (output, target); None where only the model's forward computes it."""

    def forward(self, wrapped: nn.Module, batch: Any) -> torch.Tensor:
        """Return the batch's mean loss."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of that loss."""

    def begin(self) -> float | torch.Tensor:
        """Begin a backward pass that the strategy runs itself; return the factor on its loss."""

    def end(self) -> None:
        """End that backward pass."""

    def target(self, batch: Any) -> Any:
        """Return the target of a batch, or of a part of it."""

    def weigh(self, batch: Any) -> float | torch.Tensor:
        """Return how much a part of the batch counts in the mean over the whole."""


def dense_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients; of a sparse one, as an embedding may have, the rows that are in it, each once."""
    gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            parameter.grad = gradient.coalesce()
            gradient = parameter.grad.values()  # the same memory: what is written here is in the gradient
        if gradient is not None:
            gradients.append(gradient)
    return gradients


class Strategy:
    """Decides how ranks share a model and keep it equal. Every method has a default: whole copies, plain autograd."""

    name: ClassVar[str]
    shards: ClassVar[bool] = False
    """Whether ranks hold shards of the model: whole weights must be gathered, and the process group outlives a fit."""
    in_lockstep: ClassVar[bool] = True
    """Whether a rank cannot complete a step before all others have started it."""
    just_synced: bool = False
    """Whether all ranks have waited for each other in the step just taken; equal on all of them."""
    local_steps: ClassVar[bool] = False
    """Whether each rank steps with its own gradient, and weights are averaged now and then."""
    owns_step: ClassVar[bool] = False
    """Whether `attach`, `backward` and `step` run an engine that steps in place of the optimizer."""
    owns_precision: ClassVar[bool] = False
    """Whether the engine does mixed precision; else the loop runs forward under autocast."""
    owns_gradients: ClassVar[bool] = False
    """Whether the engine hides gradients; else each parameter's `.grad` holds this rank's gradient until the step."""
    hides_gradients: bool = False
    """Whether `.grad` lacks what backward passes without synchronisation have added."""
    adds_passes: bool = True
    """Whether the gradients of several backward passes of one micro-batch add up."""
    optional_state: ClassVar[tuple[str, ...]] = ()
    """Keys of `state` that a checkpoint of another strategy may lack: they then keep their initial values."""

    def __init__(self, config: DistributedConfig, world: World) -> None:
        self.config = config
        self.world = world

    # The model, its optimizer and its data.

    @property
    def layout(self) -> str | None:
        """How this strategy changes a model for good, in words; None where the model stays whole."""
        return None

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model that the loop calls; its parameters stay those of `model`."""
        return model

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """Return the user's own model."""
        return wrapped

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Take a prepared optimizer; return the one that will step."""
        return optimizer

    def compile_targets(self, wrapped: nn.Module) -> list[nn.Module]:
        """Return the modules that torch.compile compiles."""
        return [self.unwrap(wrapped)]

    def count_parameters(self, wrapped: nn.Module, *, trained: bool = False) -> int:
        """Return the number of parameters of the whole model, or of those that are trained; all ranks call this."""
        counted = (p for p in self.unwrap(wrapped).parameters() if p.requires_grad or not trained)
        return sum(p.numel() for p in counted)

    def expect_batches(self, wrapped: nn.Module, batch_size: int) -> str | None:
        """Prepare for batches of up to this size; return a note for the user, if any."""
        return None

    def follow(self, wrapped: nn.Module) -> None:
        """Adapt to parameters that were frozen or unfrozen since the model was wrapped, or since the last call.

        Called before the first backward pass that they affect, by all ranks, which must have changed the same. A model
        may be frozen as a whole for one pass, as in adversarial training: that should cost nothing.
        """

    # One step.

    @property
    def why_not_captured(self) -> str:
        """Why a step cannot be recorded as a CUDA graph and replayed; empty where it can."""
        return f"strategy = {self.name!r} needs the host in every step"

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """Set, before a forward pass, whether its backward must leave synchronised gradients; called on a change."""

    def train_batch(self, wrapped: nn.Module, batch: Any, passes: BatchPass) -> torch.Tensor:
        """Run forward and backward of a batch; return its mean loss."""
        loss = passes.forward(wrapped, batch)
        passes.backward(loss)
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss that is scaled already; at a step boundary, leave it averaged over the ranks."""
        GRADIENTS.began = time.time()
        torch.autograd.backward(loss)

    @property
    def takes_loss_scale(self) -> Callable[[torch.Tensor | None, torch.Tensor | None], None] | None:
        """What takes the losses' mean weight and fp16's loss scale before the pass that synchronises gradients."""
        return None

    def divide_gradients(self, parameters: Sequence[nn.Parameter], divisor: torch.Tensor) -> None:
        """Divide the averaged gradient, at a step boundary, by the mean weight of its losses."""
        gradients = [local(gradient) for gradient in dense_gradients(parameters)]
        if gradients:  # a pipeline stage may be frozen
            torch_compat.foreach_mul_(gradients, 1.0 / divisor.to(gradients[0].device))  # the host's, with offload

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scale gradients so that their one global norm is at most `max_norm`; return the norm before."""
        if not any(p.grad is not None and p.grad.is_sparse for p in parameters):
            return whole(nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True))
        norm = self.grad_norm(parameters)
        torch_compat.foreach_mul_(dense_gradients(parameters), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return the one global gradient norm, equal on all ranks."""
        return whole(nn.utils.get_total_norm(dense_gradients(parameters), foreach=True))

    def step(self, optimizer_step: Callable[[], object] | None) -> None:
        """Take the step that `divide_gradients` and `clip_grad_norm` have prepared.

        None: it will not come, and no parameter has a gradient any more; drop what was added up elsewhere.
        """
        if optimizer_step is not None:
            optimizer_step()

    def after_step(self) -> None:
        """Count a step; all ranks call this after the same steps, also after one that a rank skipped."""

    # State, reports and the end.

    def consolidate(self, wrapped: nn.Module) -> None:
        """Broadcast module buffers from rank 0, before checkpointing or evaluation."""
        buffers = [local(buffer) for buffer in self.unwrap(wrapped).buffers()]
        if self.world.world_size > 1 and buffers:
            with torch.no_grad():
                torch_compat.broadcast_coalesced(buffers)

    def state(self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Return model and optimizer state under canonical parameter names, ready to be saved at any layout."""
        model = self.unwrap(wrapped)
        state: dict[str, Any] = {"model": get_model_state_dict(model)}
        for number, optimizer in enumerate(optimizers):
            state[f"optimizer{number or ''}"] = optimizer_state(model, optimizer)
        return state

    def own_state(self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Return the state that this rank holds without communication: other ranks may be lost."""
        return self.state(wrapped, optimizers)

    def load_state(
        self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any]
    ) -> None:
        """Load what `state` returned, possibly at another layout."""
        model = self.unwrap(wrapped)
        set_model_state_dict(model, state["model"], options=StateDictOptions(strict=True))
        for number, optimizer in enumerate(optimizers):
            load_optimizer_state(model, optimizer, state[f"optimizer{number or ''}"])

    @property
    def keeps_rank_state(self) -> bool:
        """Whether checkpoints hold something that differs between ranks (`rank_state`)."""
        return False

    def rank_state(self) -> dict[str, Any]:
        """Return what only this rank holds and a checkpoint must keep."""
        return {}

    def load_rank_state(self, ranks: Sequence[Mapping[str, Any]], factor: float) -> bool:
        """Load what one or several ranks saved; `factor`: ranks now over ranks then. False where they saved none."""
        return True

    def comm_stats(self) -> CommStats | None:
        """Return what was sent since the models were wrapped; None where nothing is counted."""
        return None

    def closing_event(self) -> Event | None:
        """Return an event for the end of a run that succeeded; the main rank calls this."""
        return None

    def return_weights(self, wrapped: nn.Module) -> None:
        """Leave whole, equal weights in the user's model; all ranks call this at the end of a run that succeeded."""

    def close(self) -> None:
        """Release threads, memory, hooks and engines without communication: other ranks may have failed."""
