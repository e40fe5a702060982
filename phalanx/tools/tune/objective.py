"""The objective of a search: a metric by name, and whether more or less of it is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from phalanx.errors import UsageError, nearest

_MORE_IS_BETTER = ("accuracy", "acc", "auc", "f1", "score", "reward", "bleu", "precision", "recall")
_LESS_IS_BETTER = ("loss", "error", "mse", "mae", "rmse", "perplexity", "ppl", "seconds", "time")


DEFAULT_METRIC = "loss"


@dataclass
class Objective:
    """The metric that is compared; `mode` is "min" or "max"."""

    metric: str
    mode: str
    is_open: bool = False
    """Whether the metric was not named: then it is the only one that a function returns."""

    @classmethod
    def of(cls, metric: str | None, mode: str | None = None) -> Objective:
        """Return the objective; for a well-known metric the mode may be left out."""
        is_open, metric = metric is None, metric or DEFAULT_METRIC
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
        return cls(metric, mode, is_open)

    def settle(self, returned: Iterable[str], mode: str | None = None) -> bool:
        """Where no metric was named, use the only one that a function returned; return whether it is another one."""
        names, was_open = list(returned), self.is_open
        if not names:
            return False
        self.is_open = False
        if not was_open or len(names) > 1 or names[0] == self.metric:
            return False
        found = Objective.of(names[0], mode)
        self.metric, self.mode = found.metric, found.mode
        return True

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Return the metric's value, or None where it was not measured; `accuracy` finds `val/accuracy`."""
        for name in (self.metric, f"val/{self.metric}"):
            if name in metrics:
                return float(metrics[name])
        return None

    def goodness(self, value: float | None) -> float:
        """Return a number that is larger for a better value; a value that is not finite is the worst."""
        if value is None or not math.isfinite(value):
            return -math.inf
        return value if self.mode == "max" else -value

    def missing(self, found: Iterable[str], who: str) -> UsageError:
        """Return the error for a trial without the metric; it lists what was reported."""
        names = sorted(set(found))
        if not names:
            return UsageError(
                f"{who} reported no '{self.metric}', nor anything else",
                hint="Return it from train_fn, call phalanx.tune.report(...), or train with a validation set.",
            )
        close = nearest(self.metric, names)
        guess = f" Did you mean '{close}'?" if close else ""
        return UsageError(f"{who} reported no '{self.metric}'.{guess} It reported: {', '.join(names)}.")
