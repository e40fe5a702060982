"""Ray's callback that shows the trials in the table. Ray pickles callbacks, but a table, with its terminal, stays."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.engines.ray.tune.record import number_of
from phalanx.engines.ray.tune.trial import ENDED, ITERATION, Work
from phalanx.tools.tune.table import LiveTable, PlainTable
from phalanx.tools.tune.trial import State, Trial

_open: dict[str, PlainTable | LiveTable] = {}
"""The tables of running searches by folder, for callbacks that were pickled."""


@contextmanager
def shown_on(table: PlainTable | LiveTable, work: Work) -> Iterator[None]:
    """Show on this table what the search's callback receives, also that of a resumed search."""
    _open[work.folder] = table
    try:
        yield
    finally:
        del _open[work.folder]


def table_of(work: Work) -> PlainTable | LiveTable:
    """Return the search's table; a callback that runs in a process of Ray's writes plain lines."""
    if work.folder not in _open:
        _open[work.folder] = PlainTable(work.objective)
    return _open[work.folder]


def show_callback(work: Work) -> Any:
    """Return Ray's callback that updates the table."""
    from ray.tune import Callback

    class Show(Callback):
        def __init__(self) -> None:
            self._trials: dict[int, Trial] = {}

        def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            self._update(trial, State.RUNNING)

        def on_trial_result(
            self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
        ) -> None:
            self._update(trial, State.RUNNING, result)

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            self._update(trial, State.FINISHED if trial.last_result.get(ENDED) else State.STOPPED)

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            self._update(trial, State.FAILED)

        def _update(self, rays: Any, state: State, result: dict[str, Any] | None = None) -> None:
            number = number_of(rays.trial_id, rays.config)
            ours = self._trials.setdefault(number, Trial(number, {}, Path()))
            ours.params, ours.state = work.params(rays.config), state
            if result is not None:
                ours.reports[result[ITERATION]] = numbers_in(result)
                ours.seconds = result.get("time_total_s", 0.0)
            table_of(work).show([self._trials[number] for number in sorted(self._trials)])

    return Show()


def numbers_in(row: dict[str, Any]) -> dict[str, float]:
    """Return what was measured, without Ray's own bookkeeping."""
    own = {ITERATION, ENDED, "steps", "timestamp", "pid", "done", "should_checkpoint"}
    plain = {name: value for name, value in row.items() if isinstance(value, (int, float)) and name not in own}
    rays = re.compile(r"^(time_|training_iteration|iterations_since|timesteps|episodes|config/|checkpoint)")
    return {name: float(v) for name, v in plain.items() if not rays.match(name) and not math.isnan(v)}
