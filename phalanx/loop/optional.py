"""Parts of the loop that a setting or a call switches on; each is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy import lazy_names

if TYPE_CHECKING:
    from phalanx.loop.ema import WeightAverage
    from phalanx.loop.gather import gather, gather_samples
    from phalanx.loop.large_batch import LAMB, LARS
    from phalanx.loop.last_finite import LastFinite
    from phalanx.loop.preemption import StopNotices
    from phalanx.loop.recorders import open_sinks, own_run_dir
    from phalanx.loop.reporting import Reporter
    from phalanx.loop.sync_norm import NormRanks, synchronise
    from phalanx.loop.tuning_trial import EpochControl

__all__ = [
    "LAMB",
    "LARS",
    "EpochControl",
    "LastFinite",
    "NormRanks",
    "Reporter",
    "StopNotices",
    "WeightAverage",
    "gather",
    "gather_samples",
    "open_sinks",
    "own_run_dir",
    "synchronise",
]

_NAMES = {
    "phalanx.loop.ema": "WeightAverage",
    "phalanx.loop.gather": "gather gather_samples",
    "phalanx.loop.large_batch": "LAMB LARS",
    "phalanx.loop.last_finite": "LastFinite",
    "phalanx.loop.preemption": "StopNotices",
    "phalanx.loop.recorders": "open_sinks own_run_dir",
    "phalanx.loop.reporting": "Reporter",
    "phalanx.loop.sync_norm": "NormRanks synchronise",
    "phalanx.loop.tuning_trial": "EpochControl",
}
__getattr__ = lazy_names(__name__, _NAMES)
