"""strategy = "auto": ddp where a rank has room for a whole copy of the training state, else fsdp.

The planner's formulas say how much memory each needs. They are asked only where nothing was chosen by the user and the
parameters are so many that it may matter: all ranks have the same facts, and decide alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.config.rules import AXES
from phalanx.config.settings import precision_name
from phalanx.errors import UsageError
from phalanx.host.cgroups import host_memory
from phalanx.host.gpus import count_gpus, gpu_memory, ranks_per_gpu
from phalanx.tools.plan.cluster import Gpu
from phalanx.tools.plan.layout import Goal, Layout
from phalanx.tools.plan.memory import rank_memory
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.shape import shape_of
from phalanx.tools.plan.states import state_bytes
from phalanx.torch_compat import pytree
from phalanx.world.env import read_rank_env

_CHOICES = (
    *(*AXES, "sharding", "shard_size", "zero_stage", "offload", "lora_rank", "deepspeed_config", "min_workers"),
    *("compression", "fixed_order", "check_replicas_every", "straggler_factor", "communication_backend"),
)
"""Settings that choose a layout, or are for whole copies."""
_SEQ_LEN = 1024


class Settled(NamedTuple):
    """A config whose strategy is decided, and why it was changed (empty: it was not)."""

    config: DistributedConfig
    note: str = ""


def settle_here(config: DistributedConfig, model: nn.Module, train: Any) -> Settled:
    """Decide in a rank that a launcher started; see `settle_strategy`."""
    env = read_rank_env()
    if env is None:
        return Settled(config)
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    return settle_strategy(config, model, train, device, env.planned or env.world_size, env.local_world_size)


def settle_strategy(
    config: DistributedConfig, model: nn.Module, train: Any, device: str, ranks: int, ranks_here: int
) -> Settled:
    """Choose fsdp for a model whose copies would not fit on the ranks; all else stays as it is."""
    undecided = config.strategy == "auto" and config.resolved_strategy == "ddp" and not config.changed(*_CHOICES)
    if ranks == 1 or not undecided or config.backend != "pytorch-ddp":
        return Settled(config)
    memory = rank_bytes(device, ranks_here)
    if not memory or not is_large(model, memory):
        return Settled(config)
    shape, limit = describe(model), memory / 2**30
    blocks = shape.layers if isinstance(shape, ModelShape) else shape.blocks
    layouts = [one for one in _layouts(config, ranks, train) if blocks > 1 or one[1].recompute == "none"]
    needs = [(change, planned_gib(shape, config, device, train, layout)) for change, layout in layouts]
    whole = needs[0][1]
    if whole <= limit:
        return Settled(config)
    change, needed = next((one for one in needs if one[1] <= limit), needs[-1])
    short = "" if needed <= limit else f"; even so a rank needs {needed:.3g} GiB"
    why = f"because ddp would need {whole:.3g} GiB of {limit:.3g} GiB per rank{short}"
    words = ", ".join(f"{name} = {value!r}" for name, value in change.items())
    return Settled(config.with_trusted(**change), f"strategy auto: {words}, {why}")


def is_large(model: nn.Module, memory: int) -> bool:
    """Whether the states of a model's parameters take a quarter of a rank's memory or more."""
    return sum(parameter.numel() for parameter in model.parameters()) * sum(state_bytes()) > memory / 4


def rank_bytes(device: str, ranks_here: int) -> int:
    """Return a rank's share of its GPU's memory, or of the host's; 0: not known."""
    if device == "cuda":
        return gpu_memory() // ranks_per_gpu(ranks_here, count_gpus())
    return host_memory() // ranks_here


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
