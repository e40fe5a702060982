"""What every config knows of DeepSpeed; loaded with it, so without a heavy import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.config.option import option
from phalanx.config.rows import Backend, StrategyFacts, StrategyRow


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings:
    """DeepSpeed's JSON file, and offload to NVMe."""

    deepspeed_config: Mapping[str, Any] | str | None = option(
        None,
        'train with DeepSpeed\'s engine by this JSON file (in Python also a dict); "auto" in it: as set here',
        scope="layout machine",
    )
    nvme_path: str | None = option(
        None, "offload=nvme: a folder on a fast disk", strategies=("deepspeed",), scope="machine"
    )


BACKEND = Backend(
    "local",
    "deepspeed",
    engine="phalanx.engines.deepspeed",
    options=DeepSpeedSettings,
    follows=("hosts",),
    rules_for=("offload", "deepspeed_config"),
)
STRATEGIES = (
    StrategyRow(
        "deepspeed",
        "--strategy deepspeed, --deepspeed-config ds.json (extra: deepspeed)",
        "DeepSpeed's own engine, by its JSON: ZeRO's stages 0 to 3, offload to CPU memory or NVMe",
        "you have a DeepSpeed configuration, or optimizer states should be in CPU memory or on disk",
        "accumulation, clipping, bf16, activation checkpointing, offload; no other axis",
        "phalanx.engines.deepspeed.strategy:DeepSpeed",
        facts=StrategyFacts(shards_by_engine=True, needs_contiguous=True),
        implied_by=("deepspeed_config",),
        settings=("zero_stage", "offload"),
    ),
)
