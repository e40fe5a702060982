"""Two commands that start or replace a run in one folder at the same moment: one does, the other is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from command import clean_environment

from phalanx.run.record import RunRecord

ROUNDS = 12
"""How often two commands start at once."""

COMMAND = """
import os, sys

from phalanx.cli import main, train  # both begin with it imported, so that they are as close as two can be

print("ready", flush=True)
sys.stdin.read()  # which ends for both at once
code = main(sys.argv[2:])
if code:
    open("refused-" + sys.argv[1], "w").close()
sys.exit(code)
"""

SCRIPT = """
import os, time
with open("runs-of-the-script", "a") as file:
    file.write(os.environ["PHALANX_RUN_DIR"] + chr(10))
limit = time.monotonic() + 240  # if neither is refused, the test is to say so
while not os.path.exists("refused-" + os.path.basename(os.environ["PHALANX_RUN_DIR"])) and time.monotonic() < limit:
    time.sleep(0.01)
"""


def start_twice(folder: Path, run: str, *words: str) -> list[tuple[int, str]]:
    """Start a command twice at once; return the exit codes and what was said, the winner first."""
    held, gate = os.pipe()
    both = [
        programs.Popen(
            [sys.executable, "-c", COMMAND, run, *words],
            cwd=folder,
            env=clean_environment(),
            stdin=held,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    os.close(held)
    for each in both:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    os.close(gate)
    said = [each.communicate()[0] for each in both]
    return sorted((each.returncode, text) for each, text in zip(both, said, strict=True))


@pytest.mark.parametrize(
    "more",
    [None, ["--overwrite"], ["--resume-from-checkpoint", "true"]],
    ids=["a new folder", "a run that is replaced", "a run that is resumed"],
)
def test_one_of_two_starts_in_a_folder_wins(tmp_path, more):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["train", "--script", "script.py", "--device", "cpu", "--num-workers", "1", *(more or [])]
    runs = [f"run-{number}" for number in range(ROUNDS)]
    for run in runs:
        if more is not None:
            (tmp_path / run).mkdir()
            old = RunRecord(["phalanx", "train"], str(tmp_path), {}, script="script.py", outcome="finished")
            old.write(tmp_path / run)
        (won, said), (lost, refused) = start_twice(tmp_path, run, *words, "--run-dir", run)
        assert (won, lost) == (0, 2), said + refused
        assert "run_dir = " in refused
        assert refused.count("phalanx: ") == 1
        assert "Traceback" not in refused
        assert json.loads((tmp_path / run / "run.json").read_text())["outcome"] == "finished"
        assert not (tmp_path / run / ".started-by").exists()
    assert (tmp_path / "runs-of-the-script").read_text().split() == runs
