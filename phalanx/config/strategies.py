"""The strategies in one table, with the facts that rules, memory, profiles, verification and plans ask. No torch.

Adding a strategy is one class (`phalanx/strategies/base.py`) and one row: here, or for an engine in its folder
(`declaration.py`). A strategy of another package is an entry point of the group `phalanx.strategies`; its class has its
facts:

    class Average(Strategy):
        name = "toy-average"
        facts = StrategyFacts(replicates=True, averages_gradients=True, recovery="resize")
"""

from __future__ import annotations

import functools

from phalanx.config.backends import ENGINES, declaration
from phalanx.config.option import load_entry_point
from phalanx.config.rows import StrategyFacts, StrategyRow

COMPRESSORS = ("none", "fp16", "bf16", "int8", "sign", "topk", "randomk", "powersgd")
AXES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
"""Settings that split a model over ranks, besides the data axis."""
ENTRY_POINTS = "phalanx.strategies"
"""The group of entry points in which an installed package names its strategies."""


TABLE: tuple[StrategyRow, ...] = (
    StrategyRow(
        "ddp",
        "--strategy ddp (the default; without the flag, CPU ranks of one node average in shared memory)",
        "every rank holds the whole model; gradients are averaged during backward",
        "the model, its gradients and optimizer states fit on one device",
        "everything below except fsdp and zero; with another axis the data axis is sharded",
        "phalanx.strategies.ddp:DDP",
        facts=StrategyFacts(
            replicates=True, averages_gradients=True, recovery="resize", compressors=COMPRESSORS, axes=AXES
        ),
    ),
    StrategyRow(
        "ring",
        "--strategy ring [--compression NAME], and --fixed-order",
        "ddp with Phalanx's collectives: gradients in shared memory within a node, a ring between nodes",
        "the ranks are CPUs of one node (faster than ddp), or a run must give equal bits at 1, 2, 4 and 8 ranks",
        "accumulation, clipping, compression, compile; no other axis",
        "phalanx.strategies.ring_ddp:RingDDP",
        facts=StrategyFacts(replicates=True, averages_gradients=True, recovery="resize", compressors=COMPRESSORS),
    ),
    StrategyRow(
        "local-sgd",
        "--strategy local-sgd --sync-every H",
        "every rank takes local steps; weights are averaged every H steps",
        "the link between ranks is too slow even for compressed gradients at every step",
        "accumulation, clipping, precision; no other axis",
        "phalanx.strategies.local_sgd:LocalSGD",
        facts=StrategyFacts(recovery="resize", drifts=True),
    ),
    StrategyRow(
        "diloco",
        "--strategy diloco --sync-every H [--outer-learning-rate 0.7] [--outer-momentum 0.9]",
        "local-sgd with an outer step along the average movement, with Nesterov momentum",
        "as local-sgd, with rounds of tens or hundreds of steps",
        "as local-sgd",
        "phalanx.strategies.local_sgd:DiLoCo",
        facts=StrategyFacts(recovery="resize", drifts=True),
    ),
    StrategyRow(
        "fsdp",
        "--strategy fsdp [--sharding full|grad-op|hybrid|hybrid-grad-op] [--offload cpu]",
        "parameters, gradients and optimizer states are sharded; blocks are gathered one at a time",
        "they do not fit; grad-op trades memory for less traffic, hybrid shards within a node only",
        "tensor, pipeline (not zero-bubble), context, expert, lora; one rank runs the bare model",
        "phalanx.strategies.fsdp:FSDP",
        facts=StrategyFacts(shards=True, averages_gradients=True, needs_contiguous=True, recovery="replace", axes=AXES),
        implied_by=("zero_stage",),
    ),
    StrategyRow(
        "zero",
        "--zero-stage 1|2|3",
        "ZeRO by fsdp: optimizer states sharded (1), gradients too (2), parameters too (3)",
        "you think in ZeRO's stages",
        "what fsdp combines with",
    ),
    StrategyRow(
        "tensor",
        "--tensor-parallel N",
        "every layer is split over N neighbouring ranks, by the model's plan; sequence and loss parallel",
        "a layer or its activations do not fit, and N ranks share fast links",
        "ddp, fsdp, pipeline, context",
    ),
    StrategyRow(
        "pipeline",
        "--pipeline-parallel N [--pipeline-schedule gpipe|1f1b|interleaved|zero-bubble] [--microbatches M]",
        "the model is cut into stages on different ranks; parts of a batch go through them one by one",
        "the model does not fit, and links between nodes are slow",
        "ddp, fsdp, tensor, context",
    ),
    StrategyRow(
        "context",
        "--context-parallel N",
        "every sequence is cut over N ranks, with ring attention between them",
        "sequences are so long that their activations do not fit",
        "ddp, fsdp, tensor, pipeline",
    ),
    StrategyRow(
        "expert",
        "--expert-parallel N",
        "the experts of a mixture are on N data-parallel ranks; tokens are sent to them",
        "the model is a mixture of experts that does not fit, or whose experts are many",
        "ddp, fsdp (the rest of the model is sharded over the same ranks)",
    ),
    StrategyRow(
        "parameter-server",
        "--strategy parameter-server [--num-servers N] [--server-mode sync|async|bounded] [--staleness S]",
        "server processes hold the parameters and step; ranks push gradients and pull values",
        "ranks differ in speed (bounded, async), or a few rows of large embeddings change in each step",
        "accumulation, clipping, bf16, compile, lora; no other axis, no zero",
        "phalanx.engines.parameter_server.strategy:ParameterServer",
        facts=StrategyFacts(recovery="resize", has_servers=True),
    ),
    *(row for engine in ENGINES for row in declaration(engine).STRATEGIES),
)


ROWS = {row.name: row for row in TABLE}


@functools.cache
def facts_of(name: str) -> StrategyFacts:
    """Return the facts of a strategy by name, also of another package."""
    if name in ROWS:
        return ROWS[name].facts
    facts = getattr(load_entry_point(ENTRY_POINTS, name), "facts", None)
    return facts if isinstance(facts, StrategyFacts) else StrategyFacts()


def strategies_that(ability: str, value: object = True) -> list[str]:
    """Return the names of the strategies of this package with a fact, for messages."""
    return [row.name for row in TABLE if getattr(row.facts, ability) == value]
