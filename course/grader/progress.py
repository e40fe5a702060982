"""What a learner has done: the file in the folder, and the table of points. Nothing here loads torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grader.catalog import ALL, Listed, Phase, listed

PROGRESS = ".course-progress.json"


def read_progress(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the learner has done, by exercise: tries, points, hints shown, the last message."""
    file = folder / PROGRESS
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SystemExit(f"{file} is not JSON ({error}): mend or remove it") from None
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise SystemExit(f"{file} is not a record of progress: remove it")
    return found


def note_progress(folder: Path, name: str, **facts: Any) -> None:
    """Keep facts about an exercise; the file is there whole or as before."""
    progress = read_progress(folder)
    progress[name] = {**progress.get(name, {}), **facts}
    unfinished = folder / f"{PROGRESS}.unfinished"
    unfinished.write_text(json.dumps(progress, indent=1) + "\n")
    unfinished.replace(folder / PROGRESS)


def table(phases: Iterable[Phase], progress: dict[str, dict[str, Any]]) -> list[str]:
    """Return the table of points by phase."""
    rows = []
    for phase in phases:
        exercises = listed(phase)
        earned = [progress.get(exercise.name, {}).get("points", 0) for exercise in exercises]
        done = sum(points > 0 for points in earned)
        all_points = sum(exercise.points for exercise in exercises)
        rows.append(
            f"{phase.name:<10}  {phase.title:<46} {done:>2} of {len(exercises):>2} exercises"
            f"  {sum(earned):>3} of {all_points:>3} points"
        )
    return rows


def names(phase: Phase) -> list[str]:
    """Return the names of the exercises of a phase."""
    return [exercise.name for exercise in listed(phase)]


def find(name: str) -> tuple[Phase, Listed] | None:
    """Return an exercise of this name, and its phase."""
    return next(((phase, each) for phase in ALL for each in listed(phase) if each.name == name), None)
