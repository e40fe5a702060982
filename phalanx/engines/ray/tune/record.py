"""Files of trials on Ray in the study's folder, which all machines see: their points, and how they ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.host.files import replace_file
from phalanx.tools.tune.space import SearchSpace
from phalanx.tools.tune.suggest import stored
from phalanx.tools.tune.trial import State, Trial

NUMBER = "number"
"""The trial's number in Ray's config, where the trial is not a member of a population."""

_ENDING, _ENDED, _POINT = "ending", "ended", "point.json"


def folder_of(folder: str, number: int) -> Path:
    """Return the folder of a trial."""
    return Path(folder) / "trials" / f"{number:04d}"


def number_of(trial_id: str, config: dict[str, Any]) -> int:
    """Return a trial's number. A member of a population takes over others' configs: its number is in its name."""
    return int(config[NUMBER]) if NUMBER in config else int(trial_id.rsplit("_", 1)[1])


def note_end(trial: Trial) -> None:
    """Write, in the trial's worker, how it ended; it counts once Ray reports the end too (`mark_ended`)."""
    end = {"state": trial.state, "stopped_at": trial.stopped_at, "cause": trial.cause, "seconds": trial.seconds}
    _write(trial.folder / _ENDING, end)


def forget_end(trial: Trial) -> None:
    """Remove what an interrupted worker wrote while it was being killed."""
    (trial.folder / _ENDING).unlink(missing_ok=True)


def mark_ended(folder: Path) -> None:
    """Mark the trial as ended; one without this mark is unfinished."""
    if (folder / _ENDING).exists():
        (folder / _ENDING).replace(folder / _ENDED)


def read_up(trial: Trial) -> None:
    """Read a trial's reports and its end: the mark first, because then all its reports have been written."""
    mark = trial.folder / _ENDED
    end = json.loads(mark.read_text()) if not trial.state.is_final and mark.exists() else None
    trial.read_events()
    if end is None:
        return
    trial.state, trial.cause, trial.seconds = State(end["state"]), end["cause"], end["seconds"]
    if end["stopped_at"] is not None:
        trial.end_after(end["stopped_at"])


def write_point(folder: str, number: int, space: SearchSpace, point: dict[str, Any]) -> None:
    """Store a suggested point, so that an interrupted trial continues with it."""
    values = {name: stored(domain, point[name]) for name, domain in space.domains.items() if name in point}
    _write(folder_of(folder, number) / _POINT, values)


def read_point(folder: str, number: int, space: SearchSpace) -> dict[str, Any] | None:
    """Return a stored point, or None."""
    path = folder_of(folder, number) / _POINT
    if not path.exists():
        return None
    values = json.loads(path.read_text())

    def restored(name: str, domain: Any) -> Any:
        if domain.kind != "choice":
            return domain.snap(values[name])
        return next(one for one in domain.arguments if stored(domain, one) == values[name])

    return space.visit(restored)


def marking_callback(folder: str) -> Any:
    """Return Ray's callback that marks trials as ended. Ray does not call it for those that an interruption stops."""
    from ray.tune import Callback

    class Mark(Callback):
        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            mark_ended(folder_of(folder, number_of(trial.trial_id, trial.config)))

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            number = number_of(trial.trial_id, trial.config)
            lines = [line.strip() for line in str(trial.get_error() or "").splitlines() if line.strip()]
            cause = lines[-1] if lines else "its worker ended without an error message"
            ours = Trial(number, {}, folder_of(folder, number), State.FAILED, cause=cause)
            if not (ours.folder / _ENDING).exists():  # its worker died
                note_end(ours)
            mark_ended(ours.folder)

    return Mark()


def _write(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(values))
