"""`phalanx submit ray`: Ray's job API on a head and a second node, each a network namespace."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import command
import pytest
from long_proofs import long_proof
from packages import require
from ray_cluster_hosts import TwoMachines, ray_environment, why_no_namespaces

require("ray", "Ray is not installed: pip install 'phalanx[ray]'")
require("aiohttp_cors", "Ray's dashboard is not installed: pip install 'ray[default]'")

TRAIN = ["digits", "--device", "cpu", "--num-workers", "2"]


@pytest.fixture(scope="module")
def machines():
    if (reason := why_no_namespaces()) is not None:
        pytest.skip(reason)
    found = TwoMachines(dashboard_port=32265)
    try:
        found.up()
        yield found
    finally:
        found.down()


@pytest.fixture
def phalanx(machines, tmp_path):
    """Return a function that runs the command line on the head's machine."""
    environment = ray_environment(XDG_STATE_HOME=str(tmp_path / "state"), XDG_CONFIG_HOME=str(tmp_path / "config"))

    def run(*words: str, code: int = 0) -> str:
        program = machines.command(sys.executable, "-m", "phalanx", *words)
        found = subprocess.run(
            program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert found.returncode == code, found.stdout + found.stderr
        return found.stdout + found.stderr

    return run


def state_of(phalanx, job: str) -> str:
    return str(json.loads(phalanx("jobs", "show", job, "--json"))["state"])


@long_proof
def test_a_job_runs_on_the_cluster(phalanx, machines):
    address = ("--address", machines.dashboard)
    words = ("submit", "ray", *TRAIN, *address, "--max-steps", "10", "--job-name", "two")
    assert "submitted two as ray job two" in phalanx(*words)
    output = phalanx("jobs", "logs", "two", "-f")
    assert "10/10" in output, output
    assert state_of(phalanx, "two") == "finished"
    assert "step 10/10" in phalanx("jobs", "show", "two")


@long_proof
def test_shipped_code_runs_and_a_job_is_cancelled(phalanx, machines, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, time\nprint('in', os.getcwd(), flush=True)\ntime.sleep(600)\n", encoding="utf-8"
    )
    words = ("--script", "mine.py", "--num-workers", "2", "--device", "cpu", "--ship", "archive")
    phalanx("submit", "ray", *words, "--address", machines.dashboard, "--job-name", "long")
    end = time.monotonic() + 120
    while "in /" not in (said := phalanx("jobs", "logs", "long")):
        assert time.monotonic() < end, said
        time.sleep(1)
    assert str(tmp_path) not in said.partition("in /")[2].splitlines()[0], "the code was copied"
    assert "is not finished" in phalanx(
        "submit", "ray", *words, "--address", machines.dashboard, "--job-name", "long", code=2
    )
    phalanx("jobs", "cancel", "long")
    assert state_of(phalanx, "long") == "cancelled"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "ray needs the cluster's address"),
        (("--address", "head:6379"), "expected the dashboard's URL"),
        (("--address", "http://127.0.0.1:9"), "http://127.0.0.1:9: "),
        (("--address", "http://127.0.0.1:9", "--kind", "pod"), "not one of 'job', 'rayjob', 'raycluster'"),
    ],
)
def test_bad_input(words, said, tmp_path, monkeypatch):
    """It needs no cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    answer = command.phalanx("submit", "ray", *TRAIN, "--job-name", "bad", *words)
    assert (answer.code, said in answer.err) == (2, True), answer.text
    assert not list(Path(tmp_path, "state").rglob("bad*"))
