"""Strategy `fsdp`: parameters, gradients and optimizer state sharded by FSDP2, block by block."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from phalanx import torch_compat
from phalanx.comm.waits import WaitSampler
from phalanx.config.settings import precision_name
from phalanx.errors import ModelError, UsageError, unknown_name
from phalanx.strategies.base import BatchPass, CommStats, Strategy, share_weights
from phalanx.strategies.tensors import find_blocks, is_meta, materialise
from phalanx.world.groups import build_device_mesh
from phalanx.world.seed import seed_everything


def blocks_of_class(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """Return the modules of the class `name`; UsageError with the nearest name where there are none."""
    blocks = {path: module for path, module in model.named_modules() if path and type(module).__name__ == name}
    if not blocks:
        classes = {type(module).__name__ for path, module in model.named_modules() if path}
        raise UsageError(unknown_name(f"class of modules in {type(model).__name__}", name, classes))
    return blocks


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def check_shardable(model: nn.Module, wrap_class: str | None, apart: Collection[nn.Parameter] = frozenset()) -> None:
    """Raise for parameters that `fully_shard` cannot cut: single numbers, and two dtypes in one block."""
    blocks = find_blocks(model) if wrap_class is None else blocks_of_class(model, wrap_class)
    first: dict[str, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if parameter in apart:
            continue
        if parameter.ndim == 0:
            raise ModelError(
                f"strategy = 'fsdp' cannot shard {name}: it is a single number, without dimensions",
                hint=f"Make it a vector of one: self.{name.rpartition('.')[2]} = nn.Parameter(torch.ones(1)); or write "
                "strategy='ddp'.",
            )
        if parameter.requires_grad:
            block = next((path for path in blocks if name.startswith(f"{path}.")), "")
            other, dtype = first.setdefault(block, (name, parameter.dtype))
            if dtype != parameter.dtype:
                raise ModelError(
                    f"strategy = 'fsdp' shards {other} ({dtype}) and {name} ({parameter.dtype}) together, "
                    "which must have one dtype",
                    hint="Write model.float() before, and mixed_precision='bf16' to compute in it; or strategy='ddp'.",
                )


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FSDP(Strategy):
    """torch.distributed.fsdp.fully_shard over the data-parallel axes; with one rank, the bare model."""

    name = "fsdp"
    shards = True

    @property
    def layout(self) -> str | None:
        """The axes and the sharding; None with one rank."""
        mesh = self.world.mesh
        axes = " x ".join(f"{axis} {size}" for axis, size in mesh.sizes.items() if size > 1)
        return f"{axes} ({self.config.resolved_sharding})" if mesh.world_size > 1 else None

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard the model in place: its blocks first, then what is left. With one rank it stays whole."""
        if isinstance(model, FSDPModule):
            self._sharded += _sharded_modules(model)
            return model
        if self.world.world_size == 1:
            if is_meta(model):
                self._materialise(model)
            return model
        share_weights(model)
        return self._shard(model)

    def _seed(self) -> None:
        """Seed dropout differently on every rank, also where weights were initialised together."""
        seed_everything(self.config.seed, rank=self.world.rank)

    def _shard(self, model: nn.Module) -> nn.Module:
        options = self._options()
        name = self.config.wrap_class
        check_shardable(model, name, self._apart)
        blocks = find_blocks(model) if name is None else blocks_of_class(model, name)
        for block in blocks.values():
            fully_shard(block, **options)
        fully_shard(model, **options)
        self._sharded += _sharded_modules(model)
        if is_meta(model):
            self._materialise(model)
        self._seed()
        return model

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """Set whether gradients are reduced: before a step boundary only from ZeRO's stage 2 on.

        Parameters that are whole during a step stay so until the boundary: they are gathered once per step.
        """
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(sync or (self.config.zero_stage or 0) >= 2)
            if self._whole_during_step:
                wrapped.set_reshard_after_backward(sync)

    @property
    def hides_gradients(self) -> bool:  # type: ignore[override]
        """Whether gradients are whole, and apart from the parameters, until they are reduced; in a pipeline they are
        reduced with each batch."""
        return self.world.world_size > 1 and self.world.mesh.pp == 1

    def train_batch(self, wrapped: nn.Module, batch: Any, passes: BatchPass) -> torch.Tensor:
        """Run forward and backward; of some steps, how long they wait for communication is measured."""
        if self._waits is not None:
            self._waits.begin()
        return super().train_batch(wrapped, batch, passes)

    def after_step(self) -> None:
        """Count a step."""
        if self._waits is not None:
            self._waits.step_done()

    def comm_stats(self) -> CommStats | None:
        """Return how long this rank has waited: the mean of the steps that were measured."""
        waited = None if self._waits is None else self._waits.seconds()
        return None if waited is None else CommStats(None, None, None, waited)

    def close(self) -> None:
        """End a measurement that has begun."""
        if self._waits is not None:
            self._waits.close()

    @cached_property
    def _waits(self) -> WaitSampler | None:
        """What measures waits; None where torch does not communicate."""
        if self.world.comm_backend not in ("gloo", "nccl"):
            return None
        return WaitSampler(self.world.device, compiled=bool(self.config.compile))

    def step(self, optimizer_step: Callable[[], object] | None) -> None:
        """Take the step, or drop the gradients that were not reduced yet."""
        super().step(optimizer_step)
        for module in () if optimizer_step is not None else self._sharded:
            torch_compat.drop_unreduced(module)

    @property
    def _whole_during_step(self) -> bool:
        """Whether parameters stay whole through forward and backward, over all ranks or within each group."""
        return self.config.resolved_sharding in ("grad-op", "hybrid-grad-op")

    @cached_property
    def _sharded(self) -> list[FSDPModule]:
        """The modules that were sharded here."""
        return []

    @cached_property
    def _apart(self) -> set[nn.Parameter]:
        """Parameters that are sharded over the data axes in another way (experts)."""
        return set()

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The groups of all axes, created once for all models of the run."""
        return build_device_mesh(self.world.mesh, self.world.device.type)

    def _options(self) -> dict[str, Any]:
        replicates = self.world.mesh.dp_replicate > 1
        options: dict[str, Any] = {
            "mesh": self.device_mesh["dp_replicate", "dp_shard"] if replicates else self.device_mesh["dp_shard"],
            "reshard_after_forward": not self._whole_during_step,
            "mp_policy": MixedPrecisionPolicy(),
            "ignored_params": self._apart,
        }
        precision = precision_name(self.config.mixed_precision, self.world.device.type)
        if precision != "fp32":  # parameters are gathered in the precision of the forward pass, gradients added in fp32
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=_DTYPES[precision], reduce_dtype=torch.float32)
        if self.config.offload == "cpu":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda")
        return options

    def _materialise(self, model: nn.Module) -> None:
        """Allocate the shards of a model on the meta device, and initialise them."""
        materialise(model, "cpu" if self.config.offload == "cpu" else self.world.device)
