"""Grading of what learners write: tables of numbers in reports, compared with what was recorded."""

from __future__ import annotations

import ast
import json
import math
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


def read_json(path: Path, how: str) -> dict[str, Any]:
    """Return what a file of numbers holds; say how to make one that is not there."""
    if not path.exists():
        raise Mistake(f"{path.name} is missing beside your answer: {how}")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise Mistake(f"{path.name} is not JSON ({error}): {how}") from None
    if not isinstance(found, dict):
        raise Mistake(f"{path.name} holds a {type(found).__name__}, it should be an object {{...}}: {how}")
    return found


def part_of(found: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return an object inside the object of a file."""
    part = found.get(name)
    if not isinstance(part, dict):
        raise Mistake(f"{where}: {name} is {part!r:.40}; it should be an object {{...}}")
    return part


def finite(found: dict[str, Any], name: str, where: str) -> float:
    """Return a number of a file. NaN is refused: it is equal to nothing, and no comparison would complain."""
    value = found.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Mistake(f"{where}: {name} is {value!r:.40}; it should be a number")
    return value


def finite_list(found: dict[str, Any], name: str, where: str) -> list[float]:
    """Return a list of numbers of a file."""
    values = found.get(name)
    if not isinstance(values, list):
        raise Mistake(f"{where}: {name} is {values!r:.40}; it should be a list of numbers")
    return [finite({f"{name}[{at}]": value}, f"{name}[{at}]", where) for at, value in enumerate(values)]


def read_text(folder: Path, name: str, template: str) -> str:
    """Return a report."""
    path = folder / name
    if not path.exists():
        raise Mistake(f"{name} is missing beside your answer: copy {template} to {name}, and fill it in")
    return path.read_text(errors="replace")


def table_rows(text: str) -> dict[str, list[str]]:
    """Return the rows of the tables in a report by their first cell."""
    lines = [line.strip().strip("|").split("|") for line in text.splitlines() if line.strip().startswith("|")]
    return {cells[0].strip().lower(): [cell.strip() for cell in cells[1:]] for cells in lines}


def section(text: str, title: str) -> str:
    """Return the text below a heading."""
    found = re.search(rf"^#+ *{re.escape(title)} *\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL | re.IGNORECASE)
    return found[1].strip() if found else ""


def different_words(text: str) -> int:
    """Return how many different words a text has: a word that is repeated says nothing new."""
    return len(set(re.findall(r"\w+", text.lower())))


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
            recorded = finite(part_of(runs, when, "runs.json"), name, f"runs.json, {when}")
            if not agrees(recorded, wanted, 0.1):
                raise Mistake(
                    f"runs.json has {recorded:g} {name} {when}, your trainer makes {wanted:g} now: run measure.py again"
                )
    before, after = (finite(runs[when], "ms", f"runs.json, {when}") for when in ("before", "after"))
    if before < speed_up * after or after <= 0:
        raise Mistake(
            f"runs.json: {before:.1f} ms before, {after:.1f} after; {speed_up} times as fast is asked for: mend what is"
            " still slow, and run measure.py again"
        )
    text = read_text(folder, "report.md", "report.md of the starter folder")
    rows = table_rows(text)
    for name, unit in _UNITS.items():
        if name not in rows or len(rows[name]) < 4:
            raise Mistake(f"report.md has no row `| {name} | where | unit | before | after |`")
        for when, cell in zip(("before", "after"), rows[name][2:4], strict=True):
            wanted = finite(runs[when], unit, f"runs.json, {when}")
            found = number(cell, f"report.md, row {name}, {when}")
            if not agrees(found, wanted):
                raise Mistake(f"report.md, row {name}: {found:g} {when}; runs.json has {wanted:g} {unit}")
    ranges, causes = line_ranges(source), set()
    for name, (functions, word) in _PLACES.items():
        place = re.search(r"slow_trainer\.py:(\d+)", rows[name][0])
        if place is None or not any(int(place[1]) in ranges[function] for function in functions):
            raise Mistake(
                f"report.md, row {name}: {rows[name][0]!r} is not where it happens; write slow_trainer.py:LINE with the"
                " line that costs the time"
            )
        cause = section(text, name)
        if different_words(cause) < _LEAST_WORDS or word not in cause.lower():
            raise Mistake(
                f"report.md, section {name}: say in {_LEAST_WORDS} different words or more what happens too often and"
                f" how the profile shows it (the word {word!r} is missing or the text is too short)"
            )
        if cause in causes:
            raise Mistake(f"report.md, section {name}: it has the text of another section; each has its own cause")
        causes.add(cause)
