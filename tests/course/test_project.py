"""The final project: the example passes, and measurements that cannot be right are refused in words."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import programs
import pytest
from grader.catalog import MODULE_202, listed
from grader.exercise import grade
from long_proofs import ALL, long_proof
from wrong import COURSE, exercise

PROJECT = COURSE / "module-202" / "project"
Change = Callable[[dict[str, Any]], Any]

WRONG: tuple[tuple[str, str, Change, str], ...] = (
    ("equality", "another loss", lambda m: m["equality"]["many"].__setitem__(7, 9.0), "step 7: loss"),
    ("equality", "few steps", lambda m: m["equality"].update(one=[5.5], many=[5.5]), "20 steps or more"),
    ("equality", "another model", lambda m: m.update(parameters=1000), "must be the model that was trained"),
    (
        "equality",
        "no learning",
        lambda m: m["equality"].update(one=[m["equality"]["one"][0]] * 24, many=[m["equality"]["one"][0]] * 24),
        "the loss does not fall",
    ),
    ("equality", "another beginning", lambda m: m["equality"].update(one=[2.0] * 24), "was the first step left out"),
    ("scaling", "one measurement", lambda m: m["scaling"].update(many=[50.0]), "3 or more are asked for"),
    ("scaling", "no kind", lambda m: m["scaling"].pop("kind"), "write strong or weak"),
    ("scaling", "more than possible", lambda m: m["scaling"].update(many=[1e6] * 3), "efficiency of"),
    ("scaling", "not the number of the report", lambda m: m["scaling"].update(one=[100.0] * 3, many=[160.0] * 3),
     "row efficiency"),
    ("scaling", "one rank", lambda m: m.update(ranks=1), "two ranks or more"),
    ("recovery", "other weights", lambda m: m["recovery"].update(difference=0.01), "the weights differ by 0.01"),
    ("recovery", "most steps twice", lambda m: m["recovery"].update(steps_lost=20), "save more often"),
    ("recovery", "no time", lambda m: m["recovery"].update(seconds=0), "measure from the fault"),
    ("recovery", "no fault", lambda m: m["recovery"].update(fault=""), "`fault` is empty"),
    ("bytes", "both ranks counted", lambda m: m["bytes"].update(sent_per_rank=2 * m["bytes"]["sent_per_rank"]),
     "2 (n - 1) / n times the gradients"),
    ("bytes", "one step counted", lambda m: m["bytes"].update(steps=1), "or of all steps"),
    ("bytes", "a width that is not there", lambda m: m["bytes"].update(bytes_per_value=3), "write 1, 2, 4 or 8"),
    ("recovery", "not a number", lambda m: m["recovery"].update(difference=math.nan), "difference is nan"),
    ("recovery", "a word", lambda m: m["recovery"].update(seconds="fast"), "seconds is 'fast'; it should be a number"),
    ("equality", "diverged", lambda m: m["equality"]["many"].__setitem__(9, math.nan), "many[9] is nan"),
    ("scaling", "no list", lambda m: m["scaling"].update(one=50.0), "it should be a list of numbers"),
    ("bytes", "no steps", lambda m: m["bytes"].update(steps=0), "in how many steps"),
    ("bytes", "a list", lambda m: m.update(bytes=[1]), "it should be an object"),
    ("bytes", "left out", lambda m: m.pop("bytes"), "has no 'bytes'"),
)  # fmt: skip


@pytest.fixture
def answer(tmp_path):
    return shutil.copytree(PROJECT / "example", tmp_path / "answer")


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        pytest.param(part, change, says, id=f"{part}-{name}".replace(" ", "-"))
        for part, name, change, says in (WRONG if ALL else WRONG[::4])
    ],
)
def test_measurements_that_cannot_be_right_are_refused(part, change, says, answer):
    file = answer / "measurements.json"
    found = json.loads(file.read_text())
    change(found)
    file.write_text(json.dumps(found))
    result = grade(exercise(f"project-{part}"), answer / "project.py")
    assert not result.passed
    assert says in result.message, result.message


@pytest.mark.parametrize(
    ("part", "old", "new", "says"),
    [
        ("bytes", "| bytes |", "| others |", "has no row `| bytes |"),
        ("recovery", "## Recovery", "## Other", "section recovery: 0 different words"),
        ("scaling", "## Scaling\n", "## Scaling\n\nFine.\n\n## Rest\n", "section scaling: 1 different words"),
    ],
)
def test_a_report_without_a_part_is_refused(part, old, new, says, answer):
    text = (answer / "report.md").read_text()
    assert text.count(old) == 1
    (answer / "report.md").write_text(text.replace(old, new))
    assert says in grade(exercise(f"project-{part}"), answer / "project.py").message


def test_files_of_a_submission_must_be_there(answer):
    (answer / "measurements.json").unlink()
    assert "measurements.json is missing" in grade(exercise("project-bytes"), answer / "project.py").message
    phase = next(phase for phase in MODULE_202 if phase.name == "project")
    assert sum(each.points for each in listed(phase)) == 60


@long_proof
def test_the_example_measures_itself_again(answer, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "project.py", str(tmp_path / "runs")]
    programs.run(words, cwd=answer, env=environment, check=True, timeout=900, capture_output=True)
    found = json.loads((answer / "measurements.json").read_text())
    assert found["recovery"]["difference"] == 0.0
    assert found["bytes"] == json.loads((PROJECT / "example" / "measurements.json").read_text())["bytes"]
    assert grade(exercise("project-bytes"), answer / "project.py").passed
