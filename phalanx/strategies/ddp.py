"""ddp: every rank holds the whole model, and torch averages gradients during backward.

With it the base of all strategies that average gradients with a compressor, whose residuals are in the checkpoint.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx import torch_compat
from phalanx.comm.comm_thread import CommThread
from phalanx.comm.compress import Compressor, build_compressor, merged_states
from phalanx.comm.exchange import Exchange, TorchExchange
from phalanx.config import DistributedConfig
from phalanx.errors import ModelError, UsageError
from phalanx.strategies.base import CommStats, Strategy
from phalanx.strategies.tensors import average, is_meta, materialise
from phalanx.world.world import World

if TYPE_CHECKING:
    from phalanx.comm.compress.hook import CompressionHook

RANK_STATE = "compression"
"""Key of the compressors' states, one per prepared model, in a rank's part of a checkpoint."""


@dataclass(frozen=True)
class Lane:
    """How the gradients of one model are sent."""

    compressor: Compressor
    exchange: Exchange
    comm_thread: CommThread


class CompressesGradients(Strategy):
    """A strategy with one `Lane` per wrapped model, in the order of wrapping."""

    def __init__(self, config: DistributedConfig, world: World) -> None:
        super().__init__(config, world)
        self.lanes: list[Lane] = []

    def compressor_for(self, model: nn.Module) -> Compressor:
        """Return the compressor that the config names; ModelError for a model that it cannot compress."""
        for name, module in model.named_modules():
            if self.config.compression != "none" and getattr(module, "sparse", False) is True:
                raise ModelError(
                    f"compression = {self.config.compression!r}: {name} ({type(module).__name__}) has sparse "
                    "gradients, which have no flat memory to compress",
                    hint="Build it with sparse=False, or leave compression out.",
                )
        return build_compressor(self.config, model.named_parameters())

    @property
    def takes_loss_scale(self) -> Callable[[torch.Tensor | None, torch.Tensor | None], None] | None:
        """What sets the scale of the compressors, where there are any."""
        return self._set_loss_scale if self.config.compression != "none" else None

    def _set_loss_scale(self, weight: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        """Set the mean weight of the losses and fp16's loss scale, which compressors remove from their residuals.

        Without residuals fp16's loss scale stays in: fp16 messages need it as fp16 gradients do.
        """
        whole = weight if scale is None else scale if weight is None else weight * scale
        for lane in self.lanes:
            lane.compressor.unit = whole if lane.compressor.keeps_residuals else weight

    @property
    def keeps_rank_state(self) -> bool:
        """Whether there are compressors."""
        return bool(self.lanes)

    def rank_state(self) -> dict[str, Any]:
        """Return the compressors' states on this rank, one for each model."""
        return {RANK_STATE: [lane.compressor.state_dict() for lane in self.lanes]}

    def load_rank_state(self, ranks: Sequence[Mapping[str, Any]], factor: float) -> bool:
        """Load what one or several ranks saved; `factor`: ranks now over ranks then."""
        saved = [rank[RANK_STATE] for rank in ranks if RANK_STATE in rank]
        for number, lane in enumerate(self.lanes):
            states = [states[number] for states in saved if number < len(states)]
            if states:
                lane.compressor.load_state_dict(merged_states(states, factor))
        return bool(saved)

    def comm_stats(self) -> CommStats | None:
        """Return what was sent since the models were wrapped; None where nothing is counted."""
        if not self.lanes:
            return None
        return CommStats(
            sum(lane.exchange.sent_bytes for lane in self.lanes),
            sum(lane.compressor.plain_bytes for lane in self.lanes),
            sum(lane.comm_thread.busy_s for lane in self.lanes),
            sum(lane.comm_thread.waited_s for lane in self.lanes),
        )

    def close(self) -> None:
        """End the communication threads and release the memory of the gradients."""
        for lane in self.lanes:
            lane.comm_thread.close()
            lane.exchange.close()
        self.lanes.clear()


_ARMED = "_phalanx_armed"
"""Whether a wrapped model was called since its gradients were averaged last: torch averages once after each call."""


class DDP(CompressesGradients):
    """torch.nn.parallel.DistributedDataParallel; with one rank, the bare model."""

    name = "ddp"

    def __init__(self, config: DistributedConfig, world: World) -> None:
        super().__init__(config, world)
        # Not held: torch can deadlock where a group is destroyed while its DDP lives.
        self._wrapped: list[weakref.ref[DistributedDataParallel]] = []
        self._hooks: dict[int, CompressionHook] = {}
        self._built: dict[int, set[int]] = {}
        self._steps = self._counted = 0
        self._times = (0.0, 0.0)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model in torch's DDP. One rank, or nothing to train, needs no wrapper."""
        if is_meta(model):
            materialise(model, self.world.device)
        if self.world.world_size == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        device = self.world.device
        options: dict[str, Any] = {
            "device_ids": [device.index] if device.type == "cuda" else None,
            "bucket_cap_mb": self.config.bucket_cap_mb,
            "find_unused_parameters": self.config.find_unused_parameters,
            "gradient_as_bucket_view": True,  # gradients are in the buckets: nothing is copied
            "init_sync": self.world.env.generation == 0,  # after that rank 0 may be a new rank, without the state
        }
        if self.config.compression == "none":
            wrapped = DistributedDataParallel(model, **options)
        else:
            from phalanx.comm.compress.hook import CompressionHook, FixedBuckets  # most runs compress nothing

            compressor = self.compressor_for(model)
            wrapped = FixedBuckets(model, **options)
            exchange = TorchExchange(dist.new_group(timeout=timedelta(seconds=self.config.timeout)))
            hook = CompressionHook(compressor, exchange, model.named_parameters(), self.world.device)
            wrapped.register_comm_hook(None, hook.take)
            self._hooks[id(wrapped)] = hook
            self.lanes.append(Lane(compressor, exchange, hook.comm_thread))
        wrapped.register_forward_pre_hook(_arm)
        self._wrapped.append(weakref.ref(wrapped))
        self._built[id(wrapped)] = _trained(wrapped)
        return wrapped

    @property
    def why_not_captured(self) -> str:
        """Why a step cannot be recorded: the host takes part in averaging, apart from plain nccl."""
        config, backend = self.config, self.world.comm_backend
        if self.world.world_size == 1:
            return ""
        if backend is None or "nccl" not in backend:
            return f"the host averages gradients (communication_backend = {backend!r})"
        if config.compression != "none":
            return f"the host compresses gradients (compression = {config.compression!r})"
        return "find_unused_parameters looks for them in every step" if config.find_unused_parameters else ""

    @property
    def _models(self) -> list[DistributedDataParallel]:
        """The wrapped models, in the same order on all ranks."""
        return [model for reference in self._wrapped if (model := reference()) is not None]

    def follow(self, wrapped: nn.Module) -> None:
        """Build torch's reducer anew, which takes the parameters that want gradients when it is made."""
        if not isinstance(wrapped, DistributedDataParallel):
            if self.world.world_size > 1 and any(p.requires_grad for p in wrapped.parameters()):
                raise UsageError(
                    f"all parameters of {type(wrapped).__name__} were frozen when it was prepared, so torch's DDP does "
                    "not average its gradients",
                    hint="Prepare it while some of its parameters want gradients, and freeze those afterwards.",
                )
            return
        trained = _trained(wrapped)
        if trained and trained != self._built[id(wrapped)]:
            self._built[id(wrapped)] = trained
            state = wrapped.__getstate__()  # type: ignore[no-untyped-call]
            wrapped.__setstate__(state)  # type: ignore[no-untyped-call] # as unpickling does: the group stays
            wrapped.__dict__[_ARMED] = False
            if id(wrapped) in self._hooks:
                wrapped.register_comm_hook(None, self._hooks[id(wrapped)].take)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward, and average what torch leaves to each rank: a second pass after one call of the model."""
        models = [model for model in self._models if model.require_backward_grad_sync]
        if len(models) == 1 and models[0].__dict__.get(_ARMED, False):  # the usual case, without looking at gradients
            self._run(loss)
            models[0].__dict__[_ARMED] = False
            return
        before = [_versions(model) for model in models]
        self._run(loss)
        for model, versions in zip(models, before, strict=True):
            if _versions(model)[0] != versions[0]:
                if not model.__dict__.get(_ARMED, False):
                    self._average(model)
                model.__dict__[_ARMED] = False

    def _run(self, loss: torch.Tensor) -> None:
        try:
            super().backward(loss)
        except RuntimeError as error:
            if "mark a variable ready only once" not in str(error):
                raise
            raise ModelError(
                "a backward pass adds to gradients that torch's DDP has sent in the pass before, without a call of the "
                "model in between",
                hint="Add the losses up and call backward once: f.backward(first + second).",
            ) from error

    def _average(self, model: DistributedDataParallel) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.config.find_unused_parameters:  # another rank may have used some that this one has not
            used = torch.tensor([int(p.grad is not None) for p in parameters], device=self.world.device)
            dist.all_reduce(used, op=dist.ReduceOp.MAX)
            for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
                if anywhere and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        average([parameter.grad for parameter in parameters if parameter.grad is not None])

    def after_step(self) -> None:
        """Count a step."""
        self._steps += 1

    def close(self) -> None:
        """Let torch's DDP go, also if user code still holds it: after a lost rank its parameters get another one."""
        for model in self._models:
            torch_compat.remove_ddp_hooks(model)
        super().close()

    def comm_stats(self) -> CommStats | None:
        """Return the times of plain DDP: the mean of those that torch takes (ten steps, then every hundredth)."""
        if self.lanes:
            return super().comm_stats()
        times = [seconds for model in self._models if (seconds := torch_compat.ddp_times(model)) is not None]
        if not times:
            return None
        busy, waited = (sum(column) * (self._steps - self._counted) for column in zip(*times, strict=True))
        self._times = (self._times[0] + busy, self._times[1] + waited)
        self._counted = self._steps
        return CommStats(None, None, *self._times)

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """Return the module inside DDP."""
        return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """Do what `no_sync` does: the reducer reads this flag in forward."""
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.require_backward_grad_sync = sync


def _trained(model: nn.Module) -> set[int]:
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def _arm(model: Any, inputs: Any) -> None:
    """Note a call of a wrapped model that prepares its reducer for a backward pass."""
    if torch.is_grad_enabled() and model.require_backward_grad_sync:
        model.__dict__[_ARMED] = True


def _versions(model: nn.Module) -> tuple[list[tuple[int, int] | None], list[torch.Tensor | None]]:
    """Return what tells whether a backward pass has changed a gradient, and the gradients, so that ids stay unique."""
    gradients = [parameter.grad for parameter in model.parameters()]
    return [None if g is None else (id(g), torch_compat.version_of(g)) for g in gradients], gradients
