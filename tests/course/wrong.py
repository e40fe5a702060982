"""Wrong answers and other right ones: how they are written down, and the files that they become."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib import import_module

from command import ROOT
from grader.catalog import ALL, PHASES, Listed, listed
from grader.exercise import Exercise

COURSE = ROOT / "course"


@dataclass(frozen=True)
class Wrong:
    """A mistake, as edits of the solution, and a part of the message that it must get."""

    exercise: str
    mistake: str
    edits: tuple[tuple[str, str], ...]
    """Old and new text; each old text stands exactly once in the solution."""
    says: str
    fast: bool = False
    """Whether `make test` tries it; `make test-all` tries all."""

    def source(self, solution: str) -> str:
        """Return the wrong file."""
        for old, new in self.edits:
            assert solution.count(old) == 1, f"{self.exercise}, {self.mistake}: {solution.count(old)} times: {old!r}"
            solution = solution.replace(old, new)
        return solution


@dataclass(frozen=True)
class Right:
    """Another right answer: source that stands in place of the definition of the same name in the solution."""

    exercise: str
    way: str
    code: str

    def source(self, solution: str) -> str:
        """Return the file with this answer in it."""
        tree = ast.parse(self.code)
        names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        lines = solution.splitlines(keepends=True)
        replaced = [
            node
            for node in ast.parse(solution).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names
        ]
        assert replaced, f"{self.exercise}, {self.way}: the solution defines none of {sorted(names)}"
        for node in reversed(replaced):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            del lines[first - 1 : node.end_lineno]
        at = replaced[0].lineno - 1
        return "".join([*lines[:at], self.code.strip("\n") + "\n\n\n", *lines[at:]])


TEMPLATES = (*(name for phase in PHASES for name in phase.templates), "assessment", "variations")
LISTED: dict[str, Listed] = {each.name: each for phase in ALL for each in listed(phase)}
OF_PHASES = [each.name for phase in PHASES for each in listed(phase)]
WRONG: tuple[Wrong, ...] = tuple(each for name in TEMPLATES for each in import_module(f"wrong_{name}").WRONG)
RIGHT: tuple[Right, ...] = tuple(each for name in TEMPLATES for each in import_module(f"wrong_{name}").RIGHT)


def exercise(name: str) -> Exercise:
    """Return an exercise with its grader."""
    return next(each for phase in ALL for each in phase.exercises() if each.name == name)
