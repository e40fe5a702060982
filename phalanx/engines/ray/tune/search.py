"""Search by Optuna on Ray: Ray Tune requests one trial after the other from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.tune.search import Searcher

from phalanx.engines.ray.tune.record import NUMBER, write_point
from phalanx.engines.ray.tune.trial import Work
from phalanx.tools.tune.suggest import make_search
from phalanx.tools.tune.trial import Trial


class LearntPoints(Searcher):
    """Gives the trials their points. It keeps nothing itself: points and endings are in the study's folder."""

    def __init__(self, work: Work, numbers: Sequence[int], at_once: int | None) -> None:
        """`numbers`: the trials to run; `at_once`: how many run side by side, where it is known beforehand."""
        super().__init__(metric=work.objective.metric, mode=work.objective.mode)
        self._work, self._numbers, self._at_once = work, list(numbers), at_once

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Return the next trial, or None while those that it learns from have not ended."""
        number = self._numbers[0]
        if not self._work.point(number):
            known = self._known(number)
            if known is None:
                return None
            seed = self._work.subject.resolved.config.seed
            method = make_search("optuna", self._work.space, seed, self._work.objective)
            write_point(self._work.folder, number, self._work.space, method.point(number, known))
        del self._numbers[0]
        return {NUMBER: number}

    def _known(self, number: int) -> list[Trial] | None:
        """Return the trials to learn from: those that are sure to have ended, else those that happen to have."""
        if self._at_once is None:
            trials = [self._work.trial(other) for other in range(number)]
            return [trial for trial in trials if trial.state.is_final]
        known = [self._work.trial(other) for other in range(number - self._at_once + 1)]
        return known if all(trial.state.is_final for trial in known) else None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Do nothing: the trial's folder has the result."""

    def save(self, checkpoint_path: str) -> None:
        """Create the file that Ray expects."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing: a resumed search makes a new searcher."""
