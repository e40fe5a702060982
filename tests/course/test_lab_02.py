"""Lab 02: wrong answers are called by their names, other right ones pass, and its commands run as its text says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import clean_environment
from grader.checks.lab_02 import words_of
from grader.exercise import grade
from grader.ranks import Order, run_ranks
from long_proofs import ALL, long_proof
from wrong import COURSE, LISTED, Right, Wrong, exercise
from wrong_lab_02 import RIGHT, WRONG

from phalanx.cli import main

LAB = COURSE / "module-202" / "labs" / "lab-02-horovod"
NAMES = [name for name in LISTED if name.startswith("horovod-")]
HOSTS = ("--gloo", "-np", "2", "-H", "localhost:1,127.0.0.1:1", "--network-interfaces", "lo")


def needs_horovod() -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not built: run make horovod")


def named(each: Wrong | Right) -> str:
    return f"{each.exercise}-{each.mistake if isinstance(each, Wrong) else each.way}".replace(" ", "-")


@pytest.mark.parametrize("wrong", [each for each in WRONG if ALL or each.fast], ids=named)
def test_a_wrong_answer_is_called_by_its_name(wrong, tmp_path):
    needs_horovod()
    solution = LISTED[wrong.exercise].solution
    file = tmp_path / solution.name
    file.write_text(wrong.source(solution.read_text()))
    result = grade(exercise(wrong.exercise), file)
    assert not result.passed, f"passed with seed {result.seed}"
    assert wrong.says in result.message, f"{result.message} (seed {result.seed})"


@pytest.mark.parametrize("right", RIGHT if ALL else RIGHT[:1], ids=named)
def test_another_right_answer_passes(right, tmp_path):
    needs_horovod()
    solution = LISTED[right.exercise].solution
    file = tmp_path / solution.name
    file.write_text(right.source(solution.read_text()))
    result = grade(exercise(right.exercise), file)
    assert result.passed, f"{result.message} (seed {result.seed})"


def test_each_task_has_telling_mistakes():
    assert {name: sum(each.exercise == name for each in WRONG) >= 3 for name in NAMES} == dict.fromkeys(NAMES, True)
    for each in WRONG:
        assert each.source(LISTED[each.exercise].solution.read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give a lost process to their first one")
def test_what_an_answer_starts_in_a_session_of_its_own_ends_with_it(tmp_path):
    answer = tmp_path / "launch.py"
    start = "subprocess.Popen(['sleep', '600'], start_new_session=True)"
    answer.write_text(f"import subprocess\n\n\ndef horovodrun_words(*_):\n    return [{start}.pid]\n")
    (pid,) = run_ranks(Order(answer, words_of, 0, ({}, [], "lo"), programs=True), tmp_path)[0].value
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_without_horovod_nothing_is_graded_and_that_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["learn", "start", "lab-02"]) == 0
    capsys.readouterr()
    assert main(["learn", "check", "lab-02"]) == 1
    said = capsys.readouterr().out
    assert said.count("skipped") == 4
    assert "make horovod" in said
    assert "wrong" not in said
    assert "0 of  50 points" in said


@long_proof
def test_the_starter_gets_no_points_and_the_solution_all(tmp_path, monkeypatch, capsys):
    needs_horovod()
    monkeypatch.chdir(tmp_path)
    assert main(["learn", "start", "lab-02"]) == 0
    assert main(["learn", "check", "lab-02"]) == 1
    assert "0 of  50 points" in capsys.readouterr().out
    folder = tmp_path / "phalanx-course" / "module-202" / "labs" / LAB.name / "starter"
    for file in (LAB / "solution").glob("*.py"):
        shutil.copyfile(file, folder / file.name)
    assert main(["learn", "check", "lab-02"]) == 0
    assert "50 of  50 points" in capsys.readouterr().out


def run(folder: Path, *words: str) -> str:
    """Run a command in the folder as a learner does."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        words, cwd=folder, env=clean_environment(PATH=path), capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@long_proof
def test_the_commands_of_the_lab_end_to_end(tmp_path):
    """Two hosts, the images, fewer and more all-reduces by settings, a table."""
    needs_horovod()
    for file in (LAB / "solution").glob("*.py"):
        shutil.copyfile(file, tmp_path / file.name)
    first = re.search(r"```bash\n(python -c .*?)```", (LAB / "README.md").read_text(), re.DOTALL)
    assert first is not None
    run(tmp_path, "bash", "-c", first[1])
    said = run(tmp_path, "python", "launch.py", "localhost:1", "127.0.0.1:1")
    assert "rank 1 of 2: number 0 of 1 on host 1 of 2 (127.0.0.1)" in said
    counts = []
    for more in (["--fusion-threshold-mb", "0"], ["--cycle-time-ms", "50"]):
        wire = str(tmp_path / "wire.json")
        said = run(
            tmp_path, "horovodrun", *HOSTS, *more, "--timeline-filename", wire, "python", "train.py", "digits.pt"
        )
        accuracy = re.search(r"2 ranks, .* accuracy ([\d.]+)", said)
        assert accuracy is not None
        assert float(accuracy[1]) > 0.95
        counts.append(int(re.findall(r" in (\d+) all-reduces", run(tmp_path, "python", "settings.py", wire))[0]))
    assert counts[0] > 3 * counts[1]
    rows = run(tmp_path, "horovodrun", *HOSTS, "python", "benchmark.py").splitlines()
    assert len(rows) == 9
    assert all(row.endswith(" 0") for row in rows[1:])
