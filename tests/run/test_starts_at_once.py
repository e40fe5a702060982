"""Two commands that start or replace a run in one folder at the same moment: one does, the other is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT, clean_environment

from phalanx.run.record import RunRecord

ROUNDS, WHOLE = 20, 3
"""How often two commands start at once, and in how many of these their ranks start, too, which takes seconds."""

DRIVER = """
import multiprocessing, os, sys, time

from phalanx.cli import main, train  # both begin with it imported, so that they are as close as two can be
from phalanx.run.conductor import RecordedRun


def runs_nothing(run, *args, **options):
    wait_for_the_other(run.folder.name)
    with open("runs-of-the-script", "a") as file:
        file.write(run.folder.name + chr(10))


def wait_for_the_other(run):
    deadline = time.monotonic() + 60
    while not os.path.exists(f"refused-{run}") and time.monotonic() < deadline:
        time.sleep(0.01)


def start(barrier, number, words, whole):
    sys.stdout = sys.stderr = open(f"output-{number}", "w")
    if not whole:
        RecordedRun.on_ranks = runs_nothing
    barrier.wait()
    code = main(words) or 0
    if code:
        open("refused-run-" + number.partition("-")[0], "w").close()
    os._exit(code)


fork = multiprocessing.get_context("fork")
for number in range(int(sys.argv[1])):
    words = [word.format(round=number) for word in sys.argv[3:]]
    barrier = fork.Barrier(2)
    whole = number < int(sys.argv[2])
    both = [fork.Process(target=start, args=(barrier, f"{number}-{which}", words, whole)) for which in "ab"]
    for process in both:
        process.start()
    for process in both:
        process.join()
    print(*(process.exitcode for process in both), flush=True)
"""

SCRIPT = """
import os, time
with open("runs-of-the-script", "a") as file:
    file.write(os.environ["PHALANX_RUN_DIR"] + chr(10))
deadline = time.monotonic() + 60
while not os.path.exists("refused-" + os.path.basename(os.environ["PHALANX_RUN_DIR"])) and time.monotonic() < deadline:
    time.sleep(0.01)
"""


def start_twice(folder: Path, *words: str) -> list[list[int]]:
    """Start a command twice at once, several times; return the exit codes."""
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(ROUNDS), str(WHOLE), *words],
        cwd=folder,
        env={**clean_environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [sorted(map(int, line.split())) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "more",
    [None, ["--overwrite"], ["--resume-from-checkpoint", "true"]],
    ids=["a new folder", "a run that is replaced", "a run that is resumed"],
)
def test_one_of_two_starts_in_a_folder_wins(tmp_path, more):
    words = ["train", "--script", "script.py", "--run-dir", "run-{round}", "--device", "cpu", "--num-workers", "1"]
    if more is not None:
        words += more
        for number in range(ROUNDS):
            (tmp_path / f"run-{number}").mkdir()
            old = RunRecord(["phalanx", "train"], str(tmp_path), {}, script="script.py", outcome="finished")
            old.write(tmp_path / f"run-{number}")
    assert start_twice(tmp_path, *words) == [[0, 2]] * ROUNDS
    scripts = (tmp_path / "runs-of-the-script").read_text().split()
    assert sorted(scripts) == sorted(f"run-{number}" for number in range(ROUNDS))
    for number in range(ROUNDS):
        outputs = [(tmp_path / f"output-{number}-{which}").read_text() for which in "ab"]
        refused = next(text for text in outputs if "run_dir = " in text)
        assert refused.count("phalanx: ") == 1
        assert "Traceback" not in refused
        record = json.loads((tmp_path / f"run-{number}" / "run.json").read_text())
        assert record["outcome"] == "finished"
        assert not (tmp_path / f"run-{number}" / ".started-by").exists()
