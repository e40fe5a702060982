"""`phalanx report`: runs that finished, were restarted, killed, and what is not a run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from command import end, phalanx, start, write_script
from waiting import LIMIT_SECONDS

SCRIPT = """
import os, signal, time
import torch
from torch.utils.data import TensorDataset
from phalanx import PyTorchDDPTrainer

rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

def at_step(info):
    time.sleep(0.02)
    if info.step == 8 and rank == 1 and attempt == 0 and KILLS:
        os.kill(os.getpid(), signal.SIGKILL)

data = TensorDataset(torch.randn(4000, 4), torch.randn(4000, 1))
PyTorchDDPTrainer(
    torch.nn.Linear(4, 1), loss_fn=torch.nn.functional.mse_loss, batch_size=2, max_steps=STEPS, device="cpu",
    callbacks=[at_step], checkpoint_frequency="3 steps", strategy="ring", log_every_n_steps=1000,
).fit(data)
"""


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)


def script(steps: int, *, kills: bool = False) -> Path:
    return write_script(Path("train.py"), SCRIPT.replace("KILLS", str(kills)).replace("STEPS", str(steps)))


def report(run: str) -> dict:
    answer = phalanx("report", run, "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert sum(found["seconds"].values()) == pytest.approx(found["total_seconds"])
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    return found


def test_a_finished_run():
    began = time.time()
    answer = phalanx("train", "--script", script(20), "--num-workers", 2, "--run-dir", "run")
    elapsed = time.time() - began
    assert answer.code == 0, answer.text
    assert "goodput" not in answer.text  # a short run's says nothing
    assert "goodput" in phalanx("runs", "show", "run").out
    assert "over the whole run" in answer.text
    found = report("run")
    assert (found["status"], found["steps"], found["attempts"]) == ("finished", 20, 1)
    assert 20 * 0.02 < found["total_seconds"] <= elapsed
    assert found["seconds"]["productive"] >= 19 * 0.02
    assert {"import", "startup", "data_wait", "checkpoint", "communication"} <= found["seconds"].keys()
    assert found["throughput"]["whole"] < found["throughput"]["steady"]
    shown = phalanx("report", "run").out
    assert all(word in shown for word in ("productive", "100.0%", "##"))


def test_a_restarted_run_has_lost_the_steps_since_its_checkpoint():
    words = ("--num-workers", 2, "--run-dir", "run", "--max-restarts", 1)
    answer = phalanx("train", "--script", script(20, kills=True), *words)
    assert answer.code == 0, answer.text
    found = report("run")
    assert (found["status"], found["steps"], found["attempts"]) == ("finished", 20, 2)
    assert found["redone_steps"] in (1, 2)  # rank 0 has ended step 7 or 8; the checkpoint is of step 6
    assert found["seconds"]["lost"] > 0
    assert found["seconds"]["recovery"] > 0
    steps = "1 step" if found["redone_steps"] == 1 else "2 steps"
    assert f", {steps} done again" in phalanx("report", "run").out
    assert "recovery" in answer.text


def test_a_run_whose_main_rank_was_killed():
    path = script(4000, kills=True)
    path.write_text(path.read_text().replace("step == 8 and rank == 1", "step == 30 and rank == 0"))
    answer = phalanx("train", "--script", path, "--num-workers", 2, "--run-dir", "run")
    assert answer.code == 137
    assert answer.err.splitlines()[-2:] == [
        "  To survive the loss of a rank: --max-restarts 2 (in Python: max_restarts=2)",
        "  To resume: phalanx resume run",
    ]
    assert "Logs:" not in answer.err  # the log of the rank is empty
    found = report("run")
    assert found["steps"] == 30  # by its heartbeats: nothing was logged
    assert found["seconds"]["productive"] >= 29 * 0.02


def test_a_run_that_is_running():
    process = start("train", "--script", script(4000), "--num-workers", 2, "--run-dir", "run", cwd=Path.cwd())
    try:
        deadline = time.time() + LIMIT_SECONDS
        while time.time() < deadline and not list(Path("run/checkpoints").glob("step-*")):
            time.sleep(0.1)
        assert report("run")["status"] == "running"
        process.terminate()
        process.wait(LIMIT_SECONDS)
    finally:
        end(process)
    assert report("run")["status"] == "preempted"


def test_what_is_not_a_run():
    Path("empty").mkdir()
    assert "is not the folder of a run" in phalanx("report", "empty").err
    Path("old").mkdir()
    Path("old/events.jsonl").write_text('{"event": "run_started", "time": 1.0}\n')
    answer = phalanx("report", "old")
    assert answer.code == 2
    assert "do not say where its time went" in answer.err
