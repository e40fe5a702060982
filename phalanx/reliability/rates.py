"""How often jobs fail: rates per GPU, and what was published about large clusters."""

from __future__ import annotations

import math
from dataclasses import dataclass

DAY = 86400.0
HOUR = 3600.0
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class FailureRate:
    """Mean times to failure by job size, as points (GPUs, seconds).

    Between two points the curve is a straight line of logarithms; outside of them the time is inverse to the number of
    GPUs, as it is for GPUs that fail independently of each other.
    """

    points: tuple[tuple[int, float], ...]
    source: str = ""

    @classmethod
    def per_gpu_day(cls, failures: float, source: str = "") -> FailureRate:
        """Return the rate of GPUs that fail independently, this often per day."""
        return cls(((1, DAY / failures),), source)

    @classmethod
    def observed(cls, failures: float, days: float, gpus: int, source: str = "") -> FailureRate:
        """Return the rate of a job on `gpus` GPUs that was interrupted `failures` times in `days` days."""
        return cls.per_gpu_day(failures / days / gpus, source)

    def mtbf(self, gpus: int) -> float:
        """Return the mean time between failures of a job on this many GPUs, in seconds."""
        first, last = self.points[0], self.points[-1]
        for (fewer, slow), (more, fast) in zip(self.points, self.points[1:], strict=False):
            if fewer <= gpus <= more:
                share = math.log(gpus / fewer) / math.log(more / fewer)
                return slow * math.exp(share * math.log(fast / slow))
        near = first if gpus < first[0] else last
        return near[1] * near[0] / gpus


def _per_node_day(failures_per_thousand: float, source: str) -> FailureRate:
    return FailureRate.per_gpu_day(failures_per_thousand / 1000 / GPUS_PER_NODE, source)


_KOKOLIS = "Kokolis et al., Revisiting Reliability in Large-Scale ML Research Clusters, HPCA 2025"

PRESETS = {
    "llama-3": FailureRate.observed(
        419, 54, 16384, "419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd of Models, table 5)"
    ),
    # One rate does not give both times: 6.50 failures per thousand days of a node of 8 GPUs would be 28.8 h at 1,024.
    "rsc-1": FailureRate(
        ((8, 47.7 * DAY), (1024, 7.9 * HOUR), (16384, DAY / (16384 / GPUS_PER_NODE * 6.50 / 1000))),
        f"RSC-1: 47.7 days at 8 GPUs and 7.9 h at 1,024, as measured; from 16,384 on their projection with 6.50 "
        f"failures per thousand node-days ({_KOKOLIS})",
    ),
    "rsc-1-nodes": _per_node_day(6.50, f"RSC-1: 6.50 failures per thousand node-days at every size ({_KOKOLIS})"),
    "rsc-2-nodes": _per_node_day(2.34, f"RSC-2: 2.34 failures per thousand node-days at every size ({_KOKOLIS})"),
}
"""Published failure rates by name."""
