"""Data for every rank: re-sharded, resumable loaders and the built-in data sets. Heavy imports wait until used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.data.device import to_device
    from phalanx.data.fetch import GatherDataset
    from phalanx.data.loader import ShardedLoader, shard_loader
    from phalanx.data.order import MicroInfo, epoch_order
    from phalanx.data.sets import load, names

__all__ = ["GatherDataset", "MicroInfo", "ShardedLoader", "epoch_order", "load", "names", "shard_loader", "to_device"]

_HOMES = {
    "GatherDataset": "fetch",
    "MicroInfo": "order",
    "ShardedLoader": "loader",
    "epoch_order": "order",
    "load": "sets",
    "names": "sets",
    "shard_loader": "loader",
    "to_device": "device",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
