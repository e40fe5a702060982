"""The trials of a search as a table, live and at the end; the best of them, and their files."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from phalanx.config.aliases import NAMES
from phalanx.config.distributed import toml_value
from phalanx.errors import SearchFailedError
from phalanx.observe import format
from phalanx.observe.guard import guarded_streams
from phalanx.tools.svg import brief
from phalanx.tools.tune.trainable import Trainable
from phalanx.tools.tune.trial import Objective, State, Trial

_MOST_ROWS = 20
_REFRESH_PER_SECOND = 4
_STYLES = {State.RUNNING: "cyan", State.FINISHED: "green", State.STOPPED: "yellow", State.FAILED: "red"}


def point_words(params: dict[str, Any]) -> str:
    """Return a point of the space on one line."""
    return ", ".join(f"{name} {brief(value)}" for name, value in params.items())


def columns(trials: Sequence[Trial], objective: Objective) -> tuple[list[str], list[list[str]]]:
    """Return the table's head and rows; hyperparameters that are the same in all trials are left out."""
    all_names = dict.fromkeys(name for trial in trials for name in trial.params)
    unset = object()
    names = [
        n for n in all_names if len({repr(trial.params.get(n, unset)) for trial in trials}) > 1 or len(trials) == 1
    ]
    head = ["trial", "state", "iteration", objective.metric, *names, "time"]
    return head, [
        [
            str(trial.number),
            str(trial.state),
            str(trial.iteration or ""),
            "" if (value := trial.value(objective)) is None else brief(value),
            *(brief(trial.params[name]) if name in trial.params else "" for name in names),
            format.duration(trial.seconds) if trial.seconds else "",
        ]
        for trial in trials
    ]


def ranked(trials: Sequence[Trial], objective: Objective) -> list[Trial]:
    """Return the trials from the best to the worst; those that finished come before those that were stopped."""
    order = {State.FINISHED: 0, State.STOPPED: 1}
    return sorted(trials, key=lambda t: (order.get(t.state, 2), -objective.goodness(t.value(objective)), t.number))


class SearchProgress:
    """How far a search is: trials done of all, the time that is left, and the best so far."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._began = time.monotonic()
        self._done_before = 0
        self._total = 0

    def begin(self, total: int, done: int = 0) -> None:
        """Set the number of trials; `done`: those of a resumed search that took no time now."""
        self._began, self._total, self._done_before = time.monotonic(), total, done

    def words(self, trials: Sequence[Trial]) -> str:
        """Return it in words: `3 of 10 done, 2 running, 0:41 left, best 0.93 (trial 2)`."""
        done = sum(trial.state.is_final for trial in trials)
        parts = [f"{done} of {self._total} done" if self._total else f"{done} done"]
        if running := sum(trial.state is State.RUNNING for trial in trials):
            parts.append(f"{running} running")
        here = done - self._done_before
        if self._total and here and done < self._total:
            seconds = (time.monotonic() - self._began) / here * (self._total - done)
            parts.append(f"about {format.duration(seconds)} left")
        best = next((t for t in ranked(trials, self._objective) if t.value(self._objective) is not None), None)
        if best is not None and best.state.is_final:
            parts.append(f"best {brief(best.value(self._objective))} (trial {best.number})")
        return ", ".join(parts)


class PlainTable:
    """Writes a line when a trial starts or ends."""

    def __init__(self, objective: Objective, out: TextIO | None = None) -> None:
        self._objective = objective
        self.progress = SearchProgress(objective)
        self._out, _ = guarded_streams(out)
        self._states: dict[int, State] = {}

    def show(self, trials: Sequence[Trial]) -> None:
        """Write the changes since the last call."""
        for trial in trials:
            before, self._states[trial.number] = self._states.get(trial.number), trial.state
            starts = before in (None, State.WAITING) and trial.state is State.RUNNING
            ends = trial.state.is_final and before is not trial.state
            if starts or ends:
                so_far = f" [{self.progress.words(trials)}]" if ends else ""
                self.notice(f"{time.strftime('%H:%M:%S')} {self._line(trial)}{so_far}")

    def _line(self, trial: Trial) -> str:
        if trial.state is State.RUNNING:
            return f"trial {trial.number} started: {point_words(trial.params)}"
        value = trial.value(self._objective)
        result = "" if value is None else f", {self._objective.metric} {brief(value)}"
        cause = f": {trial.cause}" if trial.cause else ""
        return f"trial {trial.number} {trial.state} at iteration {trial.iteration}{result}{cause}"

    def notice(self, text: str) -> None:
        """Write a line."""
        print(text, file=self._out, flush=True)

    def close(self, trials: Sequence[Trial]) -> None:
        """Write the whole table, the best first."""
        if trials:
            head, rows = columns(ranked(trials, self._objective), self._objective)
            self.notice("\n" + format.table([head, *rows]))


class LiveTable:
    """A table on the terminal that is redrawn in place."""

    def __init__(self, objective: Objective) -> None:
        from rich.console import Console
        from rich.live import Live

        self._objective = objective
        self.progress = SearchProgress(objective)
        self._terminal = Console(file=guarded_streams()[0], highlight=False, emoji=False)
        self._trials: Sequence[Trial] = ()
        self._live = Live(
            get_renderable=self._draw, console=self._terminal, refresh_per_second=_REFRESH_PER_SECOND, transient=True
        )
        self._live.start()

    def show(self, trials: Sequence[Trial]) -> None:
        """Set the trials that the refresh thread draws."""
        self._trials = tuple(trials)

    def notice(self, text: str) -> None:
        """Write a line above the table."""
        self._terminal.print(text, markup=False)

    def close(self, trials: Sequence[Trial]) -> None:
        """Leave the whole table on the screen, the best first."""
        self._live.stop()
        if trials:
            self._terminal.print(self._table(ranked(trials, self._objective)))

    def _draw(self) -> Any:
        """Return the running trials and the best of the rest, as many as fit on the screen."""
        rows = max(5, min(_MOST_ROWS, self._terminal.height - 6))
        active = [trial for trial in self._trials if trial.state is State.RUNNING]
        rest = [trial for trial in ranked(self._trials, self._objective) if trial.state is not State.RUNNING]
        trials = (active + rest)[:rows]
        return self._table(trials, self.progress.words(self._trials))

    def _table(self, trials: Sequence[Trial], caption: str | None = None) -> Any:
        from rich.table import Table
        from rich.text import Text

        head, rows = columns(trials, self._objective)
        table = Table(caption=caption, caption_justify="left")
        for name in head:  # where the terminal is narrow, values are shortened, not names
            table.add_column(name, min_width=min(len(name), 24), no_wrap=True, overflow="ellipsis")
        for trial, row in zip(trials, rows, strict=True):
            table.add_row(
                *(Text(cell, style=_STYLES.get(trial.state, "dim") if n == 1 else "") for n, cell in enumerate(row))
            )
        return table


def open_table(objective: Objective, *, progress: bool) -> PlainTable | LiveTable:
    """Return a live table for a terminal, else one of plain lines."""
    return LiveTable(objective) if progress and sys.stdout.isatty() else PlainTable(objective)


BEST_FILE = "best.toml"
TRIALS_FILE = "trials.json"


@dataclass(frozen=True)
class Results:
    """All trials of a search, and the best of them."""

    trials: tuple[Trial, ...]
    objective: Objective
    folder: Path

    @property
    def best(self) -> Trial:
        """The trial with the best metric at its end."""
        return ranked(self.trials, self.objective)[0]

    @property
    def best_params(self) -> dict[str, Any]:
        """Its hyperparameters."""
        return dict(self.best.params)

    @property
    def best_value(self) -> float:
        """Its metric."""
        value = self.best.value(self.objective)
        assert value is not None, "a trial without the metric is not the best"
        return value

    @property
    def failed(self) -> list[Trial]:
        """The trials that failed; `cause` says why."""
        return [trial for trial in self.trials if trial.state is State.FAILED]

    def to_dataframe(self) -> Any:
        """Return a pandas DataFrame with one row per trial."""
        import pandas as pd

        return pd.DataFrame([{**trial.to_dict(), **trial.params, **trial.last} for trial in self.trials])


def check_some_worked(trials: Sequence[Trial]) -> None:
    """Raise with the common cause when every trial failed."""
    if any(trial.state in (State.FINISHED, State.STOPPED) for trial in trials):
        return
    causes = Counter(trial.cause or "unknown cause" for trial in trials).most_common()
    cause, count = causes[0]
    share = "all" if count == len(trials) else f"{count} of {len(trials)}"
    others = f" (and {len(causes) - 1} other causes)" if len(causes) > 1 else ""
    raise SearchFailedError(
        f"all {len(trials)} trials failed; {share} of them: {cause}{others}",
        hint=f"The first one's logs: {trials[0].folder / 'logs'}",
    )


def write_trials(results: Results) -> Path:
    """Write every trial as JSON, for programs."""
    path = results.folder / TRIALS_FILE
    path.write_text(json.dumps([trial.to_dict() for trial in results.trials], indent=2, default=repr) + "\n")
    return path


def write_best(results: Results, subject: Trainable) -> Path:
    """Write the best trial's values: a recipe's as a recipe that `phalanx train` takes, others for --config."""
    best = results.best
    lines = [
        f"# The best of {len(results.trials)} trials: trial {best.number}, "
        f"{results.objective.metric} = {results.best_value:.6g} after {best.iteration} iterations."
    ]
    document = subject.document(best.params)
    tables = {name: values for name, values in document.items() if isinstance(values, dict)}
    lines += [f"{name} = {toml_value(value)}" for name, value in document.items() if name not in tables]
    for name, values in tables.items():
        if values:
            lines += ["", f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in values.items())]
    if not tables:
        of_program = {name: value for name, value in best.params.items() if name not in NAMES}
        lines += [
            f"# {name} = {json.dumps(value, default=repr)}  (an argument of the program)"
            for name, value in of_program.items()
        ]
    path = results.folder / BEST_FILE
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
