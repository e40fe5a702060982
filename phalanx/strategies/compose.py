"""Strategies combined on one mesh: first pipeline stages, then the split of layers, then the data axes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from phalanx import torch_compat
from phalanx.errors import UsageError
from phalanx.strategies.base import BatchPass, equalise, local, newly_trained, share_weights
from phalanx.strategies.context_parallel import SequenceSlices, install_ring, split_context
from phalanx.strategies.expert import expert_parameters, spread_experts
from phalanx.strategies.fsdp import FSDP
from phalanx.strategies.pipeline.placement import (
    RankStages,
    place_stages,
    placed_before,
    plan_stages,
    rename_tied,
    share_buffers,
)
from phalanx.strategies.pipeline.strategy import Pipeline, refuse_documents
from phalanx.strategies.tensor_overlap import Overlap
from phalanx.strategies.tensor_parallel import is_split, split_tensors, splits_sequence
from phalanx.strategies.tensors import average, global_norm, is_meta, scale_to_norm
from phalanx.world.groups import build_axis_group
from phalanx.world.seed import seed_everything
from phalanx.world.splits import SCHEDULES


class Composed(FSDP):
    """Every layout with an axis besides the data axes, over which `fully_shard` shards the rest.

    The data axes are sharded under strategy="ddp" too: torch's DDP cannot average DTensors.
    """

    name = "composed"
    _syncing = True
    _equal_activations = False
    _overlaps = False

    @property
    def layout(self) -> str | None:
        """The axes, and how the stages are cut."""
        config = self.config
        parts = [super().layout]
        if self.world.mesh.pp > 1:
            parts += [config.pipeline_schedule, config.pipeline_cuts and f"cut at {config.pipeline_cuts}"]
        if config.expert_parallel > 1:
            parts.append("experts apart")
        return ", ".join(part for part in parts if part)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Split the model in place, cut it into stages, then shard what this rank has over the data axes."""
        mesh = self.world.mesh
        if mesh.tp > 1 and self.config.compile:
            group = self.device_mesh["tp"].get_group()
            self._overlaps = self._overlap.begin(self.world, group, splits_sequence=splits_sequence(model))
        if mesh.pp > 1:
            return self._pipeline(model, placed_before(model) or self._placed(model))
        if is_split(model):
            return model
        self._split(model)
        return self._lay_over_data(model)

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """Return the user's model; in a pipeline it has this rank's units only."""
        return wrapped.module if isinstance(wrapped, Pipeline) else wrapped

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """Set whether gradients are reduced; within a batch torch's pipeline decides when."""
        self._syncing = sync
        if isinstance(wrapped, Pipeline):
            wrapped.sync = sync
        else:
            super().set_sync(wrapped, sync)

    def compile_targets(self, wrapped: nn.Module) -> list[nn.Module]:
        """Return the stages of a pipeline, else the model."""
        return list(wrapped.stages.values()) if isinstance(wrapped, Pipeline) else super().compile_targets(wrapped)

    def count_parameters(self, wrapped: nn.Module, *, trained: bool = False) -> int:
        """Count the parameters of all stages; tied ones, which are on several, count once."""
        if not isinstance(wrapped, Pipeline):
            return super().count_parameters(wrapped, trained=trained)
        counted = (p for p in wrapped.module.parameters() if p.requires_grad or not trained)
        local = sum(p.numel() / self._copies.get(id(p), 1) for p in counted)
        everywhere = torch.tensor(local, dtype=torch.float64, device=self.world.device)
        dist.all_reduce(everywhere)
        return round(everywhere.item() * self.world.mesh.pp / self.world.world_size)

    def expect_batches(self, wrapped: nn.Module, batch_size: int) -> str | None:
        """Check that a pipeline can cut batches; describe its layout, and why tensor products do not overlap."""
        notes = [wrapped.expect(batch_size) if isinstance(wrapped, Pipeline) else None, self._overlap.note]
        return "; ".join(note for note in notes if note) or None

    def train_batch(self, wrapped: nn.Module, batch: Any, passes: BatchPass) -> torch.Tensor:
        """Run a pipeline's schedule, or forward and backward of the model."""
        if not isinstance(wrapped, Pipeline):
            return super().train_batch(wrapped, batch, passes)
        if isinstance(batch, Mapping):
            refuse_documents(batch)
        if passes.loss_fn is None:
            raise UsageError(
                "a pipeline needs the loss separate from the model: the last stage computes it",
                hint="Give loss_fn=lambda output, target: ..., or the model a method loss_from_output(output, target), "
                "with batches of (inputs, targets).",
            )
        if self._waits is not None:
            self._waits.begin()
        factor = passes.begin()
        loss = wrapped.train_batch(batch, passes, factor)
        passes.end()
        return loss

    def consolidate(self, wrapped: nn.Module) -> None:
        """Broadcast buffers among the ranks that hold the same stage."""
        if self.world.mesh.pp == 1:
            super().consolidate(wrapped)
            return
        buffers = [local(buffer) for buffer in self.unwrap(wrapped).buffers()]
        if self._stage_group.size() > 1 and buffers:
            with torch.no_grad():
                torch_compat.broadcast_coalesced(buffers, self._stage_group)

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scale gradients to the one norm over all axes."""
        norm = self.grad_norm(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        scale_to_norm(gradients, norm, max_norm)
        return norm

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return the one norm over all axes."""
        mesh = self.world.mesh
        used = [parameter for parameter in parameters if parameter.grad is not None]
        holders = [mesh.world_size // mesh.pp * self._copies.get(id(parameter), 1) for parameter in used]
        gradients = [parameter.grad for parameter in used if parameter.grad is not None]
        return global_norm(gradients, holders, self.world.device)

    def state(self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Return this rank's stages under the names of the whole model."""
        state = super().state(wrapped, optimizers)
        return rename_tied(state, self._aliases(wrapped))

    def load_state(
        self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any]
    ) -> None:
        """Load what `state` returned."""
        names = {alias: name for name, alias in self._aliases(wrapped).items()}
        super().load_state(wrapped, optimizers, rename_tied(state, names))

    def close(self) -> None:
        """Compile as before, and end a measurement that has begun."""
        self._overlap.end()
        super().close()

    @cached_property
    def _overlap(self) -> Overlap:
        """Whether tensor products overlap with their communication."""
        return Overlap()

    @cached_property
    def _completed(self) -> set[int]:
        """The parameters (by id) whose gradients a hook completes."""
        return set()

    @cached_property
    def _copies(self) -> dict[int, int]:
        """How many stages hold a copy of a parameter (by its id)."""
        return {}

    @cached_property
    def _stage_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same stages."""
        return build_axis_group(self.world.mesh, ("dp_replicate", "dp_shard", "cp", "tp"), self.world.rank)

    @cached_property
    def _data_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same parameters and get other samples, or other slices of them."""
        return build_axis_group(self.world.mesh, ("dp_replicate", "dp_shard", "cp"), self.world.rank)

    @cached_property
    def _slices(self) -> SequenceSlices | None:
        """This rank's slice of the sequences; all ranks must read it together, as it creates a group."""
        mesh = self.world.mesh
        return SequenceSlices(build_axis_group(mesh, ("cp",), self.world.rank)) if mesh.cp > 1 else None

    def _aliases(self, wrapped: nn.Module) -> dict[str, str]:
        return wrapped.aliases if isinstance(wrapped, Pipeline) else {}

    def _placed(self, model: nn.Module) -> RankStages:
        plan = plan_stages(model, self.config, self.device_mesh["pp"])  # before a layer needs other ranks to run
        self._split(model)
        stages = place_stages(model, plan, self.world)
        for stage in stages.stages.values():
            self._lay_over_data(stage)
        share_buffers(model, stages.stages)
        return stages

    def _pipeline(self, model: nn.Module, stages: RankStages) -> Pipeline:
        count = self.config.microbatches
        pipeline = Pipeline(model, stages.stages, stages.row, self.world.device, count, stages.smallest)
        pipeline.slices = self._slices
        if stages.row.schedule.splits_backward:
            pipeline.finishing.append(partial(self._average_gradients, list(model.parameters())))
        pipeline.tie(stages.ties)
        self._copies.update({id(tied.parameter): tied.copies for tied in pipeline.tied})
        _ = self._stage_group, self._data_group  # created here, where all ranks take part
        return pipeline

    def _split(self, model: nn.Module) -> None:
        """Broadcast the weights, and split layers, sequences and experts."""
        mesh = self.world.mesh
        share_weights(model)
        if mesh.tp > 1:
            split_tensors(model, self.device_mesh["tp"], overlaps=self._overlaps)
            self._equal_activations = not splits_sequence(model)
        if self._slices is not None:
            (split_context if mesh.pp == 1 else install_ring)(model, self._slices)  # a pipeline cuts its batches itself
        if self.config.expert_parallel > 1:
            self._apart.update(spread_experts(model, self.device_mesh["dp_shard"]))

    def _lay_over_data(self, model: nn.Module) -> nn.Module:
        mesh = self.world.mesh
        by_hand = mesh.pp > 1 and SCHEDULES[self.config.pipeline_schedule].splits_backward
        if mesh.dp_size * mesh.cp > 1 and not by_hand:
            # Outputs of a DTensor module are always views: fully_shard would warn in every run.
            warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
            self._shard(model)
            if self.config.expert_parallel > 1 and mesh.dp_replicate > 1:
                for parameter in expert_parameters(model):
                    parameter.register_post_accumulate_grad_hook(self._average_replicas)  # type: ignore[no-untyped-call]
            return model
        if is_meta(model):
            self._materialise(model)
            if by_hand and self._data_group.size() > 1:  # replicas initialised different weights
                equalise(model.parameters(), self._data_group)
        self._seed()
        self._complete_gradients(model)
        return model

    def _complete_gradients(self, model: nn.Module) -> None:
        """Complete the gradients of parameters that want them, once each."""
        for _, parameter in newly_trained(model, self._completed):
            parameter.register_post_accumulate_grad_hook(_complete_gradient)  # type: ignore[no-untyped-call]
            self._completed.add(id(parameter))

    def _materialise(self, model: nn.Module) -> None:
        """Initialise weights, and make replicas of experts equal, which were initialised differently."""
        super()._materialise(model)
        if self.config.expert_parallel > 1 and self.world.mesh.dp_replicate > 1:
            equalise(model.parameters(), self.device_mesh["dp_replicate"].get_group())

    def _seed(self) -> None:
        """Seed ranks with equal activations for equal dropout, and all others for different dropout."""
        mesh, coordinates = self.world.mesh, self.world.mesh.coordinates(self.world.rank)
        offset = self.world.dp_rank * mesh.cp + coordinates["cp"] if self._equal_activations else self.world.rank
        seed_everything(self.config.seed, rank=offset)

    def _average_replicas(self, parameter: torch.Tensor) -> None:
        """Average an expert's gradient over its replicas."""
        if self._syncing and parameter.grad is not None:
            gradient = local(parameter.grad)
            dist.all_reduce(gradient, group=self.device_mesh["dp_replicate"].get_group())
            gradient /= self.world.mesh.dp_replicate

    def _average_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Average over the data axes after a schedule that computes weight gradients without autograd's hooks."""
        for parameter in parameters:
            _complete_gradient(parameter)
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if self._data_group.size() > 1:
            average(gradients, self._data_group)


def _complete_gradient(parameter: torch.Tensor) -> None:
    """Add up the gradients of all sequence slices for a parameter that all ranks hold; fully_shard does this itself."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)
