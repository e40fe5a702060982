"""Which layouts `train` accepts: the settings of a layout, and the reason why it would be refused.

`refusal` asks the functions that training asks (`world.splits`, `world.mesh`, `config.rules`), on settings that are not
checked one by one, so that a search can ask it about thousands of layouts. `accepted` builds the checked config of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from phalanx.config import DistributedConfig, rules
from phalanx.config.fields import HYBRID, OPTIMIZERS, ZERO_SHARDING
from phalanx.config.pairs import PAIRS
from phalanx.config.settings import Settings
from phalanx.errors import PhalanxError
from phalanx.tools.plan.cluster import Cluster
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.plans import PRECISIONS, Estimate, Goal, Layout, budget_of
from phalanx.world.mesh import Mesh, check_device, plan_mesh
from phalanx.world.splits import (
    SCHEDULES,
    choose_microbatches,
    too_long,
    too_many_stages,
    uneven_context,
    uneven_experts,
    uneven_slices,
    uneven_tensors,
)

_DECIDED = {"zero_stage", "activation_checkpointing", "lora_rank", "lora_base"}
"""Settings of a layout that the table of pairs may refuse."""
_RULES = (rules.sharding, *(pair.rule() for pair in PAIRS if pair.refuse in _DECIDED))
"""The rules between the settings that a layout decides; a rank count that is wrong is found before."""
USUAL = (
    (2.5e8, 500_000, 6e-4),
    (5e8, 500_000, 3e-4),
    (1e9, 1_000_000, 2.5e-4),
    (2e9, 1_000_000, 2e-4),
    (4.5e9, 2_000_000, 1.6e-4),
    (9e9, 2_000_000, 1.2e-4),
    (2e10, 2_000_000, 1e-4),
    (math.inf, 4_000_000, 6e-5),
)
"""Tokens per step and learning rate of language models by parameters, about as in Brown et al. 2020, table 2.1."""
ADAPTER_RATE = 2e-4
"""The learning rate of LoRA's adapters, as in Dettmers et al. 2023."""


def settings_of(layout: Layout, goal: Goal, cluster: Cluster) -> dict[str, Any]:
    """Return the settings of `phalanx train` for a layout; most with their default value are left out."""
    settings: dict[str, Any] = {**_resources(cluster), **_sharding(layout, goal)}
    count = layout.accumulation(goal.global_batch)
    if layout.pp > 1:  # a batch is cut into micro-batches by the pipeline, and makes one step
        settings |= {"pipeline_parallel": layout.pp, "pipeline_schedule": layout.schedule, "microbatches": count}
        settings["batch_size"] = layout.micro_batch * count
    else:
        settings["batch_size"] = layout.micro_batch
        if count > 1:
            settings["gradient_accumulation_steps"] = count
    axes = {"tensor_parallel": layout.tp, "context_parallel": layout.cp, "expert_parallel": layout.ep}
    settings |= {axis: size for axis, size in axes.items() if size > 1}
    settings["mixed_precision"] = goal.precision if goal.precision != "fp32" else False  # recipes have bf16 on GPUs
    if layout.recompute != "none":
        settings["activation_checkpointing"] = layout.recompute
    if layout.offload != "none":
        settings["offload"] = layout.offload
    if layout.lora_rank is not None:
        settings["lora_rank"] = layout.lora_rank
    if goal.compile:
        settings["compile"] = True
    if goal.optimizer != "adamw":
        settings["optimizer"] = goal.optimizer
    return settings


def usual_rate(model: ModelShape | TracedShape, goal: Goal, layout: Layout) -> dict[str, float]:
    """Return the setting of a usual learning rate, for a language model that AdamW trains."""
    if isinstance(model, TracedShape) or model.patches or not goal.optimizer.startswith("adam"):
        return {}
    usual = next(rate for size, _, rate in USUAL if model.parameters < size)
    return {"learning_rate": usual if layout.lora_rank is None else ADAPTER_RATE}


def length(spent: dict[str, float], reliability: dict[str, float], best: Estimate) -> dict[str, Any]:
    """Return the settings of the training's steps, where they are known, and of those between two checkpoints."""
    steps = {"max_steps": max(1, round(spent["steps"]))} if spent else {}
    every = max(1, round(reliability["checkpoint_interval_seconds"] / best.step_seconds))
    return {**steps, "checkpoint_frequency": f"{every} steps"}


def layout_of(config: Settings, mesh: Mesh, batch_size: int) -> Layout:
    """Return the layout that settings describe: the inverse of `settings_of`."""
    schedule = SCHEDULES[config.pipeline_schedule]
    count = choose_microbatches(config.microbatches, batch_size, mesh.pp, schedule) if mesh.pp > 1 else 1
    whole = mesh.dp_shard * mesh.cp == 1 or (mesh.pp > 1 and schedule.name == "zero-bubble")
    stage = config.zero_stage or (1 if config.resolved_sharding.endswith("grad-op") else 3)
    return Layout(
        tp=mesh.tp,
        pp=mesh.pp,
        cp=mesh.cp,
        dp_replicate=mesh.dp_replicate,
        dp_shard=mesh.dp_shard,
        ep=config.expert_parallel,
        virtual_stages=schedule.stages_per_rank if mesh.pp > 1 else 1,
        micro_batch=batch_size // count,
        sequence_parallel=mesh.tp > 1,
        recompute=recompute_of(config),
        zero_stage=0 if whole else stage,
        schedule=schedule.name,
        offload="none" if config.offload == "none" else "cpu",
        lora_rank=config.lora_rank,
    )


def recompute_of(config: Settings) -> str:
    """Return what settings recompute in backward: none, selective, full, or a budget."""
    recompute = config.recompute
    if recompute is not None and recompute.budget is not None:
        return f"budget {recompute.budget:g}"
    return "none" if recompute is None else "selective" if recompute.selective else "full"


def _resources(cluster: Cluster) -> dict[str, Any]:
    name = cluster.gpu if isinstance(cluster.gpu, str) else cluster.gpu.name
    device: dict[str, Any] = {"device": "cpu"} if name.lower().startswith("cpu") else {}
    if cluster.nodes > 1:
        return {**device, "num_nodes": cluster.nodes, "gpus_per_node": cluster.gpus // cluster.nodes}
    return {**device, "num_workers" if device else "num_gpus": cluster.gpus}


def _sharding(layout: Layout, goal: Goal) -> dict[str, Any]:
    """Return strategy, sharding and ZeRO stage.

    A stage is named where gradients must be sharded between micro-batches: fsdp alone keeps them whole until the step.
    """
    stage = layout.stage
    if stage == 0 and layout.dp_replicate > 1 and layout.replica > 1 and not layout.keeps_stages_whole:
        # torch's DDP cannot average what is split: fsdp does, in groups of one rank.
        return {"strategy": "fsdp", "sharding": "hybrid-grad-op", "shard_size": 1}
    if stage == 0:
        return {"strategy": "ddp"}
    settings: dict[str, Any] = {"strategy": "fsdp"}
    kind = ZERO_SHARDING[stage]
    if layout.dp_replicate > 1 and layout.ep == 1:
        settings |= {"sharding": HYBRID[kind], "shard_size": layout.dp_shard}
    elif kind != "full":
        settings["sharding"] = kind
    if stage > 1 and layout.pp == 1 and layout.accumulation(goal.global_batch) > 1:
        settings["zero_stage"] = stage
    return settings


def accepted(layout: Layout, goal: Goal, cluster: Cluster) -> DistributedConfig:
    """Return the config that `train` would run for a layout; PhalanxError where it refuses it."""
    config = DistributedConfig(**settings_of(layout, goal, cluster))
    check_device(config, "cpu" if config.device == "cpu" else "cuda")
    plan_mesh(config, cluster.gpus, cluster.gpus // cluster.nodes)
    return config


def refusal(model: ModelShape | TracedShape, layout: Layout, goal: Goal, cluster: Cluster) -> str | None:
    """Return why `train` would refuse this layout of a model, or would run another one; None where it runs it."""
    for reason in _reasons(model, layout, goal, cluster):
        return reason
    return None


def _reasons(model: ModelShape | TracedShape, layout: Layout, goal: Goal, cluster: Cluster) -> Iterator[str]:
    yield from _arithmetic(layout, goal, cluster)
    yield from _data_axes(layout)
    if isinstance(model, ModelShape):
        yield from _transformer(model, layout, goal)
    else:
        yield from _traced(model, layout)
    yield from _settings(settings_of(layout, goal, cluster), cluster)


def _settings(values: dict[str, Any], cluster: Cluster) -> Iterator[str]:
    """Ask the rules between settings, and those of the mesh."""
    settings = Settings.__new__(Settings)  # the class has the defaults: a thousand checked configs would take seconds
    settings.__dict__.update(values)
    for rule in _RULES:
        yield from (text for _, text in rule.check(settings))
    try:
        check_device(settings, settings.device)
        plan_mesh(settings, cluster.gpus, cluster.gpus // cluster.nodes)
    except PhalanxError as error:
        yield error.message


def _arithmetic(layout: Layout, goal: Goal, cluster: Cluster) -> Iterator[str]:
    if layout.gpus != cluster.gpus:
        yield f"the axes make {layout.gpus} ranks, and the cluster has {cluster.gpus} GPUs"
    if cluster.gpus % cluster.nodes:
        yield f"{cluster.gpus} ranks cannot be spread evenly over {cluster.nodes} nodes"
    samples = layout.dp * layout.micro_batch
    if goal.global_batch % samples:
        yield (
            f"a global batch of {goal.global_batch} cannot be divided by {layout.dp} data ranks x micro-batches of "
            f"{layout.micro_batch}"
        )
    if goal.precision not in PRECISIONS:
        yield f"training in {goal.precision} is not supported"
    if goal.optimizer not in OPTIMIZERS:
        yield f"the optimizer {goal.optimizer} is not one of {', '.join(OPTIMIZERS)}"
    if budget_of(layout.recompute) is not None and not goal.compile:
        yield f"activation_checkpointing = '{layout.recompute}' is for compiled blocks: write compile = true"
    if layout.pp > 1 and layout.schedule not in SCHEDULES:
        yield f"the pipeline schedule {layout.schedule} is not one of {', '.join(SCHEDULES)}"
        return
    stages = SCHEDULES[layout.schedule].stages_per_rank if layout.pp > 1 else 1
    if layout.virtual_stages != stages:
        schedule = f"the schedule {layout.schedule}" if layout.pp > 1 else "a model without a pipeline"
        yield f"{schedule} has {stages} stage{'s' * (stages > 1)} per rank, not {layout.virtual_stages}"


def _data_axes(layout: Layout) -> Iterator[str]:
    """Report data axes that `train` would lay out in another way."""
    stage, shards = layout.stage, layout.dp_shard * layout.cp
    if stage == 0 and shards > 1 and not (layout.keeps_stages_whole and layout.dp_shard == 1):
        yield f"dp_shard x cp = {shards} ranks shard the model, and zero_stage = 0 does not"
    elif stage > 0 and shards == 1 and layout.offload == "none":
        yield f"zero_stage = {stage} needs ranks to shard over, and dp_shard x cp = 1"
    if layout.ep > 1 and layout.dp_shard != layout.ep:
        yield f"the model is sharded over the ranks that share the experts: dp_shard = {layout.dp_shard} is not " + (
            f"expert_parallel = {layout.ep}"
        )


def _transformer(model: ModelShape, layout: Layout, goal: Goal) -> Iterator[str]:
    kind = "a mixture of experts" if model.experts else "a vision transformer" if model.patches else "an encoder"
    if model.experts or model.patches or not model.causal:  # no plan, units or positions to cut such a model by
        for axis in ("tp", "pp", "cp"):
            if getattr(layout, axis) > 1:
                yield f"{axis} = {getattr(layout, axis)}: {kind} is trained with the data axes only"
    if layout.ep > 1 and not model.experts:
        yield f"expert_parallel = {layout.ep} needs a mixture of experts"
    elif layout.ep > 1:
        yield from _told(uneven_experts(model.name, model.experts, layout.ep))
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads or model.heads, "ffn_hidden": model.ffn}
    yield from _told(uneven_tensors(model.name, sizes, layout.tp))
    if layout.sequence_parallel != (layout.tp > 1):
        yield "tensor parallelism splits norms and residuals along the sequence, and only that does"
    yield from _told(too_many_stages(model.name, model.layers, layout.pp * layout.virtual_stages))
    if layout.cp > 1:
        yield from _told(uneven_context(goal.seq_len, layout.cp))
    yield from _told(uneven_slices(goal.seq_len // layout.cp, layout.tp))
    if model.positions:
        yield from _told(too_long(goal.seq_len, model.positions))
    if layout.recompute != "none" and model.layers < 2:
        yield f"{model.name} has no repeated blocks to recompute"


def _traced(model: TracedShape, layout: Layout) -> Iterator[str]:
    for axis, name in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        if getattr(layout, axis) > 1 and name not in model.supports:
            yield f"{model.name} has no methods for {name} parallelism"
    if layout.pp > 1:
        yield from _told(too_many_stages(model.name, model.blocks, layout.pp * layout.virtual_stages))
    if layout.recompute != "none" and model.blocks < 2:
        yield f"{model.name} has no repeated blocks to recompute"


def _told(error: PhalanxError | None) -> Iterator[str]:
    if error is not None:
        yield error.message
