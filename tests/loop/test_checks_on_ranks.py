"""Silent corruption and slow ranks are found in real runs, and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import phalanx, write_script

SCRIPT = """
import os, time
import torch
from torch.utils.data import TensorDataset
from phalanx import PyTorchDDPTrainer

rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
samples = []

def at_step(info):
{hook}

data = TensorDataset(torch.randn(4000, 4), torch.randn(4000, 1))
PyTorchDDPTrainer(
    model, loss_fn=torch.nn.functional.mse_loss, device="cpu", callbacks=[at_step], run_dir="run",
).fit(data)
"""
FLIP = """
    if info.step == 13 and rank == 1 and attempt == 0:
        with torch.no_grad():
            model.weight.view(torch.int32)[0, 0] ^= 1
"""
SLEEP = """
    time.sleep(0.03 if rank == 1 else 0.001)
"""


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)


def train(hook: str, *words: object, ranks: int = 3) -> Any:
    path = write_script(Path("train.py"), SCRIPT.format(hook=hook))
    size = () if "--batch-size" in words else ("--batch-size", 2)
    return phalanx("train", "--script", path, "--num-workers", ranks, *size, *words)


def suspected() -> list[dict[str, Any]]:
    lines = Path("run/events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "rank_suspected"]


@pytest.mark.parametrize("strategy", ["ddp", "ring"])
def test_a_flipped_bit_stops_the_run_and_names_the_rank(strategy):
    answer = train(FLIP, "--check-replicas-every", 5, "--max-steps", 40, "--strategy", strategy)
    assert answer.code == 1, answer.text
    assert "silent corruption at step 15: the weights of rank 1 differ from those of the 2 other ranks" in answer.text
    (event,) = suspected()
    assert (event["step"], event["what"], event["ranks"], event["action"]) == (15, "corruption", [1], "stop")


def test_with_two_ranks_both_are_named_and_a_warning_lets_the_run_finish():
    words = ("--check-replicas-every", 10, "--on-corruption", "warn", "--max-steps", 20)
    answer = train(FLIP, *words, ranks=2)
    assert answer.code == 0, answer.text
    (event,) = suspected()
    assert (event["step"], event["ranks"]) == (20, [0, 1])
    assert "warning: step 20: the weights of ranks 0 and 1 differ" in answer.text


def test_no_corrupted_checkpoint_is_written_and_a_restart_goes_on_from_the_good_one():
    words = ("--check-replicas-every", 1000, "--checkpoint-frequency", "10 steps", "--max-restarts", 1)
    answer = train(FLIP, *words, "--max-steps", 40, ranks=2)
    assert answer.code == 0, answer.text
    assert "silent corruption at step 20" in answer.text
    lines = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert [line["first_step"] for line in lines if line["event"] == "run_started"] == [0, 10]


def test_a_slow_rank_is_named():
    answer = train(SLEEP, "--straggler-factor", 3, "--max-steps", 50)
    assert answer.code == 0, answer.text
    (event,) = suspected()
    assert (event["what"], event["ranks"], event["action"]) == ("straggler", [1], "warn")
    assert "rank 1 takes" in answer.text
    assert "rank 1 is on " in event["why"]


def test_equal_ranks_are_not_suspected():
    words = ("--check-replicas-every", 5, "--straggler-factor", 50, "--max-steps", 50)
    answer = train("    pass", *words, ranks=2)
    assert answer.code == 0, answer.text
    assert suspected() == []
