"""Metrics that decide: which checkpoint is the best, and when training no longer improves."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from phalanx.checkpoint import collectives
from phalanx.config import DistributedConfig
from phalanx.config.settings import WatchedMetric, parse_metric
from phalanx.errors import UsageError, unknown_name
from phalanx.observe.best_mark import Best, mark_best, read_mark
from phalanx.observe.history import History


class MetricWatch:
    """The best value of a metric so far, and how many evaluations came since.

    Metrics are equal on all ranks, so every rank comes to the same decision.
    """

    def __init__(
        self, setting: str, watched: WatchedMetric, *, min_delta: float = 0.0, any_metric: bool = False
    ) -> None:
        """`any_metric`: where the metric is not measured, watch another one instead of raising."""
        self._setting = setting
        self._min_delta = min_delta
        self._any_metric = any_metric
        self._setting_metric = self.watched = watched
        self.value: float | None = None
        self.step: int | None = None
        self.since = 0
        self._judged: int | None = None
        """The step of the last evaluation: one that is repeated, such as after a lost rank, counts once."""

    def judge(self, values: Mapping[str, float], step: int) -> bool | None:
        """Return whether these values are the best so far; None where the metric belongs to another split."""
        if not any(name.partition("/")[0] == self.watched.name.partition("/")[0] for name in values):
            return None
        if self.watched.name not in values and self.watched.is_logged:
            return None  # another value of the same family
        if self.watched.name not in values and not self._watch_another(values):
            return None
        value = values[self.watched.name]
        counts, self._judged = self._judged not in (None, step), step  # nothing came before the first one
        if not self._is_better(value):
            self.since += counts
            return False
        self.value, self.step, self.since = value, step, 0
        return True

    def _watch_another(self, values: Mapping[str, float]) -> bool:
        if not self._any_metric:
            name = self.watched.name
            raise UsageError(f"{self._setting}: {unknown_name('metric', name, values)}")
        for name in values:
            try:
                self.watched = parse_metric(name)
            except ValueError:
                continue  # its name does not say what is better
            return True
        return False

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.value is None:
            return True
        gain = self.value - value if self.watched.mode == "min" else value - self.value
        return gain > self._min_delta

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        state = {"asked": list(self._setting_metric), "watched": list(self.watched)}
        return {**state, "value": self.value, "step": self.step, "since": self.since, "judged": self._judged}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> bool:
        """Continue after a resumption; a run that watches another metric begins anew."""
        if state is None or WatchedMetric(*state["asked"]) != self._setting_metric:
            return False
        self.watched = WatchedMetric(*state["watched"])
        self.value, self.step, self.since = state["value"], state["step"], state["since"]
        self._judged = state["judged"]
        return True


class BestCheckpoint:
    """Decides which checkpoint `keep_best` keeps, and marks it on disk."""

    def __init__(self, config: DistributedConfig) -> None:
        watched = config.best_metric
        default = config.keep_best is True
        self._watch = None if watched is None else MetricWatch("keep_best", watched, any_metric=default)
        self.path: Path | None = None
        self._marked: Path | None = None

    def is_unsaved(self, step: int) -> bool:
        """Whether the weights after this step are the best so far, and in no checkpoint yet."""
        return self._watch is not None and self._watch.step == step and self.path is None

    def judge(self, values: Mapping[str, float], step: int) -> None:
        """Take the values of an evaluation."""
        if self._watch is not None and self._watch.judge(values, step):
            self.path = None

    def saved(self, path: Path, step: int) -> bool:
        """Mark a checkpoint of this step if its weights are the best so far; return whether they are."""
        if self._watch is None or self._watch.value is None or not self.is_unsaved(step):
            return False
        self.path = path
        watched = self._watch.watched
        best = Best(path, step, watched.name, watched.mode, self._watch.value)
        collectives.from_rank_zero(lambda: mark_best(best, self._marked))
        self._marked = path
        return True

    def record(self, history: History) -> None:
        """Write the best value so far into the history."""
        if self._watch is None or self._watch.step is None:
            return
        history.best_metric = self._watch.watched.name
        history.best_value, history.best_step = self._watch.value, self._watch.step
        history.best_checkpoint = None if self.path is None else str(self.path)

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a checkpoint holds; the path is None where this checkpoint is the best itself."""
        if self._watch is None:
            return None
        return {**self._watch.state_dict(), "path": None if self.path is None else str(self.path)}

    @property
    def step(self) -> int | None:
        """The step of the best value so far."""
        return None if self._watch is None else self._watch.step

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue with the best value after a resumption; return whether there is one. `find` takes its checkpoint."""
        return self._watch is not None and self._watch.load_state_dict(state) and self._watch.step is not None

    def find(self, path: Path | None) -> str:
        """Take the checkpoint of the best value; return a note where it does not exist. All ranks call this."""
        assert self._watch is not None, "loaded before"
        assert self._watch.step is not None, "loaded before"
        if path is not None and collectives.from_rank_zero(path.is_dir):
            if collectives.from_rank_zero(lambda: read_mark(path) is None):
                self.saved(path, self._watch.step)  # the run ended after it was saved, before it was marked
            self.path = self._marked = path  # the next best one takes the mark over
            return ""
        step, self._watch.value, self._watch.step = self._watch.step, None, None
        name = f"of step {step}" if path is None else str(path)
        return f"the best checkpoint, {name}, does not exist any more: the next evaluation is the best so far"


def check_metrics(config: DistributedConfig, *, has_val: bool, names: Collection[str] | None = None) -> None:
    """Raise for a metric of the validation data without such data, and for one that is not among the `names` ones."""
    best, stopping = config.best_metric, config.stopping_metric
    for setting, watched in (("keep_best", best), ("early_stopping", stopping), ("load_best_at_end", best)):
        chosen = getattr(config, setting)
        if not (isinstance(chosen, str) or (chosen and setting == "load_best_at_end")) or watched is None:
            continue
        if watched.name.startswith("val/") and not has_val:
            metric = "keep_best" if chosen is True else setting
            raise UsageError(
                f"{setting} = {chosen!r}, but there is no validation data",
                hint=f"Give fit(train, val), or write {metric}='train/loss'.",
            )
        if names is not None and watched.name not in names and chosen is not True and not watched.is_logged:
            name = watched.name.removeprefix("val/")
            raise UsageError(
                f"{setting}: {unknown_name('metric', watched.name, names)}",
                hint=f"For a value that you log: log it as '{name}', and write {setting}='{watched.mode}:{name}'.",
            )
