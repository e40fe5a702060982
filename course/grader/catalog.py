"""The phases of the course, their templates and exercises. Listing them loads nothing but this file."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grader.exercise import Exercise

COURSE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Phase:
    """One phase of the course, or one lab or assessment of module 202."""

    name: str
    title: str
    folder: str
    templates: tuple[str, ...]
    """The files of checks."""

    def exercises(self) -> list[Exercise]:
        """Return its exercises with what grades them."""
        found = [import_module(f"grader.checks.{name}").EXERCISES for name in self.templates]
        return [exercise for part in found for exercise in part]


@dataclass(frozen=True)
class Listed:
    """What a list shows of an exercise."""

    name: str
    title: str
    template: str
    target: str
    points: int

    @property
    def solution(self) -> Path:
        """The file with our answer."""
        if "/starter/" in self.template:
            answer = "example" if "/project/" in self.template else "solution"  # a project has no one answer
            return COURSE / self.template.replace("/starter/", f"/{answer}/")
        return COURSE / "solutions" / self.template.replace("template_", "")


PHASES = (
    Phase("phase1", "Data parallel training on one machine", "phase1_data_parallel", ("data_loader", "trainer")),
    Phase(
        "phase2",
        "Memory, precision and model parallelism",
        "phase2_advanced",
        ("gradient_accumulation", "model_parallel"),
    ),
    Phase("phase3", "Several machines: rings and servers", "phase3_multi_node", ("ring_allreduce", "parameter_server")),
    Phase("phase4", "A production system", "phase4_production", ("fault_tolerance", "monitoring")),
)

_MODULE = "module-202"
MODULE_202 = (
    Phase("lab-01", "Ray Train", f"{_MODULE}/labs/lab-01-ray-train", ("lab_01",)),
    Phase("lab-02", "Horovod on several machines", f"{_MODULE}/labs/lab-02-horovod", ("lab_02",)),
    Phase("lab-03", "A fault-tolerant system", f"{_MODULE}/labs/lab-03-fault-tolerant", ("lab_03",)),
    Phase("lab-04", "Profiling and bottlenecks", f"{_MODULE}/labs/lab-04-profiling", ("lab_04",)),
    Phase("assessment", "Practical assessment", f"{_MODULE}/assessment", ("assessment",)),
    Phase("project", "Final project", f"{_MODULE}/project", ("project",)),
)
ALL = (*PHASES, *MODULE_202)


def listed(phase: Phase) -> list[Listed]:
    """Return the exercises of a phase without loading torch: they are read from the source of their checks."""
    found = []
    for name in phase.templates:
        tree = ast.parse((COURSE / "grader" / "checks" / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Exercise":
                values = {word.arg: word.value for word in node.keywords}
                found.append(Listed(**{key: _literal(values[key], tree) for key in Listed.__dataclass_fields__}))
    return found


def _literal(node: ast.expr, tree: ast.Module) -> Any:
    """Return the value of a literal, or of a constant of the module."""
    if isinstance(node, ast.Name):
        assigned = (step for step in tree.body if isinstance(step, ast.Assign))
        node = next(step.value for step in assigned if getattr(step.targets[0], "id", "") == node.id)
    return ast.literal_eval(node)
