"""Scripts and loops of the user's under `phalanx train --script`: what runs, curves and searches know of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import phalanx

from phalanx.observe.history import History
from phalanx.run.stored import StoredRun
from phalanx.tools.ui.columns import RunEvents

RAW = """
import sys

import torch
import torch.distributed as dist

import phalanx

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(25):
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if "--log" in sys.argv:
        phalanx.log({"loss": loss, "rank": dist.get_rank()}, reduce="mean")
        if number == 20:
            phalanx.log("val/accuracy", 0.75)
del model
dist.destroy_process_group()
"""
LOOP = """
import os

import torch

import phalanx
from phalanx import Formation
from phalanx.zoo.data import load

with Formation(batch_size=64, log_every_n_steps=2) as f:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ.get("LR", "0.1")))
    model, optimizer, loader = f.prepare(model, optimizer, load("digits"))
    for epoch in range(2):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            f.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        f.log({"val/accuracy": 0.5 + epoch / 10, "speed": 3.0})
    last = f.step
phalanx.log({"after": last})
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def start(source: str, *words: str) -> tuple[StoredRun, str]:
        (tmp_path / "script.py").write_text(source)
        own = ["--", "--log"] if "--log" in words else []
        answer = phalanx("train", "--script", "script.py", "--num-workers", 2, "--device", "cpu", *own)
        assert answer.code == 0, answer.text
        return StoredRun(next((tmp_path / "runs").iterdir())), answer.text

    return start


def test_a_plain_script_has_steps(run):
    found, text = run(RAW)
    assert found.steps[0] == 25
    assert found.best is None
    history = History.from_events(found.events())
    assert [each["step"] for each in history.steps] == [10, 20, 25]
    assert all(
        each["loss"] is None and each["step_seconds"] > 0 and each["learning_rate"] == 0.1 for each in history.steps
    )
    assert "step" not in text  # the console of a script that logs nothing is its own


def test_what_a_plain_script_logs(run):
    found, text = run(RAW, "--log")
    history = History.from_events(found.events())
    assert [each["loss"] is not None for each in history.steps] == [True] * 3
    assert history.logged[-1]["values"]["rank"] == 0.5
    assert found.best == ("val/accuracy", 0.75)
    assert "step 10 loss " in text
    events = RunEvents(found.path / "events.jsonl")
    events.refresh()
    names = {name for part in events.curves(100) for name in part["curves"]}
    assert {"loss", "rank", "val/accuracy", "train/loss", "perf/step_seconds"} <= names


def test_a_loop_with_formation_is_shown_and_recorded(run):
    found, text = run(LOOP)
    assert found.steps[0] > 0
    assert found.status == "finished"
    assert found.best == ("val/accuracy", 0.6)
    assert "epoch 1" in text
    assert "val accuracy 0.6000" in text
    assert "Training finished" in text
    listed = phalanx("runs").out
    assert "val/accuracy 0.6" in listed
    assert f" {found.steps[0]} " in listed
    after = next(event for event in found.events() if "after" in event.get("values", {}))
    assert after["step"] == after["values"]["after"] == found.steps[0], "logged behind the loop: at its last step"


def test_a_search_compares_loops_by_what_they_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(LOOP)
    (tmp_path / "space.toml").write_text("seed = { choice = [1, 2] }")
    wanted = ("--metric", "speed", "--mode", "max", "--trials", 2, "--num-workers", 1, "--device", "cpu")
    answer = phalanx("tune", "--script", "script.py", "--space", "space.toml", *wanted)
    assert answer.code == 0, answer.text
    assert "speed" in answer.text
