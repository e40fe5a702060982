"""deepspeed: DeepSpeed's engine synchronises the ranks (ZeRO's stages 0 to 3, CPU and NVMe offload).

The engine needs both the model and its optimizer, so it is built when the optimizer is prepared. It gets the scaled
loss and the step boundary from the loop; clipping, token weights and checkpoints by canonical name are done here.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from phalanx import torch_compat
from phalanx.config import DistributedConfig
from phalanx.engines.deepspeed.rules import batch_size_for
from phalanx.engines.deepspeed.settings import build_settings
from phalanx.engines.deepspeed.state import EngineState
from phalanx.errors import UsageError, frozen_later
from phalanx.strategies.base import OWN_SHARDS, Strategy
from phalanx.torch_compat import pytree
from phalanx.world.env import rank_environment, show_local_rank
from phalanx.world.groups import join_alone
from phalanx.world.world import World

# Stage 3 leaves the parameter itself empty, and keeps the rank's shard in this attribute.
OWN_SHARDS.append(lambda tensor: getattr(tensor, "ds_tensor", None))


class EngineModule(nn.Module):
    """The user's model inside DeepSpeed's engine; the bare model before there is an engine."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.engine: Any = None
        self.dtype: torch.dtype | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "engine":  # a module too, but not a child: its parameters are those of `module`
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the engine; for bf16 or fp16 weights inputs are converted to their dtype, and outputs to fp32."""
        if self.engine is None:
            return self.module(*inputs, **named)
        if self.dtype is None:
            return self.engine(*inputs, **named)
        inputs, named = _floats_to((inputs, named), self.dtype)
        return _floats_to(self.engine(*inputs, **named), torch.float32)


def _floats_to(values: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


class DeepSpeed(Strategy):
    """deepspeed.initialize and the engine that it returns; one model and one optimizer."""

    name = "deepspeed"
    shards = True  # and DeepSpeed keeps the groups of its first engine until the process ends
    owns_step = owns_precision = owns_gradients = True

    def __init__(self, config: DistributedConfig, world: World) -> None:
        super().__init__(config.replace(batch_size=batch_size_for(config, world.mesh.dp_size)), world)
        self._deepspeed = import_deepspeed(world.device)
        self._wrapped: EngineModule | None = None
        self._state: EngineState | None = None
        self._sync = True
        self._has_gradients = False
        self._trained: set[int] = set()
        self._divisor: torch.Tensor | None = None
        self._unset_local_rank: Callable[[], None] | None = None
        if world.world_size == 1:
            join_alone(world.device)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Keep the model until its optimizer is known."""
        if self._wrapped is not None:
            raise UsageError("strategy = 'deepspeed' trains one model", hint="Use strategy='fsdp' for several.")
        if any(parameter.is_meta for parameter in model.parameters()):
            raise UsageError(
                "DeepSpeed's engine takes a model with memory", hint="Use strategy='fsdp' for meta models."
            )
        wide = next((f"{name} is {p.dtype}" for name, p in model.named_parameters() if p.dtype == torch.float64), None)
        if wide:
            raise UsageError(f"DeepSpeed keeps weights in float32, and {wide}", hint="Train float64 with ddp or fsdp.")
        self._wrapped = EngineModule(model)
        return self._wrapped

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """Return the module inside."""
        return wrapped.module if isinstance(wrapped, EngineModule) else wrapped

    def count_parameters(self, wrapped: nn.Module, *, trained: bool = False) -> int:
        """Return the number of parameters, also of those that stage 3 leaves empty."""
        counted = (p for p in self.unwrap(wrapped).parameters() if p.requires_grad or not trained)
        return sum(getattr(p, "ds_numel", p.numel()) for p in counted)

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """Set whether the next backward is the last of a step."""
        self._sync = sync
        if self._wrapped is not None and self._wrapped.engine is not None:
            self._wrapped.engine.set_gradient_accumulation_boundary(sync)

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Build the engine around the model and its optimizer, or the optimizer of the JSON."""
        if self._wrapped is None or self._wrapped.engine is not None:
            raise UsageError("strategy = 'deepspeed' takes one model, then one optimizer, in this order")
        model = self._wrapped.module
        settings = build_settings(self.config, self.world, model)
        is_ours = "optimizer" not in settings
        if not is_ours:
            _check_same(optimizer, settings["optimizer"]["params"])
        state = EngineState(self._deepspeed, model, optimizer)
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        arguments: dict[str, Any] = {"optimizer": optimizer} if is_ours else {"model_parameters": groups}
        try:
            with rank_environment(self.world.env):
                engine, wrapped, _, _ = self._deepspeed.initialize(model=model, config=settings, **arguments)
        except (ValueError, AssertionError, self._deepspeed.DeepSpeedConfigError) as error:
            raise UsageError(f"DeepSpeed refuses its settings: {error}", hint=f"They were: {settings}") from error
        state.connect(engine)
        self._state = state
        self._trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        self._wrapped.engine = engine
        self._unset_local_rank = show_local_rank(self.world.env)  # stage 3 reads it in every forward pass
        self._wrapped.dtype = next((d for n, d in _LOW.items() if settings.get(n, {}).get("enabled")), None)
        engine.set_gradient_accumulation_boundary(self._sync)
        stepping: torch.optim.Optimizer = getattr(wrapped, "optimizer", wrapped)
        return stepping

    def follow(self, wrapped: nn.Module) -> None:
        """Raise: the engine's partitions are fixed with the optimizer, and it steps all of them."""
        named = self.unwrap(wrapped).named_parameters()
        changed = [name for name, p in named if p.requires_grad != (id(p) in self._trained)]
        if self._state is not None and changed:
            raise frozen_later(self.name, changed)

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine, which is built for the prepared optimizer."""
        if self._wrapped is None or self._wrapped.engine is None:
            raise UsageError(
                "DeepSpeed's engine needs the optimizer before the first backward",
                hint="Prepare both: model, optimizer = formation.prepare(model, optimizer).",
            )
        return self._wrapped.engine

    def backward(self, loss: torch.Tensor) -> None:
        """Run the engine's backward on a loss that is scaled by its share of the global batch already."""
        self._has_gradients = True
        self.engine.backward(loss, scale_wrt_gas=False)

    @property
    def adds_passes(self) -> bool:  # type: ignore[override]
        """Whether gradients stay in the parameters: ZeRO keeps those of the last pass of a micro-batch."""
        return not self._shards_gradients

    def _drop_gradients(self) -> None:
        """Drop what the engine has added up since its last step."""
        if not self._has_gradients:
            return
        self._has_gradients = False
        self.engine.zero_grad()
        if self._shards_gradients:
            zero = self.engine.optimizer
            zero.zero_grad()
            zero.micro_step_id = 0 if self.config.zero_stage == 3 else -1  # their values after a step
            for partitions in (zero.averaged_gradients, getattr(zero, "all_grad_tensors", {})):
                partitions.clear()

    def divide_gradients(self, parameters: Sequence[nn.Parameter], divisor: torch.Tensor) -> None:
        """Divide the gradients; ZeRO divides them in its step, together with the loss scale."""
        if self._shards_gradients:
            self._divisor = divisor
        else:
            torch_compat.foreach_div_([p.grad for p in self.engine.module.parameters() if p.grad is not None], divisor)

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Return the norm before; ZeRO clips in its step, by the same rule as torch."""
        if not self._shards_gradients:
            return super().clip_grad_norm(parameters, max_norm)
        self.engine.optimizer.clip_grad = max_norm
        return self.grad_norm(parameters)

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return the global norm of the ranks' partitions."""
        if not self._shards_gradients:
            return super().grad_norm(parameters)
        zero = self.engine.optimizer
        groups = zero._get_norm_groups() if hasattr(zero, "_get_norm_groups") else [zero.scaled_global_norm()]
        norms = [torch.as_tensor(group, device=self.world.device, dtype=torch.float32) for group in groups]
        norm: torch.Tensor = torch.stack(norms).norm() / zero.loss_scale
        return norm if self._divisor is None else norm / self._divisor

    def step(self, optimizer_step: Callable[[], object] | None) -> None:
        """Take the engine's step; the boundary is set first, as it may already be that of the next backward."""
        if optimizer_step is None:
            self._drop_gradients()
            return
        engine = self.engine
        engine.set_gradient_accumulation_boundary(True)
        zero = engine.optimizer
        if self._divisor is not None:
            zero.override_loss_scale(float(zero.loss_scale * self._divisor))
        try:
            engine.step()
        finally:
            if self._shards_gradients:
                zero.clip_grad, zero.custom_loss_scaler, zero.external_loss_scale = 0.0, False, None
            self._divisor, self._has_gradients = None, False
            engine.set_gradient_accumulation_boundary(self._sync)

    @property
    def _shards_gradients(self) -> bool:
        return self.config.zero_stage is not None

    def state(self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Gather whole fp32 weights and optimizer states by canonical name, on every rank's CPU."""
        if self._state is None or not self._state.partitioned:
            return super().state(wrapped, optimizers)
        state: dict[str, Any] = {"model": self._state.weights()}
        return {**state, "optimizer": self._state.optimizer_state()} if optimizers else state

    def load_state(
        self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any]
    ) -> None:
        """Load whole weights and states into the partitions."""
        if self._state is None or not self._state.partitioned:
            super().load_state(wrapped, optimizers, state)
            return
        self._state.load_weights(state["model"])
        if optimizers:
            self._state.load_optimizer_state(state["optimizer"])

    def return_weights(self, wrapped: nn.Module) -> None:
        """Restore whole fp32 weights in the model, without DeepSpeed's attributes."""
        if self._state is not None and self._state.partitioned:
            weights = self._state.weights()
            self.close()
            self._state.restore(weights, self.world.device)

    def close(self) -> None:
        """Remove the engine's hooks from the model."""
        if self._wrapped is not None and self._wrapped.engine is not None:
            self._wrapped.engine.destroy()
            self._wrapped.engine = None
        if self._unset_local_rank is not None:
            self._unset_local_rank()
            self._unset_local_rank = None
        self._wrapped = None


_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def import_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed for this device, without its warnings and unneeded compilations."""
    with rank_environment(None, DS_ACCELERATOR=device.type):
        try:
            import deepspeed
        except ImportError as error:
            raise UsageError(
                f"strategy = 'deepspeed' needs DeepSpeed: {error}", hint="Run: pip install 'phalanx[deepspeed]'"
            ) from error
        device_type = deepspeed.accelerator.get_accelerator().device_name()
    if device_type != device.type:
        raise UsageError(
            f"the ranks compute on {device.type}, but DeepSpeed was imported for {device_type}",
            hint=f"Set DS_ACCELERATOR={device.type} before deepspeed is imported.",
        )
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # It calls torch's collectives by their old names, which would warn in every run.
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated", category=FutureWarning)
    if device.type == "cpu":
        # Its shared-memory collectives would be compiled for minutes at the first start; gloo is used instead.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    module: ModuleType = deepspeed
    return module


def _check_same(optimizer: torch.optim.Optimizer, params: dict[str, Any]) -> None:
    """Raise for an optimizer in Python that differs from the one in the JSON."""
    for name in ("lr", "weight_decay"):
        value, in_json = optimizer.defaults.get(name), params.get(name)
        if value is not None and in_json is not None and float(value) != float(in_json):
            raise UsageError(
                f"the optimizer has {name} = {value}, but deepspeed_config says optimizer.params.{name} = {in_json}",
                hint='Leave "optimizer" out of the JSON, or do not give one in Python.',
            )
