"""Data for every rank: re-sharded, resumable loaders of the user's data sets. Heavy imports wait until used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy import lazy_names

if TYPE_CHECKING:
    from phalanx.data.device import to_device
    from phalanx.data.fetch import GatherDataset
    from phalanx.data.hints import LoaderHints
    from phalanx.data.loader import ShardedLoader, shard_loader
    from phalanx.data.order import MicroInfo, epoch_order

__all__ = [
    "GatherDataset",
    "LoaderHints",
    "MicroInfo",
    "ShardedLoader",
    "epoch_order",
    "shard_loader",
    "to_device",
]

_NAMES = {
    ".device": "to_device",
    ".fetch": "GatherDataset",
    ".hints": "LoaderHints",
    ".loader": "ShardedLoader shard_loader",
    ".order": "MicroInfo epoch_order",
}
__getattr__ = lazy_names(__name__, _NAMES)
