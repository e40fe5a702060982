"""What a search is for: a metric by name, and whether more or less of it is better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.errors import UsageError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MORE_IS_BETTER = ("accuracy", "acc", "auc", "f1", "score", "reward", "bleu", "precision", "recall")
_LESS_IS_BETTER = ("loss", "error", "mse", "mae", "rmse", "perplexity", "ppl", "seconds", "time")


@dataclass(frozen=True)
class Objective:
    """The metric that is compared; `mode` is "min" or "max"."""

    metric: str
    mode: str

    @classmethod
    def of(cls, metric: str, mode: str | None = None) -> Objective:
        """Return the objective; a metric whose name tells needs no mode."""
        if mode is None:
            words = metric.lower().replace("/", " ").replace("_", " ").split()
            if any(word in _MORE_IS_BETTER for word in words):
                mode = "max"
            elif any(word in _LESS_IS_BETTER for word in words):
                mode = "min"
            else:
                raise UsageError(
                    f"whether more or less of '{metric}' is better is not known",
                    hint="Write mode='min' or 'max' (--mode).",
                )
        if mode not in ("min", "max"):
            raise UsageError(f"mode = {mode!r}: not one of 'min', 'max'.")
        return cls(metric, mode)

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Return the metric's value, or None where it was not measured; `accuracy` finds `val/accuracy`."""
        for name in (self.metric, f"val/{self.metric}"):
            if name in metrics:
                return float(metrics[name])
        return None

    def goodness(self, value: float | None) -> float:
        """Return a number that is larger for the better; what is not finite is the worst."""
        if value is None or not math.isfinite(value):
            return -math.inf
        return value if self.mode == "max" else -value

    def is_better(self, value: float, other: float) -> bool:
        """Whether one value is better than another."""
        return self.goodness(value) > self.goodness(other)

    def missing(self, found: Iterable[str], who: str) -> UsageError:
        """Return the error for a trial that has not measured it; it lists what was."""
        names = sorted(set(found))
        if not names:
            return UsageError(
                f"{who} reported no '{self.metric}', nor anything else",
                hint="Return it from train_fn, call phalanx.tune.report(...), or train with a validation set.",
            )
        close = nearest(self.metric, names)
        guess = f" Did you mean '{close}'?" if close else ""
        return UsageError(f"{who} reported no '{self.metric}'.{guess} It reported: {', '.join(names)}.")
