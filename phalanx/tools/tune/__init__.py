"""Hyperparameter search: parallel trials with early stopping.

`DistributedTuner` and `phalanx tune` search; `choice`, `uniform` and the other words say where; `report` and
`checkpoint_dir` are for functions and scripts inside a trial. Names are imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy import lazy_names
from phalanx.tools.tune.domains import (
    choice,
    lograndint,
    loguniform,
    qlograndint,
    qloguniform,
    qrandint,
    quniform,
    randint,
    uniform,
)

if TYPE_CHECKING:
    from phalanx.tools.tune.results import Results
    from phalanx.tools.tune.space import SearchSpace
    from phalanx.tools.tune.trial import checkpoint_dir, report
    from phalanx.tools.tune.tuner import DistributedTuner


__all__ = [
    "DistributedTuner",
    "Results",
    "SearchSpace",
    "checkpoint_dir",
    "choice",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "quniform",
    "randint",
    "report",
    "uniform",
]

_NAMES = {
    ".results": "Results",
    ".space": "SearchSpace",
    ".trial": "checkpoint_dir report",
    ".tuner": "DistributedTuner",
}
__getattr__ = lazy_names(__name__, _NAMES)
