"""`phalanx learn` as a learner uses it: start, check, hint, solution, watch, and algorithms played."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from browser import browser
from command import clean_environment, end, finish, start
from wrong import COURSE, LISTED

from phalanx.cli import main

EXERCISE = "shard-indices"
FILE = LISTED[EXERCISE].template


@pytest.fixture
def learner(tmp_path, monkeypatch):
    """A folder in which phase 1 was started."""
    monkeypatch.chdir(tmp_path)
    assert main(["learn", "start", "phase1"]) == 0
    return tmp_path / "phalanx-course"


def python(*words: object, cwd: Path) -> subprocess.Popen[str]:
    """Start Python with the words."""
    return programs.Popen(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def answer(learner: Path) -> None:
    """Put our answer in place of the template."""
    shutil.copyfile(LISTED[EXERCISE].solution, learner / FILE)


def test_the_list_needs_no_folder_and_no_torch(tmp_path):
    code = "import sys; from phalanx.cli import main; main(['learn']); assert 'torch' not in sys.modules"
    listed = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True
    )
    assert listed.returncode == 0, listed.stderr
    for number in range(1, 5):
        assert f"phase{number} " in listed.stdout
    assert all(name in listed.stdout for name in LISTED)
    assert "phalanx learn start phase1" in listed.stdout


def test_start_copies_and_overwrites_nothing(learner, capsys):
    assert (learner / FILE).read_text() == (COURSE / FILE).read_text()
    assert (learner / "phase1_data_parallel" / "guidelines.md").exists()
    (learner / FILE).write_text("mine")
    capsys.readouterr()
    assert main(["learn", "start", "phase1"]) == 0
    assert (learner / FILE).read_text() == "mine"
    assert "nothing was changed" in capsys.readouterr().out


def test_check_teaches_counts_and_keeps_progress(learner, capsys):
    assert main(["learn", "check", EXERCISE]) == 1
    out = capsys.readouterr().out
    assert "is not written yet" in out
    assert "Hint 1" in out
    answer(learner)
    assert main(["learn", "check", EXERCISE]) == 0
    assert f"passed  {EXERCISE}" in capsys.readouterr().out
    kept = json.loads((learner / ".course-progress.json").read_text())[EXERCISE]
    assert kept["tries"] == 2
    assert kept["points"] == LISTED[EXERCISE].points
    main(["learn"])
    assert re.search(rf"{EXERCISE} .* passed", capsys.readouterr().out)


def test_hints_come_one_by_one_and_the_solution_after_a_try(learner, capsys):
    main(["learn", "hint", EXERCISE])
    first = capsys.readouterr().out
    main(["learn", "hint", EXERCISE])
    second = capsys.readouterr().out
    assert "Hint 2" not in first
    assert second.startswith(first.splitlines()[0])
    assert "Hint 2" in second
    assert main(["learn", "solution", EXERCISE]) == 2
    assert "has not been tried yet" in capsys.readouterr().err
    assert main(["learn", "solution", EXERCISE, "--show"]) == 0
    assert f"def {LISTED[EXERCISE].target}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["check", "shard-indicse"], "Did you mean 'shard-indices'?"),
        (["start", "phase5"], "unknown phase 'phase5'"),
        (["checks"], "Did you mean 'check'?"),
        (["show", "rign"], "Did you mean 'ring'?"),
        (["show", "ring", "--ranks", "99"], "2 to 8 ranks"),
        (["show", "ring", "--speed", "0"], "--speed 0 is not above 0"),
        (["check", "--folder", "nowhere"], "phalanx learn start phase1"),
    ],
)
def test_wrong_words_are_answered(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["learn", *words]) == 2
    assert says in capsys.readouterr().err


def test_watch_grades_on_each_save(learner):
    watching = start("learn", "watch", EXERCISE, cwd=learner.parent, PYTHONUNBUFFERED="1")
    try:
        assert watching.stdout is not None
        assert "watching" in watching.stdout.readline()
        answer(learner)
        seen = ""
        while "passed" not in seen:
            line = watching.stdout.readline()
            assert line, seen
            seen += line
    finally:
        watching.send_signal(signal.SIGINT)
        end(watching)


def test_a_played_algorithm_is_a_page_that_works(tmp_path, capsys):
    page = tmp_path / "ring.html"
    assert main(["learn", "show", "ring", "--ranks", "3", "--html", str(page)]) == 0
    with browser() as window:
        window.open(page.as_uri())
        window.run("document.getElementById('next').click()")
        assert "2/5" in window.run("document.getElementById('title').textContent")
        assert window.run("document.querySelectorAll('.message').length") == 3
        assert not window.problems


@pytest.mark.parametrize("name", ["ring", "tree", "ddp", "zero", "pipeline", "tensor", "server"])
def test_every_algorithm_is_played_to_its_end(name, capsys):
    assert main(["learn", "show", name]) == 0
    out = capsys.readouterr().out
    number, total = re.findall(r"^(\d+)/(\d+)  ", out, re.MULTILINE)[-1]
    assert number == total
    assert "sent in all: " in out


def test_the_script_of_a_phase_grades_a_folder(learner):
    answer(learner)
    graded = finish(python(COURSE / "test_phase1.py", EXERCISE, "--folder", learner, cwd=learner))
    assert graded.code == 0, graded.text
    assert f"passed  {EXERCISE}" in graded.out
    hinted = finish(python(COURSE / "test_phase1.py", EXERCISE, "--hint", "2", cwd=learner))
    assert hinted.code == 0, hinted.text
    assert hinted.out.startswith(f"{EXERCISE}, hint 2: ")
