"""strategy = "auto" for a large model, and the memory that a recipe needs, by the planner's formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.config.settings import precision_name
from phalanx.diagnosis import optimizer_states
from phalanx.errors import UsageError
from phalanx.loop.model_setup import adapt
from phalanx.recipes import Recipe
from phalanx.run.auto_strategy import settle_strategy
from phalanx.strategies.pipeline.placement import cut_at, units_of
from phalanx.tools.plan.cluster import Gpu
from phalanx.tools.plan.hf_config import shape_of
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.plans import Goal, Layout
from phalanx.tools.plan.rank_bytes import StateBytes, zero_bytes
from phalanx.tools.plan.rank_memory import rank_memory
from phalanx.tools.plan.rules import layout_of, recompute_of
from phalanx.tools.plan.trace import trace_module
from phalanx.torch_compat import pytree
from phalanx.world.mesh import JobLayout, Mesh, plan_mesh
from phalanx.world.splits import SCHEDULES
from phalanx.zoo.recipe import recipe_steps, with_batch_size
from phalanx.zoo.recipe_parts import recipe_parts

_SEQ_LEN = 1024


def choose_strategy(
    config: DistributedConfig, model: nn.Module, train: Any, device: str, ranks: int, memory: int
) -> tuple[DistributedConfig, str]:
    """Return the config of the fastest layout that fits `memory` bytes per rank, and why (empty: ddp fits)."""
    shape, limit = describe(model), memory / 2**30
    blocks = shape.layers if isinstance(shape, ModelShape) else shape.blocks
    layouts = [one for one in _layouts(config, ranks, train) if blocks > 1 or one[1].recompute == "none"]
    needs = [(change, planned_gib(shape, config, device, train, layout)) for change, layout in layouts]
    whole = needs[0][1]
    if whole <= limit:
        return config, ""
    change, needed = next((one for one in needs if one[1] <= limit), needs[-1])
    if config.channels_last:  # shards are contiguous
        change = {**change, "channels_last": False}
    short = "" if needed <= limit else f"; even so a rank needs {needed:.3g} GiB"
    why = f"because ddp would need {whole:.3g} GiB of {limit:.3g} GiB per rank{short}"
    words = ", ".join(f"{name} = {value!r}" for name, value in change.items())
    return config.with_trusted(**change), f"strategy auto: {words}, {why}"


def _layouts(config: DistributedConfig, ranks: int, train: Any) -> Iterator[tuple[dict[str, Any], Layout]]:
    """Yield what may be chosen, the fastest first, with the settings that it changes."""
    recompute = recompute_of(config)
    size = config.batch_size or getattr(train, "batch_size", None) or 1
    yield {}, Layout(dp_replicate=ranks, micro_batch=size, recompute=recompute)
    sharded = {"strategy": "fsdp", "sharding": "grad-op"}
    yield sharded, Layout(dp_shard=ranks, micro_batch=size, zero_stage=1, recompute=recompute)
    yield {"strategy": "fsdp"}, Layout(dp_shard=ranks, micro_batch=size, recompute=recompute)
    if recompute == "none":
        full = {"strategy": "fsdp", "activation_checkpointing": "full"}
        yield full, Layout(dp_shard=ranks, micro_batch=size, recompute="full")


def describe(model: nn.Module) -> ModelShape | TracedShape:
    """Return what the planner knows of a model; of one that cannot be traced, its parameters alone."""
    shape = shape_of(model)
    if shape is not None:
        return shape
    try:
        return trace_module(model)
    except UsageError:
        count = sum(parameter.numel() for parameter in model.parameters())
        return TracedShape(
            name=type(model).__name__,
            parameters=count,
            trainable=count,
            forward_flops_per_sample=0.0,
            activation_bytes_per_sample=0.0,
            traffic_bytes_per_sample=0.0,
        )


def planned_gib(
    shape: ModelShape | TracedShape, config: DistributedConfig, device: str, train: Any, layout: Layout
) -> float:
    """Return the GiB of the rank that needs the most, with activations and buffers."""
    goal = Goal(
        global_batch=layout.dp * layout.micro_batch * config.gradient_accumulation_steps,
        seq_len=_seq_len(train),
        precision=precision_name(config.mixed_precision, device),
        optimizer=config.optimizer,
        compile=config.compile,
    )
    gpu = Gpu(name=device, memory_gib=0, tflops={}, memory_gbps=1, matmul=1, attention=1, bandwidth=1, sms=1)
    parts = rank_memory(shape, gpu, layout, goal, reserve_gib=gpu.reserve_gib if device == "cuda" else 0.0)
    return max(sum(rank.values()) for rank in parts.values())


def _seq_len(train: Any) -> int:
    """Return the length of the first sample of tokens in a data set; a usual one where there is none."""
    data = getattr(train, "dataset", train)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or not len(data):
        return _SEQ_LEN
    leaves = [leaf for leaf in pytree.tree_leaves(data[0]) if isinstance(leaf, torch.Tensor)]
    tokens = [leaf for leaf in leaves if leaf.ndim == 1 and not leaf.is_floating_point()]
    return len(tokens[0]) if tokens else _SEQ_LEN


@dataclass(frozen=True)
class RunNeeds:
    """What is known of a run before it starts; None: not known."""

    model: str
    parameters: int
    trainable: int
    samples: int | None
    global_batch: int | None
    steps_per_epoch: int | None
    steps: int | None
    memory: StateBytes
    """Bytes per rank, without activations."""
    peak: int
    """Bytes per rank with activations and buffers, by the planner's formulas."""
    strategy: str
    mesh: Mesh
    note: str = ""
    """Why strategy = "auto" is another one than the default."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        fields = {name: value for name, value in vars(self).items() if name != "mesh"}
        memory = {**self.memory._asdict(), "total": sum(self.memory), "peak": fields.pop("peak")}
        return {**fields, "memory": memory}


def estimate_recipe(recipe: Recipe, config: DistributedConfig, layout: JobLayout) -> RunNeeds:
    """Build the model without storage and its data, and return what a run would need."""
    model, train, *_ = recipe_parts(recipe, without_storage=True)
    recipe_steps(recipe, model, train)  # a wrong name or option ends the run when it starts
    adapt(model, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    samples = len(train) if hasattr(train, "__len__") else None
    ranks = layout.world_size, layout.ranks_per_node
    config, note = settle_strategy(with_batch_size(config, train), model, train, layout.device, *ranks)
    mesh = plan_mesh(config, *ranks)
    if config.pipeline_cuts not in (None, "measured"):  # a wrong name ends the run when it starts
        cut_at(units_of(model), config.pipeline_cuts, SCHEDULES[config.pipeline_schedule].num_stages(mesh.pp))
    batch_size = config.batch_size or getattr(train, "batch_size", None) or 1
    memory = estimate_memory(model, config, mesh, batch_size)
    peak = planned_gib(describe(model), config, layout.device, train, layout_of(config, mesh, batch_size))
    batch = None  # a DataLoader of the user has it
    if config.batch_size is not None:
        batch = config.batch_size * config.gradient_accumulation_steps * mesh.dp_size
    per_epoch = steps = None
    if samples is not None and batch is not None:
        per_epoch = samples // batch if config.drop_last else -(-samples // batch)
        epochs = config.epochs or (1 if config.max_steps is None else None)
        steps = per_epoch * epochs if epochs is not None else None
    if config.max_steps is not None:
        steps = config.max_steps if steps is None else min(steps, config.max_steps)
    return RunNeeds(
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable=sum(parameter.numel() for parameter in trained),
        samples=samples,
        global_batch=batch,
        steps_per_epoch=per_epoch,
        steps=steps,
        memory=memory,
        peak=max(round(peak * 2**30), int(sum(memory))),
        strategy=config.resolved_strategy,
        mesh=mesh,
        note=note,
    )


def estimate_memory(model: nn.Module, config: DistributedConfig, mesh: Mesh, batch_size: int = 1) -> StateBytes:
    """Return the bytes of weights, gradients and optimizer states on each rank, as ZeRO shards them."""
    parameters = [
        (parameter.numel() * parameter.element_size(), parameter.requires_grad) for parameter in model.parameters()
    ]
    whole = sum(size for size, _ in parameters) * (1 if config.ema_decay is None else 2)
    trained = sum(size for size, is_trained in parameters if is_trained)
    states = 0 if config.facts.has_servers else optimizer_states(config.optimizer, config.momentum)  # servers hold them
    if config.facts.shards_by_engine:
        ranks, stage = mesh.dp_size, config.zero_stage or 0
    else:
        layout = layout_of(config, mesh, batch_size)
        ranks, stage = layout.dp_shard * layout.cp, layout.stage
    sizes = StateBytes(whole, trained, trained * states)
    if stage in (1, 2) and config.mixed_precision and not config.facts.shards_by_engine:
        # The fp32 weights are shards then, and what is whole has half precision.
        sizes = StateBytes(whole / 2, trained / 2, trained * (1 + states))
    return StateBytes(*(round(size / (mesh.tp * mesh.pp)) for size in zero_bytes(1.0, ranks, stage, sizes)))
