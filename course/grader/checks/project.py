"""The final project: the measurements are of the model that was built, and the report says what they say."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from grader.checks.written import (
    agrees,
    different_words,
    finite,
    finite_list,
    number,
    part_of,
    read_json,
    read_text,
    section,
    table_rows,
)
from grader.exercise import Attempt, Exercise, Mistake

_TEMPLATE = "module-202/project/starter/project.py"
_LEAST_STEPS = 20
_LEAST_REPEATS = 3
_LEAST_WORDS = 30


def look(module: ModuleType) -> dict[str, float]:
    """Return the size of the learner's model, and the loss with which it begins."""
    model, inputs, targets, loss_function = module.build()
    with torch.no_grad():
        loss = loss_function(model(inputs), targets)
    return {"parameters": sum(each.numel() for each in model.parameters() if each.requires_grad), "loss": float(loss)}


@dataclass(frozen=True)
class Submission:
    """What a learner hands in for one part."""

    built: dict[str, float]
    """What build() gives."""
    ranks: float
    part: dict[str, Any]
    """The measurements of the part."""
    where: str
    """Their place, for messages."""
    report: str


def submission(attempt: Attempt, part: str) -> Submission:
    """Return what was handed in; raise where parts of it are missing."""
    built = attempt.call(look)
    found = read_json(attempt.answer.with_name("measurements.json"), "write it as README.md says")
    missing = [name for name in ("machine", "framework", "ranks", "parameters", part) if name not in found]
    if missing:
        raise Mistake(f"measurements.json has no {missing[0]!r}: README.md lists what it holds")
    if finite(found, "ranks", "measurements.json") < 2:
        raise Mistake(f"measurements.json: ranks is {found['ranks']}; the project trains on two ranks or more")
    if finite(found, "parameters", "measurements.json") != built["parameters"]:
        raise Mistake(
            f"measurements.json has {found['parameters']:,} parameters, the model of build() {built['parameters']:,}:"
            " it must be the model that was trained"
        )
    where = f"measurements.json, {part}"
    report = read_text(attempt.answer.parent, "report.md", "report-template.md of the project")
    return Submission(built, found["ranks"], part_of(found, part, "measurements.json"), where, report)


def quoted(text: str, row: str, wanted: float) -> None:
    """Raise where a row of the report's table does not have a number, or another one."""
    rows = table_rows(text)
    if row not in rows or len(rows[row]) < 2:
        raise Mistake(f"report.md has no row `| {row} | unit | value |`: the template has it")
    found = number(rows[row][1], f"report.md, row {row}")
    if not (agrees(found, wanted) if abs(wanted) >= 0.1 else math.isclose(found, wanted, rel_tol=0.5, abs_tol=1e-12)):
        raise Mistake(f"report.md, row {row}: {found:g}; the measurements give {wanted:g}")


def explained(text: str, title: str) -> None:
    """Raise for a section that is missing or too short."""
    words = different_words(section(text, title))
    if words < _LEAST_WORDS:
        raise Mistake(
            f"report.md, section {title}: {words} different words; say in {_LEAST_WORDS} or more how it was measured"
        )


def grade_equality(attempt: Attempt) -> None:
    """Grade `project-equality`."""
    given = submission(attempt, "equality")
    one, many = (finite_list(given.part, name, given.where) for name in ("one", "many"))
    if len(one) != len(many) or len(one) < _LEAST_STEPS:
        raise Mistake(
            f"measurements.json, equality: {len(one)} losses of one rank, {len(many)} of several; {_LEAST_STEPS} steps"
            " or more of both are asked for"
        )
    if not math.isclose(one[0], given.built["loss"], rel_tol=0.2):
        raise Mistake(
            f"the first loss in measurements.json is {one[0]:.4f}, the model of build() begins with"
            f" {given.built['loss']:.4f}: is it another model, or was the first step left out?"
        )
    for step, (first, second) in enumerate(zip(one, many, strict=True)):
        if abs(first - second) > 1e-3 * max(1.0, abs(first)):
            raise Mistake(
                f"step {step}: loss {first:.6f} on one rank, {second:.6f} on several. Compare the global batches, the"
                " order of the samples, dropout, and what divides the gradients"
            )
    if statistics.mean(one[-3:]) >= one[0]:
        raise Mistake(f"the loss does not fall ({one[0]:.4f} to {one[-1]:.4f}): two runs that learn nothing are equal")
    quoted(given.report, "equality", max(abs(first - second) for first, second in zip(one, many, strict=True)))


def grade_scaling(attempt: Attempt) -> None:
    """Grade `project-scaling`."""
    given = submission(attempt, "scaling")
    kind = given.part.get("kind")
    if kind not in ("strong", "weak"):
        raise Mistake(f"{given.where}: kind is {kind!r}; write strong or weak")
    rates = {name: finite_list(given.part, name, given.where) for name in ("one", "many")}
    for name, values in rates.items():
        if len(values) < _LEAST_REPEATS:
            raise Mistake(f"{given.where}, {name}: {len(values)} measurements; {_LEAST_REPEATS} or more are asked for")
        if min(values) <= 0:
            raise Mistake(f"{given.where}, {name}: {min(values):g} samples per second; a rate is above 0")
    efficiency = statistics.median(rates["many"]) / statistics.median(rates["one"]) / given.ranks
    if not 0.01 < efficiency <= 1.5:
        raise Mistake(
            f"the rates give an efficiency of {efficiency:.2f} ({given.ranks} ranks): write samples per second of"
            " all ranks together"
        )
    quoted(given.report, "efficiency", efficiency)
    explained(given.report, "scaling")


def grade_recovery(attempt: Attempt) -> None:
    """Grade `project-recovery`."""
    given = submission(attempt, "recovery")
    fault = given.part.get("fault")
    if not fault:
        raise Mistake(f"{given.where}: `fault` is empty; say what was done to which rank in which step")
    names = ("difference", "seconds", "steps_lost", "steps")
    difference, seconds, lost, steps = (finite(given.part, name, given.where) for name in names)
    if abs(difference) > 1e-5:
        raise Mistake(
            f"after {fault} the weights differ by {difference:g} from a run that was not disturbed: a step was lost or"
            " done twice, or something is not in the checkpoint"
        )
    if seconds <= 0:
        raise Mistake(f"recovery in {seconds} s: measure from the fault to the end of the next new step")
    if lost > steps / 2:
        raise Mistake(f"{lost} of {steps} steps were computed twice after one fault: save more often")
    quoted(given.report, "recovery", seconds)
    explained(given.report, "recovery")


def grade_bytes(attempt: Attempt) -> None:
    """Grade `project-bytes`."""
    given = submission(attempt, "bytes")
    width = given.part.get("bytes_per_value", 4)
    if width not in (1, 2, 4, 8):
        raise Mistake(f"{given.where}: bytes_per_value is {width}; write 1, 2, 4 or 8")
    sent, steps = (finite(given.part, name, given.where) for name in ("sent_per_rank", "steps"))
    if steps < 1:
        raise Mistake(f"{given.where}: steps is {steps}; write in how many steps the bytes were sent")
    wanted = 2 * (given.ranks - 1) / given.ranks * given.built["parameters"] * width
    if not 0.9 * wanted <= sent / steps <= 1.1 * wanted:
        raise Mistake(
            f"a rank sent {sent / steps:,.0f} bytes per step; a ring of {given.ranks} ranks sends 2 (n - 1) / n times"
            f" the gradients, {wanted:,.0f} bytes here. Is the count of all ranks together, or of all steps, or is"
            " something sent that need not be?"
        )
    quoted(given.report, "bytes", sent / steps)


EXERCISES = (
    Exercise(
        name="project-equality",
        title="Several ranks compute what one process computes",
        template=_TEMPLATE,
        target="build",
        points=20,
        grade=grade_equality,
        programs=True,
    ),
    Exercise(
        name="project-scaling",
        title="Scaling, measured and explained",
        template=_TEMPLATE,
        target="build",
        points=15,
        grade=grade_scaling,
        programs=True,
    ),
    Exercise(
        name="project-recovery",
        title="A lost rank leaves the result unchanged",
        template=_TEMPLATE,
        target="build",
        points=15,
        grade=grade_recovery,
        programs=True,
    ),
    Exercise(
        name="project-bytes",
        title="Bytes counted and computed",
        template=_TEMPLATE,
        target="build",
        points=10,
        grade=grade_bytes,
        programs=True,
    ),
)
