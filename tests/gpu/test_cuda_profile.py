"""On a GPU: a profile with its split of each step, ranges for nsys, and the owners of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command import phalanx
from torch.utils.data import TensorDataset

from phalanx import PyTorchDDPTrainer
from phalanx.config import DistributedConfig
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.zoo.models.gpt import gpt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_parts() -> tuple[torch.nn.Module, TensorDataset]:
    torch.manual_seed(0)
    model = gpt("debug")
    tokens = torch.randint(0, model.config.vocab_size, (64, model.config.seq_len))
    return model, TensorDataset(tokens, tokens)


def analysis() -> dict:
    answer = phalanx("report", "run", "--profile", "--json")
    assert answer.code == 0, answer.text
    found = json.loads(answer.out)
    for split in found["splits"]:
        assert sum(split["seconds"].values()) == pytest.approx(split["wall"], rel=1e-6)
    return found


def test_a_gpt_with_ranges_for_nsys_and_owners_of_memory(monkeypatch):
    pushed = []
    real = torch.cuda.nvtx.range
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: pushed.append(name) or real(name))
    model, data = make_parts()
    PyTorchDDPTrainer(
        model, num_gpus=1, batch_size=4, max_steps=8, run_dir="run", profile="steps=3:6 memory nvtx", progress=False
    ).fit(data)
    assert {"data", "forward", "backward", "optimizer"} <= set(pushed)
    assert pushed.count("forward") == 8, "nsys sees the whole run"
    found = analysis()
    assert found["steps"] == [3, 4, 5, 6]
    assert all(split["seconds"]["compute"] > 0 for split in found["splits"])
    kernels = [each["name"] for each in found["operations"]["0"]]
    assert kernels
    assert not any(name.startswith("aten::") for name in kernels), "operations of a GPU are its kernels"
    assert any("." in each["name"] for each in found["modules"]["0"]), found["modules"]
    assert found["memory"]["0"]["peak"] > 0
    assert any(".py:" in owner for owner, _, _ in found["memory"]["0"]["owners"]), found["memory"]
    assert Path("run/profile/rank-0.memory.pickle").stat().st_size > 0
    shown = phalanx("report", "run", "--profile").out
    assert "https://pytorch.org/memory_viz" in shown
    assert "memory of rank 0 at its peak" in shown


def train_shared(folder: str, **settings: object) -> None:
    model, data = make_parts()
    config = DistributedConfig(
        device="cuda", communication_backend="gloo", batch_size=4, max_steps=6, progress=False, profile="steps=3:5",
        **settings,
    )  # fmt: skip
    Job("fit", TrainTask(model, data), config, Path(folder)).run()


@pytest.mark.parametrize("strategy", ["ddp", "ring", "fsdp"])
def test_ranks_that_share_a_gpu_are_linked(ranks, tmp_path, strategy):
    (tmp_path / "run").mkdir()
    ranks(lambda: train_shared(str(tmp_path / "run"), strategy=strategy), world_size=2)
    found = analysis()
    assert (found["ranks"], found["steps"]) == ([0, 1], [3, 4, 5])
    talked = [split["seconds"]["exposed"] + split["seconds"]["hidden"] for split in found["splits"]]
    assert min(talked) > 0
    events = Path("run/profile/trace.json.gz")
    assert events.stat().st_size > 0
