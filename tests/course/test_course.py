"""Every template fails with words that teach, every solution passes, every wrong answer is called by its name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from grader.exercise import Result, grade
from grader.hints import hints
from long_proofs import ALL
from waiting import LIMIT_SECONDS
from wrong import COURSE, LISTED, OF_PHASES, RIGHT, WRONG, Right, Wrong, exercise


def named(each: Wrong | Right) -> str:
    return f"{each.exercise}-{each.mistake if isinstance(each, Wrong) else each.way}".replace(" ", "-")


def graded(name: str, file: Path) -> Result:
    """Grade a file; skip the test where something that the exercise needs is not installed."""
    result = grade(exercise(name), file)
    if result.skipped:
        pytest.skip(result.message)
    return result


@pytest.mark.parametrize("name", LISTED)
def test_a_template_fails_with_a_hint(name):
    result = graded(name, COURSE / LISTED[name].template)
    assert not result.passed
    assert f"{LISTED[name].target} is not written yet" in result.message
    assert "Hint 1:" in result.message


@pytest.mark.parametrize(
    "name", [name for name in LISTED if not name.startswith(("lab-", "horovod-"))]
)  # labs have their own tests
def test_a_solution_passes(name):
    result = graded(name, LISTED[name].solution)
    assert result.passed, f"{result.message} (seed {result.seed})"


FIRST = {each.exercise: each for each in reversed(WRONG) if each.fast}
"""One telling wrong answer per exercise: `make test` has 90 seconds for the course."""


@pytest.mark.parametrize("wrong", WRONG if ALL else FIRST.values(), ids=named)
def test_a_wrong_answer_is_called_by_its_name(wrong, tmp_path):
    solution = LISTED[wrong.exercise].solution
    file = tmp_path / solution.name
    file.write_text(wrong.source(solution.read_text()))
    result = grade(exercise(wrong.exercise), file)
    assert not result.passed, f"passed with seed {result.seed}"
    assert wrong.says in result.message, f"{result.message} (seed {result.seed})"


@pytest.mark.parametrize("right", RIGHT if ALL else RIGHT[::4], ids=named)
def test_another_right_answer_passes(right, tmp_path):
    solution = LISTED[right.exercise].solution
    file = tmp_path / solution.name
    file.write_text(right.source(solution.read_text()))
    result = grade(exercise(right.exercise), file)
    assert result.passed, f"{result.message} (seed {result.seed})"


STARTS = {
    "subprocess": "import subprocess\nexec(subprocess.run(['cat', {0!r}], capture_output=True, text=True).stdout)\n",
    "a shell": "import os\nexec(os.popen('cat ' + {0!r}).read())\n",
    "fork and exec": "import os\nif os.fork() == 0:\n    os.execv('/bin/cat', ['cat', {0!r}])\nos.wait()\n",
}


@pytest.mark.parametrize("way", STARTS)
def test_an_answer_starts_no_program_that_could_read_ours(way, tmp_path):
    solution = LISTED["shard-indices"].solution
    head, rest = solution.read_text().split("from dataclasses import dataclass\n")
    file = tmp_path / solution.name
    file.write_text(f"{head}from dataclasses import dataclass\n{STARTS[way].format(str(solution))}{rest}")
    result = grade(exercise("shard-indices"), file)
    assert not result.passed
    assert "an answer starts no other programs" in result.message


def test_there_are_enough_answers():
    wrong, right = Counter(each.exercise for each in WRONG), Counter(each.exercise for each in RIGHT)
    few = {name: (wrong[name], right[name] + 1) for name in OF_PHASES if wrong[name] < 10 or right[name] + 1 < 3}
    assert not few, f"(wrong, right) answers: {few}"
    for each in WRONG:
        assert each.source(LISTED[each.exercise].solution.read_text())


@pytest.mark.parametrize("name", LISTED)
def test_a_todo_has_three_hints_and_gives_nothing_away(name):
    found = hints(name)
    assert len(found) == 3
    assert all(10 <= len(hint) <= 600 for hint in found)
    text = (COURSE / LISTED[name].template).read_text()
    assert len(re.findall(rf"^ *# TODO {name}: ", text, re.MULTILINE)) == 1
    assert f"phalanx learn hint {name}\n" in text
    assert not any(hint[:40] in text for hint in found)


def test_files_are_as_long_as_they_may_be():
    files = [*COURSE.glob("phase*/template_*.py"), *COURSE.glob("solutions/*/*.py")]
    long = {file.name: lines for file in files if (lines := len(file.read_text().splitlines())) > 250}
    assert not long
    texts = {file.parent.name: file.read_text() for file in COURSE.glob("phase*/guidelines.md")}
    words = {name: len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split()) for name, text in texts.items()}
    assert len(words) == 4
    assert all(1_500 <= count <= 3_000 for count in words.values()), words


def test_course_code_is_torch_and_the_standard_library():
    allowed = {*sys.stdlib_module_names, "torch", "numpy", "PIL", "grader"}
    for file in [*COURSE.glob("phase*/*.py"), *COURSE.glob("solutions/*/*.py"), *COURSE.glob("grader/**/*.py")]:
        siblings = {other.stem for other in file.parent.glob("*.py")}
        if file.stem.startswith(("lab_", "ray_")):  # labs run the engines themselves
            siblings |= {"ray", "yaml"}
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            assert {name.partition(".")[0] for name in names} <= allowed | siblings, file


@pytest.mark.parametrize(
    "script", sorted({*COURSE.glob("pictures/*.py")} - {COURSE / "pictures" / "draw.py"}), ids=lambda path: path.stem
)
def test_pictures_are_what_their_script_draws(script, tmp_path):
    subprocess.run([sys.executable, script, tmp_path], check=True, timeout=LIMIT_SECONDS)
    drawn = sorted(tmp_path.glob("*.svg"))
    assert drawn
    for picture in drawn:
        assert picture.read_text() == (COURSE / "pictures" / picture.name).read_text(), picture.name


def test_every_title_of_the_reading_list_has_a_stable_link():
    text = (COURSE / "module-202" / "resources" / "recommended-reading.md").read_text()
    titles = re.findall(r"\*\*(.*?)\*\*", text, re.DOTALL)
    assert len(titles) >= 45
    stable = r"https://(arxiv\.org/abs/\d{4}\.\d{4,5}|doi\.org/10\.\S+|\w+\.(usenix|nvidia|pytorch)\.(org|com)/\S+)"
    without = [title for title in titles if not re.fullmatch(rf"\[[^\]]+\]\({stable}\)", title)]
    assert not without


def test_links_of_the_course_resolve():
    link = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
    links = [(file, target) for file in COURSE.rglob("*.md") for target in link.findall(file.read_text())]
    assert not [
        f"{file.relative_to(COURSE)}: {target}" for file, target in links if not (file.parent / target).exists()
    ]
