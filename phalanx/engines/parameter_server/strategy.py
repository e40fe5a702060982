"""parameter-server: server processes (shards) hold the parameters and step; ranks push gradients and pull values.

Each gradient is sent during backward, when it is ready. New values arrive while the next batch is loaded, and are put
into the model before its next forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from phalanx import torch_compat
from phalanx.config import DistributedConfig
from phalanx.config.settings import precision_name
from phalanx.engines.parameter_server.client import ParameterClient
from phalanx.engines.parameter_server.gradients import VALUE
from phalanx.engines.parameter_server.placement import plan_placement
from phalanx.engines.parameter_server.servers import LAST_SECONDS, ServerGroup, barrier
from phalanx.engines.parameter_server.state import plain_settings
from phalanx.errors import UsageError, frozen_later
from phalanx.observe.events import ServersReported
from phalanx.strategies.base import Strategy, newly_trained, share_weights
from phalanx.strategies.tensors import is_meta, materialise
from phalanx.world.world import World


class ParameterServer(Strategy):
    """Centralised updates: synchronous, asynchronous, or with bounded staleness."""

    name = "parameter-server"
    in_lockstep = False  # a rank sends its step to the shards and does not wait for it
    owns_step = True

    def __init__(self, config: DistributedConfig, world: World) -> None:
        super().__init__(config, world)
        if precision_name(config.mixed_precision, world.device.type) == "fp16":
            raise UsageError(
                "strategy = 'parameter-server' has no loss scaling, which fp16 needs",
                hint="Write mixed_precision = 'bf16', or leave it out.",
            )
        self._synchronous = config.resolved_server_mode == "sync"
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._group: ServerGroup | None = None
        self._named: dict[str, nn.Parameter] = {}
        self._by_rows: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        self._sync = True
        self._pushes_early = True
        self._divisor = 1.0
        self._clip = 1.0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Start from rank 0's weights; the shards are started when the optimizer is known."""
        if self._model is not None:
            raise UsageError("strategy = 'parameter-server' trains one model", hint="Use strategy='ddp' for several.")
        if is_meta(model):
            materialise(model, self.world.device)
        if self.world.world_size > 1:
            share_weights(model)
        self._model = model
        return model

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """Set whether the next backward is the last of a step, and pushes."""
        self._sync = sync

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Start the shards with this optimizer's class and settings, and connect to all of them."""
        if self._model is None or self._group is not None:
            raise UsageError("strategy = 'parameter-server' takes one model, then one optimizer, in this order")
        placement = plan_placement(self._model, optimizer, self.config.num_servers)
        names = {piece.name for shard in placement.shards for piece in shard}
        self._named = {name: p for name, p in self._model.named_parameters() if name in names}
        embeddings = {id(m.weight) for m in self._model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
        self._by_rows = {name for name, parameter in self._named.items() if id(parameter) in embeddings}
        self._optimizer = optimizer
        self._group = ServerGroup(self.config, self.world, placement, optimizer)
        self._group.client.bind(self._named)
        self._send_state()
        self._hook()
        return optimizer

    def follow(self, wrapped: nn.Module) -> None:
        """Raise for parameters that the shards do not have: what they hold is fixed with the optimizer."""
        fresh = newly_trained(wrapped, {id(parameter) for parameter in self._named.values()})
        if self._group is not None and fresh:
            raise frozen_later(self.name, [name for name, _ in fresh])

    def _hook(self) -> None:
        """Push each gradient when it is complete, and write new values before the model is used."""
        assert self._model is not None, "wrapped before"
        for name, parameter in self._named.items():

            def push(parameter: torch.Tensor, name: str = name) -> None:
                if self._sync and self._pushes_early and self._group is not None and parameter.grad is not None:
                    self._group.client.push(name, parameter.grad, find_rows=name in self._by_rows)

            handle = parameter.register_post_accumulate_grad_hook(push)  # type: ignore[no-untyped-call]
            self._undo.append(handle.remove)

        def arrive(module: nn.Module, inputs: Any) -> None:
            if self._group is not None:
                self._group.client.wait()

        hook = torch.compiler.disable(arrive) if self.config.compile else arrive  # type: ignore[no-untyped-call]
        self._undo.append(self._model.register_forward_pre_hook(hook).remove)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward; at a step boundary gradients are sent meanwhile, unless a later pass adds to them."""
        client = self._running.client
        if client.pushed:
            self._pushes_early = False
            client.commit(factor=None)
            for parameter in self._named.values():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()  # the memory that was pushed may still be sent
        torch.autograd.backward(loss)

    @property
    def _running(self) -> ServerGroup:
        if self._group is None:
            raise UsageError(
                "the parameter servers need the optimizer before the first backward",
                hint="Prepare both: model, optimizer = formation.prepare(model, optimizer).",
            )
        return self._group

    def divide_gradients(self, parameters: Sequence[nn.Parameter], divisor: torch.Tensor) -> None:
        """Remember what the mean is divided by: the shards do it."""
        self._divisor = float(divisor)

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Remember the factor that the shards clip by; return the norm before."""
        norm = self.grad_norm(parameters)
        self._clip = min(1.0, max_norm / (float(norm) + 1e-6)) if math.isfinite(norm) else 1.0
        return norm

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return the norm of the mean over all workers; asynchronously, that of this worker's gradient."""
        if self._group is None or not self._synchronous:
            return super().grad_norm(parameters) / self._divisor
        self._push_rest()
        norm = self._group.client.norm() / self._divisor
        return torch.tensor(norm, dtype=torch.float64, device=self.world.device)

    def step(self, optimizer_step: Callable[[], object] | None) -> None:
        """Send the step to the shards, with the current settings of the optimizer; None: drop its gradient there."""
        if optimizer_step is None:
            if self._group is not None and self._group.client.pushed:
                self._group.client.commit(factor=None)
            self._clear_step()
            return
        client, optimizer = self._running.client, self._optimizer
        assert optimizer is not None, "attached with the group"
        self._push_rest()
        groups = [plain_settings(group) for group in optimizer.param_groups]
        client.commit(factor=self._clip / self._divisor, groups=groups)
        torch_compat.note_step(optimizer)
        self._clear_step()

    def _push_rest(self) -> None:
        """Push the gradients that were not pushed during backward: those of earlier passes alone, or all."""
        client = self._running.client
        for name, parameter in self._named.items():
            if parameter.grad is not None and name not in client.pushed:
                client.push(name, parameter.grad, find_rows=name in self._by_rows)

    def _clear_step(self) -> None:
        """Drop the gradients without changing their memory, which may still be sent."""
        for parameter in self._named.values():
            parameter.grad = None
        self._divisor, self._clip = 1.0, 1.0

    def consolidate(self, wrapped: nn.Module) -> None:
        """Pull the same state of the shards on every rank, with all steps so far."""
        if self._group is not None:
            self._group.client.wait()
            if not self._synchronous:
                barrier(self.world)
                self._group.client.pull()
                barrier(self.world)
            self._group.even_out()
        super().consolidate(wrapped)

    def state(self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Fetch the optimizer's states from the shards, and return all under canonical names."""
        if self._group is None:
            return super().state(wrapped, optimizers)
        self._group.client.wait()
        if not optimizers:
            return super().state(wrapped, optimizers)
        (optimizer,) = optimizers
        self._fetch_state(self._group.client, optimizer)
        state = super().state(wrapped, optimizers)
        optimizer.state.clear()  # the shards hold it: no need to keep a copy
        return state

    def own_state(self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Return the state of the shards, where they still answer: those of a lost rank have ended with it."""
        if self._group is not None:
            self._group.client.limit_retries(LAST_SECONDS)
        return self.state(wrapped, optimizers)

    def _fetch_state(self, client: ParameterClient, optimizer: torch.optim.Optimizer) -> None:
        """Put the states that the shards hold into this rank's optimizer."""
        for name, values in client.fetch().items():
            states = {key: value for key, value in values.items() if key != VALUE}
            if states:
                parameter = self._named[name]
                optimizer.state[parameter] = {
                    key: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.ndim else value
                    for key, value in states.items()
                }

    def load_state(
        self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any]
    ) -> None:
        """Load weights and states, and send them to the shards."""
        if self._group is not None:
            self._group.client.wait()
        super().load_state(wrapped, optimizers, state)
        if self._group is not None:
            self._send_state()

    def _send_state(self) -> None:
        """Send this model and optimizer state to the shards; all ranks hold the same, and rank 0 sends it."""
        assert self._optimizer is not None, "attached with the group"
        client, states = self._running.client, self._optimizer.state
        if self.world.is_main:
            client.load({name: {VALUE: p.detach(), **states.get(p, {})} for name, p in self._named.items()})
        states.clear()
        barrier(self.world)
        client.pull()

    def closing_event(self) -> ServersReported | None:
        """Return what the shards counted: staleness, load and throughput."""
        return None if self._group is None else self._group.report(self.config.resolved_server_mode)

    def return_weights(self, wrapped: nn.Module) -> None:
        """Leave the shards' last values in the model and their states in the optimizer."""
        if self._group is not None and self._optimizer is not None:
            self.consolidate(wrapped)
            self._fetch_state(self._group.client, self._optimizer)
            barrier(self.world)

    def close(self) -> None:
        """Remove the hooks from the model, disconnect, and end the shards that this rank started."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        group, self._group = self._group, None
        if group is not None:
            group.close()
        self._model = self._optimizer = None
        self._named = {}
