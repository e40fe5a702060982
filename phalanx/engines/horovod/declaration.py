"""What every config knows of Horovod; loaded with it, so without a heavy import."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.option import option
from phalanx.config.rows import Backend, Package, StrategyFacts, StrategyRow


@dataclass(frozen=True, kw_only=True)
class HorovodSettings:
    """Options of horovodrun and of Horovod's optimizer."""

    host_discovery_script: str | None = option(
        None,
        "elastic: an executable that prints the available nodes, one host:slots per line",
        backends=("horovod",),
        scope="machine",
        used_by="command",
    )
    adasum: bool = option(False, "combine gradients by Adasum instead of averaging them", backends=("horovod",))
    horovod_timeline: str | None = option(
        None,
        "write a timeline of the communication to this file, for chrome://tracing or Perfetto",
        backends=("horovod",),
        scope="machine",
        used_by="command",
    )


BACKEND = Backend(
    "horovodrun",
    "horovod",
    strategies=("horovod",),
    engine="phalanx.engines.horovod",
    package=Package(
        "horovod",
        "Horovod",
        "Build it: make horovod, or python tools/build_horovod.py. (The extra phalanx[horovod] alone "
        "does not compile: docs/horovod.md)",
    ),
    options=HorovodSettings,
    follows=("hosts",),
    resizes=True,
    variable="HOROVOD_RANK",
    script_imports="horovod.torch",
)
STRATEGIES = (
    StrategyRow(
        "horovod",
        "--backend horovod [--compression fp16] [--hosts node1:8,node2:8] [--min-workers N]",
        "ddp by Horovod's all-reduce, on ranks that horovodrun starts",
        "scripts and clusters are made for Horovod, or workers come and go (elastic Horovod)",
        "accumulation, clipping, precision, compile, lora; no other axis, no zero",
        "phalanx.engines.horovod.strategy:Horovod",
        facts=StrategyFacts(replicates=True, averages_gradients=True, needs_contiguous=True, compressors=("fp16",)),
        backend="horovod",
        settings=("check_replicas_every", "straggler_factor"),
    ),
)
