"""The backends in one table: each is a name for a launcher and a strategy, with what an engine brings. No torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from phalanx.config.rows import Backend

DEFAULT_STRATEGY = "ddp"
ENGINES = ("deepspeed", "horovod", "ray", "tensorflow")
"""The folders of the engines of this package."""


def declaration(engine: str) -> Any:
    """Return what an engine of this package declares: `BACKEND` and `STRATEGIES`."""
    return import_module(f"phalanx.engines.{engine}.declaration")


BACKENDS = {
    "pytorch-ddp": Backend("local", DEFAULT_STRATEGY, replaces_ranks=True),
    "pytorch-fsdp": Backend("local", "fsdp", replaces_ranks=True),
    **{name: declaration(name).BACKEND for name in ENGINES},
}
