"""The examples of 10-tuning run as their first lines say, and show what they promise."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import programs
import pytest
from command import ROOT, clean_environment
from long_proofs import long_proof
from packages import require

EXAMPLES = ROOT / "examples" / "10-tuning"

require("optuna", "optuna is not installed: pip install 'phalanx[tune]'")


def run(*words, cwd):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = clean_environment(PHALANX_DEVICE="cpu", PATH=path)
    done = programs.run([str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@long_proof
def test_the_function_saves_epochs(tmp_path):
    text = run(sys.executable, EXAMPLES / "tune_function.py", "--samples", 5, cwd=tmp_path)
    taken, full = map(int, re.search(r"(\d+) epochs instead of (\d+)", text).groups())
    assert full == 45
    assert taken < full
    assert float(re.search(r"accuracy ([\d.]+)\n\d+ epochs", text)[1]) > 0.8
    assert (tmp_path / "asha/study.html").exists()


@long_proof
def test_the_population_exchanges_weights(tmp_path):
    text = run("bash", EXAMPLES / "population.sh", "--trials", 3, "--epochs", 2, cwd=tmp_path)
    trials = json.loads((tmp_path / "population/trials.json").read_text())
    assert [len(trial["lineage"]) for trial in trials].count(1) == 1
    assert "continues from trial" in text


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.[ps][yh]")), ids=lambda path: path.name)
def test_each_example_opens_with_its_command_and_is_in_the_readme(path):
    head = "\n".join(path.read_text().splitlines()[:12])
    assert re.search(rf"^#?\s+.*(python|bash) .*{re.escape(path.name)}", head, flags=re.MULTILINE)
    assert f"[`{path.name}`]({path.name})" in (EXAMPLES / "README.md").read_text()
