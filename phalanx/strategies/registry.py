"""The strategies in one table, loaded by name. No torch here: `phalanx strategies` prints the table."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from phalanx.config import DistributedConfig
from phalanx.config.option import load_entry_point
from phalanx.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

    from phalanx.strategies.base import Strategy
    from phalanx.world.world import World

ENTRY_POINTS = "phalanx.strategies"
"""The group of entry points in which an installed package names its strategies."""


@dataclass(frozen=True)
class Row:
    """One strategy: its flags, what it does, when to choose it, what it combines with, and its class."""

    name: str
    flag: str
    summary: str
    choose: str
    combines: str
    home: str | None = None
    """`module:Class`; None for an axis, or for a strategy under another name or of another framework."""


TABLE = (
    Row(
        "ddp",
        "--strategy ddp (the default; without the flag, CPU ranks of one machine average in shared memory)",
        "every rank holds the whole model; gradients are averaged during backward",
        "the model, its gradients and optimizer states fit on one device",
        "everything below except fsdp and zero; with another axis the data axis is sharded",
        "phalanx.strategies.ddp:DDP",
    ),
    Row(
        "ring",
        "--strategy ring [--compression NAME], and --fixed-order",
        "ddp with Phalanx's collectives: gradients in shared memory within a machine, a ring between machines",
        "the ranks are CPUs of one machine (faster than ddp), or a run must give equal bits at 1, 2, 4 and 8 ranks",
        "accumulation, clipping, compression, compile; no other axis",
        "phalanx.strategies.ring_ddp:RingDDP",
    ),
    Row(
        "local-sgd",
        "--strategy local-sgd --sync-every H",
        "every rank takes local steps; weights are averaged every H steps",
        "the link between ranks is too slow even for compressed gradients at every step",
        "accumulation, clipping, precision; no other axis",
        "phalanx.strategies.local_sgd:LocalSGD",
    ),
    Row(
        "diloco",
        "--strategy diloco --sync-every H [--outer-learning-rate 0.7] [--outer-momentum 0.9]",
        "local-sgd with an outer step along the average movement, with Nesterov momentum",
        "as local-sgd, with rounds of tens or hundreds of steps",
        "as local-sgd",
        "phalanx.strategies.local_sgd:DiLoCo",
    ),
    Row(
        "fsdp",
        "--strategy fsdp [--sharding full|grad-op|hybrid|hybrid-grad-op] [--offload cpu]",
        "parameters, gradients and optimizer states are sharded; blocks are gathered one at a time",
        "they do not fit; grad-op trades memory for less traffic, hybrid shards within a machine only",
        "tensor, pipeline (not zero-bubble), context, expert, lora; one rank runs the bare model",
        "phalanx.strategies.fsdp:FSDP",
    ),
    Row(
        "zero",
        "--zero-stage 1|2|3",
        "ZeRO by fsdp: optimizer states sharded (1), gradients too (2), parameters too (3)",
        "you think in ZeRO's stages",
        "what fsdp combines with",
    ),
    Row(
        "deepspeed",
        "--strategy deepspeed, --deepspeed-config ds.json (extra: deepspeed)",
        "DeepSpeed's own engine, by its JSON: ZeRO's stages 0 to 3, offload to CPU memory or NVMe",
        "you have a DeepSpeed configuration, or optimizer states should be in CPU memory or on disk",
        "accumulation, clipping, bf16, activation checkpointing, offload; no other axis",
        "phalanx.engines.deepspeed.strategy:DeepSpeed",
    ),
    Row(
        "horovod",
        "--backend horovod [--compression fp16] [--hosts node1:8,node2:8] [--min-workers N]",
        "ddp by Horovod's all-reduce, on ranks that horovodrun starts",
        "scripts and clusters are made for Horovod, or workers come and go (elastic Horovod)",
        "accumulation, clipping, precision, compile, lora; no other axis, no zero",
        "phalanx.engines.horovod.strategy:Horovod",
    ),
    Row(
        "tensor",
        "--tensor-parallel N",
        "every layer is split over N neighbouring ranks, by the model's plan; sequence and loss parallel",
        "a layer or its activations do not fit, and N ranks share fast links",
        "ddp, fsdp, pipeline, context",
    ),
    Row(
        "pipeline",
        "--pipeline-parallel N [--pipeline-schedule gpipe|1f1b|interleaved|zero-bubble] [--microbatches M]",
        "the model is cut into stages on different ranks; parts of a batch go through them one by one",
        "the model does not fit, and links between machines are slow",
        "ddp, fsdp, tensor, context",
    ),
    Row(
        "context",
        "--context-parallel N",
        "every sequence is cut over N ranks, with ring attention between them",
        "sequences are so long that their activations do not fit",
        "ddp, fsdp, tensor, pipeline",
    ),
    Row(
        "expert",
        "--expert-parallel N",
        "the experts of a mixture are on N data-parallel ranks; tokens are sent to them",
        "the model is a mixture of experts that does not fit, or whose experts are many",
        "ddp, fsdp (the rest of the model is sharded over the same ranks)",
    ),
    Row(
        "tensorflow",
        "--backend tensorflow --strategy mirrored|multiworker|parameter-server (extra: tensorflow)",
        "tf.distribute for Keras models: replicas in one process, one process per worker, or parameter servers",
        "the model is a Keras model",
        "mixed precision, backups, restarts; other options of Keras are given to compile()",
    ),
    Row(
        "parameter-server",
        "--strategy parameter-server [--num-servers N] [--server-mode sync|async|bounded] [--staleness S]",
        "server processes hold the parameters and step; ranks push gradients and pull values",
        "ranks differ in speed (bounded, async), or a few rows of large embeddings change in each step",
        "accumulation, clipping, bf16, compile, lora; no other axis, no zero",
        "phalanx.strategies.parameter_server:ParameterServer",
    ),
)


STRATEGIES = {row.name: row.home for row in TABLE if row.home is not None}
_COMPOSED = "phalanx.strategies.compose:Composed"
_AUTO = "phalanx.strategies.auto:Auto"


def installed_strategies() -> EntryPoints:
    """Return the strategies that other installed packages bring."""
    from importlib.metadata import entry_points  # 30 ms to import

    return entry_points(group=ENTRY_POINTS)


def load_strategy(name: str) -> type[Strategy]:
    """Return a strategy's class, of this package or of another one."""
    if name in STRATEGIES:
        return _load(STRATEGIES[name])
    found = {entry.name: entry for entry in installed_strategies()}
    if name not in found:
        raise UsageError(unknown_name("strategy", name, [*STRATEGIES, *found]))
    loaded = load_entry_point(ENTRY_POINTS, name)
    from phalanx.strategies.base import Strategy

    if not (isinstance(loaded, type) and issubclass(loaded, Strategy)):
        raise UsageError(
            f"strategy = {name!r}: the entry point {name} = {found[name].value} in the group {ENTRY_POINTS} is not a "
            "subclass of phalanx.strategies.base.Strategy"
        )
    return loaded


def _load(home: str) -> type[Strategy]:
    module, _, name = home.partition(":")
    kind: type[Strategy] = getattr(import_module(module), name)
    return kind


def build_strategy(config: DistributedConfig, world: World) -> Strategy:
    """Return the strategy that the config names."""
    name, mesh = config.resolved_strategy, world.mesh
    if max(mesh.pp, mesh.cp, mesh.tp, config.expert_parallel) > 1:
        if name not in STRATEGIES:
            raise UsageError(
                f"strategy = {name!r} does not compose with other axes: it is not one of {', '.join(STRATEGIES)}",
                hint="Leave out tensor_parallel, pipeline_parallel, context_parallel and expert_parallel.",
            )
        kind = _load(_COMPOSED)
    elif name == "ddp" and config.strategy == "auto" and config.compression == "none" and not config.fixed_order:
        kind = _load(_AUTO)
    else:
        kind = load_strategy(name)
    return kind(config, world)
