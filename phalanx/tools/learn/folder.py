"""The course and a learner's folder: where they are, what is copied, what is graded, what was done.

The course is plain files (`course/` of the repository, `phalanx/_course` of an installed package). Its graders are a
separate package, `grader`, that does not depend on Phalanx: `python test_phase1.py` runs them as well.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError, unknown_name

DEFAULT_FOLDER = "phalanx-course"
"""Where `start` copies templates to, below the current folder."""


def course_folder() -> Path:
    """Return the folder of the course; raise where it was not installed."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "_course", package.parent / "course"):
        if (folder / "grader").is_dir():
            return folder
    raise UsageError("the files of the course are not installed", hint="Install phalanx from a wheel, or clone it.")


def grader(module: str) -> Any:
    """Return a module of the graders."""
    path = str(course_folder())
    if path not in sys.path:
        sys.path.insert(0, path)
    return import_module(f"grader.{module}")


def phases() -> Any:
    """Return the phases of the course, and the labs and the assessment of module 202."""
    return grader("catalog").ALL


def phase_of(word: str) -> Any:
    """Return a phase by its name, its number or its folder: phase1, 1, phase1_data_parallel, lab-01."""
    for phase in phases():
        if word in (phase.name, phase.name.removeprefix("phase"), phase.folder):
            return phase
    raise UsageError(unknown_name("phase", word, [phase.name for phase in phases()]))


def is_phase(word: str) -> bool:
    """Whether a word means a phase and not an exercise."""
    names = {phase.name for phase in phases()} | {phase.folder for phase in phases()}
    return word in names or word.isdigit() or bool(re.fullmatch(r"phase\w*", word))


def find_exercise(name: str) -> tuple[Any, Any]:
    """Return the phase and the exercise of a name."""
    pair = grader("progress").find(name)
    if pair is None:
        listed = grader("catalog").listed
        names = [exercise.name for phase in phases() for exercise in listed(phase)]
        raise UsageError(unknown_name("exercise", name, names))
    return pair  # type: ignore[no-any-return]


def learners_folder(path: str | None) -> Path:
    """Return the folder with the learner's files: the given one, this one, or that which `start` makes."""
    here = Path.cwd()
    tried = [Path(path).expanduser()] if path else [here, here / DEFAULT_FOLDER, *here.parents]
    for folder in tried:
        if any((folder / phase.folder).is_dir() for phase in phases()):
            return folder.resolve()
    places = " or ".join(str(folder.resolve()) for folder in tried[:2])
    raise UsageError(f"no templates of the course in {places}", hint="Copy them: phalanx learn start phase1")


def copy_phase(phase: Any, folder: Path) -> list[Path]:
    """Copy the templates and guidelines of a phase; files that are there stay as they are. Return what was written."""
    source, written = course_folder(), []
    files = [*sorted((source / phase.folder).glob("template_*.py")), *sorted((source / phase.folder).glob("*.md"))]
    files += [path for path in sorted((source / phase.folder / "starter").rglob("*")) if path.is_file()]
    files += sorted((source / "pictures").glob(f"{phase.name}*.svg"))
    for file in files:
        target = folder / file.relative_to(source)
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
        written.append(target)
    return written


def next_exercise(folder: Path) -> Any:
    """Return the first exercise without points among those whose template is there, or None."""
    progress = grader("progress").read_progress(folder)
    for phase in phases():
        for exercise in grader("catalog").listed(phase):
            if (folder / exercise.template).exists() and not progress.get(exercise.name, {}).get("points"):
                return exercise
    return None


def solution_of(exercise: Any) -> str:
    """Return the source of our answer to an exercise: its definition, and what it uses of the same file."""
    source = exercise.solution.read_text()
    lines = source.splitlines()
    parts = []
    for node in sorted(grader("guard").reached(ast.parse(source), exercise.target), key=lambda node: node.lineno):
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) - 1
        while first and lines[first - 1].startswith("#"):
            first -= 1
        parts.append("\n".join(lines[first : node.end_lineno]))
    return "\n\n\n".join(parts)
