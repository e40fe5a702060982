"""The planner's constants, fitted to published measurements again: with all rows, and with each group left out in turn.

A group that was left out is predicted with the constants of the others: its error says how the planner does on rows
that it has not seen. The constants are those of a GPU type and of the kernels' structure; none belongs to a model.
"""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from published import Row, published

from phalanx.tools.plan import kernels, presets, timing
from phalanx.tools.plan.cluster import collective_seconds
from phalanx.tools.plan.estimator import Estimator

GPUS = {"a100": ("a100-40", "a100-80"), "h100": ("h100",)}
SHARES = ("matmul", "bandwidth", "attention")
BOUNDS = {
    **{f"{gpu} {share}": (0.15, 0.95) for gpu in GPUS for share in SHARES},
    "fp8": (0.4, 1.0),
    "backward traffic": (1.8, 3.0),
    "flash backward": (0.4, 0.9),
    "hidden": (0.0, 0.95),
    "cross entropy": (8.0, 26.0),
}


def current() -> list[float]:
    """Return the constants as they are."""
    shares = [getattr(presets.gpu(names[0]), share) for names in GPUS.values() for share in SHARES]
    others = (kernels.FP8, kernels.BACKWARD_TRAFFIC, kernels.FLASH_BACKWARD[1], timing.HIDDEN, kernels.CROSS_ENTROPY[0])
    return [*shares, *others]


def predict(rows: list[Row], values: list[float]) -> list[float]:
    """Return the step times with these constants."""
    shares, (fp8, backward, flash, hidden, entropy) = values[:6], values[6:]
    kernels.FP8, kernels.BACKWARD_TRAFFIC, kernels.FLASH_BACKWARD = fp8, backward, (2.5, flash)
    kernels.CROSS_ENTROPY, timing.HIDDEN = (entropy, 0.71 * entropy), hidden
    for cached in (kernels.layer_passes, kernels.head_passes, collective_seconds):
        cached.cache_clear()
    devices = {}
    for index, names in enumerate(GPUS.values()):
        fitted = dict(zip(SHARES, shares[3 * index : 3 * index + 3], strict=True))
        devices |= {name: replace(presets.gpu(name), **fitted) for name in names}
    found = []
    for row in rows:
        cluster = replace(row.cluster, gpu=devices[str(row.cluster.gpu)])
        found.append(Estimator(row.model, cluster, row.goal).time(row.layout).seconds)
    return found


def fit(rows: list[Row]) -> list[float]:
    """Return the constants with the smallest errors; rows that are far off count less, those of Megatron more."""
    weights = [1.7 if row.source in ("megatron", "recomputation") else 1.0 for row in rows]

    def errors(values: list[float]) -> list[float]:
        pairs = zip(predict(rows, values), rows, weights, strict=True)
        return [weight * math.log(seconds / row.seconds) for seconds, row, weight in pairs]

    low, high = zip(*BOUNDS.values(), strict=True)
    scale = [b - a for a, b in zip(low, high, strict=True)]
    options = {"loss": "soft_l1", "f_scale": 0.04, "diff_step": 1e-3, "max_nfev": 15}
    return list(least_squares(errors, current(), bounds=(low, high), x_scale=scale, **options).x)


def main() -> int:
    rows = published()
    every = fit(rows)
    print("fitted to all rows: " + ", ".join(f"{name} {value:.3f}" for name, value in zip(BOUNDS, every, strict=True)))
    ratios: list[float] = []
    for source in dict.fromkeys(row.source for row in rows):
        others, left = ([r for r in rows if (r.source == source) == out] for out in (False, True))
        found = predict(left, fit(others))
        off = [seconds / row.seconds - 1 for seconds, row in zip(found, left, strict=True)]
        ratios += [row.seconds / seconds for seconds, row in zip(found, left, strict=True)]
        mean, worst = statistics.fmean(map(abs, off)), max(off, key=abs)
        print(f"left out: {source:<18} {len(left):>3} rows  mean {mean:.1%}  worst {worst:+.1%}", flush=True)
    mean = statistics.fmean(abs(1 / ratio - 1) for ratio in ratios)
    twentieths = statistics.quantiles(ratios, n=20)
    print(
        f"left out: all {len(ratios)} rows, mean {mean:.1%}; nine of ten took between {twentieths[0]:.3f} and "
        f"{twentieths[-1]:.3f} times the predicted seconds"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
