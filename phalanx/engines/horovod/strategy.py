"""Strategy `horovod`: gradients averaged by Horovod while backward runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from phalanx.comm.reducer import BackwardHooks
from phalanx.config import DistributedConfig
from phalanx.config.option import options_of
from phalanx.engines.horovod.declaration import HorovodSettings
from phalanx.engines.horovod.rendezvous import horovod
from phalanx.engines.horovod.rules import STARTED_BY
from phalanx.errors import ModelError, UsageError, frozen_later
from phalanx.strategies.base import Strategy, newly_trained
from phalanx.strategies.tensors import is_meta, materialise
from phalanx.world.world import World

_PAUSE = 50e-6
"""Seconds between two polls. Horovod's own wait polls all the time and keeps a core busy, which Horovod's threads and
other ranks of the node need."""


class HorovodReducer(BackwardHooks):
    """Averages the gradients of some parameters over all ranks, at the end of each backward pass."""

    def __init__(
        self,
        hvd: Any,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        compression: str = "none",
        adasum: bool = False,
        allow_unused: bool = False,
    ) -> None:
        super().__init__(named_parameters)
        self._hvd = hvd
        self._compression = getattr(hvd.Compression, compression)
        self._op = hvd.Adasum if adasum else hvd.Average
        self._allow_unused = allow_unused
        self._under_way: dict[int, tuple[Any, Any]] = {}

    def close(self) -> None:
        """Remove the hooks."""
        self._remove_hooks()
        self._under_way.clear()

    def _take(self, number: int) -> None:
        if number in self._under_way:
            raise self._second_gradient(number)
        self._send(number)

    def _forget_pass(self) -> bool:
        """Return whether all-reduces are under way: Horovod cannot cancel them."""
        return bool(self._under_way)

    def _send(self, number: int) -> None:
        gradient = self._parameters[number].grad
        assert gradient is not None, "sent only where there is one"
        self._check_dense(number, gradient)
        sent, context = self._compression.compress(gradient)
        handle = self._hvd.allreduce_async_(sent, name=self._names[number], op=self._op)
        self._under_way[number] = (handle, context)

    def _finish(self) -> None:
        """At the end of a backward pass: send what only an earlier micro-batch touched, and wait for all."""
        try:
            self._send_remaining()
            for number, (handle, context) in self._under_way.items():
                while not self._hvd.poll(handle):
                    time.sleep(_PAUSE)
                averaged = self._compression.decompress(self._hvd.synchronize(handle), context)
                gradient = self._parameters[number].grad
                if averaged is not gradient:
                    gradient.copy_(averaged)  # type: ignore[union-attr]
        finally:
            self._under_way.clear()
            self._pass = None

    def _send_remaining(self) -> None:
        missing = [number for number, parameter in enumerate(self._parameters) if parameter.grad is None]
        unused = [number for number in missing if self._parameters[number].requires_grad]  # others were frozen since
        if unused and not self._allow_unused:
            raise self._unused(unused, f"on rank {self._hvd.rank()}")
        if self._allow_unused:  # a parameter that some rank used gets the average; any other keeps no gradient
            used = torch.ones(len(self._parameters), dtype=torch.int32)
            used[missing] = 0
            anywhere = self._hvd.allreduce(used, name="phalanx.used", op=self._hvd.Max).tolist()
            for number in missing:
                if anywhere[number]:
                    self._parameters[number].grad = torch.zeros_like(self._parameters[number])
        for number, parameter in enumerate(self._parameters):
            if number not in self._under_way and parameter.grad is not None:
                self._send(number)


class Horovod(Strategy):
    """Horovod's all-reduce on the model's parameters; the model itself is not wrapped."""

    name = "horovod"

    def __init__(self, config: DistributedConfig, world: World) -> None:
        super().__init__(config, world)
        self._reducers: dict[int, HorovodReducer] = {}
        self._hvd: Any = None
        if world.world_size > 1:
            self._hvd = _horovod_of(world)
            _check_build(self._hvd, config)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Broadcast rank 0's weights, and average gradients from now on."""
        if is_meta(model):
            materialise(model, self.world.device)
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if self._hvd is None:
            return model
        tensors = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._hvd.broadcast_parameters(tensors, root_rank=0)
        if trained:
            name = next((name for name, parameter in trained if parameter.dtype == torch.bfloat16), None)
            if name is not None and not self._hvd.nccl_built():
                raise ModelError(
                    f"{name} is bfloat16, which this build of Horovod cannot add up",
                    hint="Keep the parameters in float32 and compute in bf16: mixed_precision = 'bf16'.",
                )
            prefix = f"{len(self._reducers)}." if self._reducers else ""  # names must be one model's alone
            self._reducers[id(model)] = HorovodReducer(
                self._hvd,
                [(prefix + name, parameter) for name, parameter in trained],
                compression=self.config.compression,
                adasum=options_of(HorovodSettings, self.config).adasum,
                allow_unused=self.config.find_unused_parameters,
            )
        return model

    def follow(self, wrapped: nn.Module) -> None:
        """Raise for parameters whose gradients Horovod does not average: it was given those that wanted some."""
        reducer = self._reducers.get(id(wrapped))
        fresh = newly_trained(wrapped, {id(parameter) for parameter in reducer.parameters} if reducer else ())
        if self._hvd is not None and fresh:
            raise frozen_later(self.name, [name for name, _ in fresh])

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """Set whether the next backward pass ends with averaged gradients."""
        reducer = self._reducers.get(id(wrapped))
        if reducer is not None:
            reducer.sync = sync

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Broadcast rank 0's optimizer state, where it has any.

        Horovod's own broadcast gives an empty state its first values by taking a step, which moves the weights.
        """
        if self._hvd is None:
            return optimizer
        state = optimizer.state_dict() if self.world.is_main and optimizer.state else None
        state = self._hvd.broadcast_object(state, root_rank=0, name="phalanx.optimizer")
        if state is not None and not self.world.is_main:
            optimizer.load_state_dict(state)
        return optimizer

    def close(self) -> None:
        """Remove the hooks from the models."""
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers.clear()


def _horovod_of(world: World) -> Any:
    """Return Horovod, which must know the same ranks as the loop does."""
    if world.env.started_by not in (STARTED_BY, "mpirun"):
        raise UsageError(
            f"strategy = 'horovod', but {world.env.started_by} started these {world.world_size} ranks, and Horovod "
            "finds its ranks only where horovodrun started them",
            hint="Start with phalanx train --backend horovod --num-workers N, or with horovodrun -np N python ...",
        )
    hvd = horovod()
    if hvd.size() != world.world_size:
        raise UsageError(
            f"{world.env.started_by} started {world.world_size} ranks, but Horovod finds {hvd.size()} of them",
            hint="Under mpirun Horovod needs a build with MPI; horovodrun --gloo works with every build.",
        )
    return hvd


def _check_build(hvd: Any, config: DistributedConfig) -> None:
    if not options_of(HorovodSettings, config).adasum:
        return
    if not hvd.mpi_built():
        raise UsageError(
            "adasum = true: this Horovod was built without MPI, and Adasum is not in such a build",
            hint="Install MPI's compiler and headers (Debian: apt install libopenmpi-dev) and build it again: make "
            "horovod; or leave adasum out.",
        )
    if not hvd.mpi_enabled():
        raise UsageError(
            "adasum = true: Adasum needs MPI, and these ranks were started with gloo",
            hint="Write: phalanx train --backend horovod --adasum, horovodrun --mpi, or mpirun.",
        )
    if hvd.size().bit_count() != 1:
        raise UsageError(
            f"adasum = true with {hvd.size()} ranks: Adasum combines pairs, then pairs of pairs, and so on",
            hint="Give it 2, 4, 8, 16, ... ranks.",
        )
