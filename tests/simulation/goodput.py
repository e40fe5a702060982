"""The share of the time that makes progress: the planner's formula beside histories of failures drawn one by one.

    python -m tests.simulation.goodput --recovery 4.7

The rate of failures is Llama 3's. A failure ends a step, a checkpoint or another recovery; what it costs is a restart
from the last checkpoint, or a recovery in place with the seconds that `tests.simulation.scale` measures.
"""

from __future__ import annotations

import argparse
import random
import sys

from phalanx.reliability import PRESETS, Process, best_interval

_CHECKPOINT, _RESTART, _STEP = 10.0, 300.0, 10.0
_FAILURES = 20_000


def drawn(process: Process, seed: int) -> float:
    """Return the productive share of a history of many failures."""
    rng = random.Random(seed)
    cycle = process.interval + process.checkpoint_cost
    elapsed = productive = since = 0.0
    """`since`: the time of the present cycle that counts, for a recovery that keeps it."""
    failures = 0
    while failures < _FAILURES:
        failures += 1
        up = rng.expovariate(1 / process.mtbf)
        elapsed += up
        if process.lost is None:
            productive += up // cycle * process.interval
        else:
            whole, since = divmod(max(since + up - process.lost, 0.0), cycle)
            productive += whole * process.interval
        while (next_failure := rng.expovariate(1 / process.mtbf)) < process.recovery:  # it begins again
            failures += 1
            elapsed += next_failure
        elapsed += process.recovery
    return productive / elapsed


def main() -> int:
    """Print both for two sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recovery", type=float, nargs="+", default=[4.7], help="seconds of a recovery in place")
    arguments = parser.parse_args()
    for gpus in (1024, 16384):
        mtbf = PRESETS["llama-3"].mtbf(gpus)
        interval = best_interval(_CHECKPOINT, mtbf)
        ways = {"restart from a checkpoint": Process(mtbf, _CHECKPOINT, interval, _RESTART)}
        for seconds in arguments.recovery:
            ways[f"in place in {seconds:g} s"] = Process(mtbf, _CHECKPOINT, interval, seconds, lost=_STEP)
        for name, process in ways.items():
            formula, history = process.expected()["productive"], drawn(process, gpus)
            print(f"{gpus} GPUs, {name}: formula {100 * formula:.2f}%, {_FAILURES} failures drawn {100 * history:.2f}%")
    return 0


if __name__ == "__main__":
    sys.exit(main())
