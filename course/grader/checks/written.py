"""Grading of what learners write: tables of numbers in reports, compared with what was recorded."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from grader.exercise import Mistake

_PLACES = {
    "data": (("Pictures.decode", "SlowTrainer.batch", "SlowTrainer.micro_step"), "decode"),
    "metrics": (("SlowTrainer.step", "SlowTrainer.validate"), "validat"),
    "exchange": (("SlowTrainer.micro_step",), "all_reduce"),
}
"""The functions in which the line of a bottleneck may be, and a word that its cause must have."""
_UNITS = {"data": "decodes", "metrics": "validations", "exchange": "collectives", "step": "ms", "proof": "loss"}
_LEAST_WORDS = 15


def read_json(path: Path, how: str) -> Any:
    """Return what a file of numbers holds; say how to make one that is not there."""
    if not path.exists():
        raise Mistake(f"{path.name} is missing beside your answer: {how}")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise Mistake(f"{path.name} is not JSON ({error}): {how}") from None


def read_text(folder: Path, name: str) -> str:
    """Return a report."""
    path = folder / name
    if not path.exists():
        raise Mistake(f"{name} is missing beside your answer: fill in the template of that name")
    return path.read_text(errors="replace")


def table_rows(text: str) -> dict[str, list[str]]:
    """Return the rows of the tables in a report by their first cell."""
    lines = [line.strip().strip("|").split("|") for line in text.splitlines() if line.strip().startswith("|")]
    return {cells[0].strip().lower(): [cell.strip() for cell in cells[1:]] for cells in lines}


def section(text: str, title: str) -> str:
    """Return the text below a heading."""
    found = re.search(rf"^#+ *{re.escape(title)} *\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL | re.IGNORECASE)
    return found[1].strip() if found else ""


def number(text: str, where: str) -> float:
    """Return the number in a cell."""
    found = re.search(r"-?\d[\d,]*\.?\d*(e-?\d+)?", text)
    if found is None:
        raise Mistake(f"{where}: {text!r} has no number")
    return float(found[0].replace(",", ""))


def agrees(found: float, wanted: float, share: float = 0.05) -> bool:
    """Whether two numbers are equal within a share, or by rounding."""
    return abs(found - wanted) <= share * abs(wanted) + 0.06


def line_ranges(source: Path) -> dict[str, range]:
    """Return the lines of each method by Class.method."""
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    return {
        f"{each.name}.{node.name}": range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for each in classes
        for node in each.body
        if isinstance(node, ast.FunctionDef)
    }


def check_report(folder: Path, counted: dict[str, dict[str, float]], source: Path, speed_up: float) -> None:
    """Raise where the recorded runs are not of these trainers, or the report does not say what they say."""
    runs = read_json(folder / "runs.json", "run `torchrun --nproc-per-node 2 measure.py`")
    for when, counts in counted.items():
        for name, wanted in counts.items():
            recorded = float(runs.get(when, {}).get(name, float("nan")))
            if not agrees(recorded, wanted, 0.1):
                raise Mistake(
                    f"runs.json has {recorded:g} {name} {when}, your trainer makes {wanted:g} now: run measure.py again"
                )
    if runs["before"]["ms"] < speed_up * runs["after"]["ms"]:
        raise Mistake(f"runs.json: {runs['before']['ms']:.1f} ms before, {runs['after']['ms']:.1f} after: not faster")
    text = read_text(folder, "report.md")
    rows = table_rows(text)
    for name, unit in _UNITS.items():
        if name not in rows or len(rows[name]) < 4:
            raise Mistake(f"report.md has no row `| {name} | where | unit | before | after |`")
        for when, cell in zip(("before", "after"), rows[name][2:4], strict=True):
            wanted, found = runs[when][unit], number(cell, f"report.md, row {name}, {when}")
            if not agrees(found, wanted):
                raise Mistake(f"report.md, row {name}: {found:g} {when}; runs.json has {wanted:g} {unit}")
    ranges = line_ranges(source)
    for name, (functions, word) in _PLACES.items():
        place = re.search(r"slow_trainer\.py:(\d+)", rows[name][0])
        if place is None or not any(int(place[1]) in ranges[function] for function in functions):
            raise Mistake(
                f"report.md, row {name}: {rows[name][0]!r} is not where it happens; write slow_trainer.py:LINE with the"
                " line that costs the time"
            )
        cause = section(text, name)
        if len(cause.split()) < _LEAST_WORDS or word not in cause.lower():
            raise Mistake(
                f"report.md, section {name}: say in {_LEAST_WORDS} words or more what happens too often and how the"
                f" profile shows it (the word {word!r} is missing or the text is too short)"
            )
