"""`engine_options`: settings that one engine alone has, as text `name=value,name=value`; in Python and TOML a table.

An engine declares its own in `rules.py`, as the fields of a class `Options`, by `option` like every setting.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from phalanx.config.option import option, parse_text

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every engine: rarely changed, and accepted under their own names too."""

    start_timeout: float | None = option(
        None,
        "seconds until every rank must have started (default: timeout, and no limit for scripts)",
        above=0,
        scope="machine",
        keras="used",
    )
    stall_timeout: float | None = option(
        None, "with max_restarts: replace a rank that keeps the others waiting for this many seconds", above=0
    )
    stop_grace: float = option(
        4.5, "seconds between asking ranks to stop and killing them", above=0, scope="machine", keras="used"
    )
    preemption_margin: float = option(
        60.0, "save and leave with exit code 75 this many seconds before a Slurm job's time limit (0: never)", minimum=0
    )
    lora_dropout: float = option(0.0, "dropout before the adapters of LoRA", minimum=0)
    min_delta: float = option(
        0.0, "early_stopping: a smaller change than this is not an improvement", minimum=0, keras="ignored"
    )
    compression_warmup: int = option(0, "steps before compression begins", minimum=0)
    outer_learning_rate: float = option(0.7, "diloco: rate of the outer Nesterov step", above=0, strategies=("diloco",))
    outer_momentum: float = option(
        0.9, "diloco: momentum of the outer Nesterov step", minimum=0, strategies=("diloco",)
    )
    keep_every: int | None = option(None, "keep every checkpoint whose step is a multiple of this, for ever", minimum=1)
    memory_frequency: int = option(
        10,
        "fsdp with max_restarts: every n steps each rank keeps a copy of its shards in another rank's memory",
        minimum=1,
    )
    straggler_steps: int = option(50, "straggler_factor: compare the ranks' own times over this many steps", minimum=1)
    reference_throughput: float | None = option(
        None,
        "samples per second of one rank, as measured: the speedup of the run against it is reported",
        above=0,
        keras="ignored",
    )
    tensorboard_histograms: int = option(
        0,
        "write histograms of weights, gradients, norms, update ratios to TensorBoard every n epochs (0: never)",
        minimum=0,
    )
    bucket_cap_mb: float = option(25.0, "size of a gradient bucket in MB", above=0, keras="ignored")
    scaler_init_scale: float = option(65536.0, "first loss scale of fp16", above=0, keras="ignored")
    scaler_growth_interval: int = option(
        2000, "steps without overflow before the loss scale doubles", minimum=1, keras="ignored"
    )


OPTIONS: dict[str, Any] = CommonOptions.__dataclass_fields__


def as_text(given: Mapping[str, Any], prefix: str = "") -> str:
    """Return a table as text; a table in it becomes names with a dot, {"resources": {"GPU": 1}} resources.GPU=1."""
    parts = []
    for name, value in given.items():
        if isinstance(value, Mapping):
            parts.append(as_text(value, f"{prefix}{name}."))
        elif value is not None:
            plain = os.fspath(value) if isinstance(value, os.PathLike) else value
            parts.append(f"{prefix}{name}={str(plain).lower() if isinstance(plain, bool) else plain}")
    return ",".join(filter(None, parts))


def split_options(text: str | None) -> dict[str, str]:
    """Return the values by name, those of names with a dot together: {"resources": "GPU=0.5,big=1"}.

    ValueError for a part that is not name=value.
    """
    found: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in (text or "").split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ValueError(part)
        group, dot, inner = name.strip().partition(".")
        own = f"{inner}={value.strip()}" if dot else value.strip()
        found[group] = f"{found[group]},{own}" if dot and group in found else own
    return found


def join_options(text: str, later: str) -> str:
    """Return the options of both, of those with the same name the later."""
    pairs = {part.partition("=")[0].strip(): part.strip() for part in f"{text},{later}".split(",") if part.strip()}
    return ",".join(pairs.values())


def without_options(kind: type[Any], text: str) -> str:
    """Return the options that are not those of one engine."""
    own = kind.__dataclass_fields__
    return ",".join(part for part in text.split(",") if part.partition("=")[0].partition(".")[0].strip() not in own)


def read_options(kind: type[Options], text: str | None) -> Options:
    """Return the options of one engine, checked before; those of others are left out."""
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
    given = split_options(text)
    return kind(**{name: parse_text(field, given[name]) for name, field in fields.items() if name in given})
