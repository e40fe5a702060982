"""strategy = "auto" for a large model: the fastest layout whose memory fits, by the planner's formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.config.settings import precision_name
from phalanx.errors import UsageError
from phalanx.tools.plan.cluster import Gpu
from phalanx.tools.plan.layout import Goal, Layout
from phalanx.tools.plan.memory import rank_memory
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.shape import shape_of
from phalanx.torch_compat import pytree

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
    short = "" if needed <= limit else f"; even so a rank needs {needed:.3g} GiB"
    why = f"because ddp would need {whole:.3g} GiB of {limit:.3g} GiB per rank{short}"
    words = ", ".join(f"{name} = {value!r}" for name, value in change.items())
    return config.with_trusted(**change), f"strategy auto: {words}, {why}"


def _layouts(config: DistributedConfig, ranks: int, train: Any) -> Iterator[tuple[dict[str, Any], Layout]]:
    """Yield what may be chosen, the fastest first, with the settings that it changes."""
    recompute = config.recompute
    kept = "none" if recompute is None else "selective" if recompute.selective else "full"
    size = config.batch_size or getattr(train, "batch_size", None) or 1
    yield {}, Layout(dp_replicate=ranks, micro_batch=size, recompute=kept)
    sharded = {"strategy": "fsdp", "sharding": "grad-op"}
    yield sharded, Layout(dp_shard=ranks, micro_batch=size, zero_stage=1, recompute=kept)
    yield {"strategy": "fsdp"}, Layout(dp_shard=ranks, micro_batch=size, recompute=kept)
    if recompute is None:
        full = {"strategy": "fsdp", "activation_checkpointing": "full"}
        yield full, Layout(dp_shard=ranks, micro_batch=size, recompute="full")


def describe(model: nn.Module) -> ModelShape | TracedShape:
    """Return what the planner knows of a model; of one that cannot be traced, its parameters alone."""
    known = shape_of(model)
    if known is not None:
        return known
    from phalanx.tools.plan.trace import trace_module

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
