"""Ranks that share a GPU by gloo: a lost one is replaced in place, and the weights are those of a quiet run."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Kill(phalanx.Callback):
    def __init__(self, mark) -> None:
        self.mark = mark

    def on_step_end(self, trainer, info) -> None:
        if trainer.formation.rank == 1 and info.step == 12 and not self.mark.exists():
            self.mark.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, callbacks):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    inputs = torch.randn(512, 32, generator=torch.Generator().manual_seed(2))
    trainer = phalanx.PyTorchDDPTrainer(
        model=model,
        num_workers=2,
        device="cuda",
        communication_backend="gloo",
        batch_size=8,
        strategy="ddp",
        check_replicas_every=5,
        max_steps=30,
        max_restarts=3,
        progress=False,
        run_dir=str(folder),
        callbacks=callbacks,
    )
    trainer.fit(TensorDataset(inputs, inputs[:, :4].argmax(1)))
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [tensor.cpu() for tensor in model.state_dict().values()], events


def test_a_lost_rank_is_replaced(tmp_path):
    """Not for fsdp: torch 2.11 crashes in gloo's gathers of a GPU's DTensors."""
    quiet, _ = train(tmp_path / "quiet", [])
    hit, events = train(tmp_path / "hit", [Kill(tmp_path / "killed")])
    (recovered,) = [event for event in events if event["event"] == "recovered"]
    assert (recovered["lost"], recovered["lost_steps"]) == ([1], 0)
    for one, other in zip(quiet, hit, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
