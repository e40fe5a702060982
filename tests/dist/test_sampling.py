"""Sampling after training: every rank takes part, whichever part of the model it holds, and the result is one text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
from torch.utils.data import TensorDataset

from phalanx.config import DistributedConfig
from phalanx.loop.task import TrainTask
from phalanx.models import build
from phalanx.trainers.job import Job, run_job
from phalanx.trainers.recipe import SampleText, as_text

if TYPE_CHECKING:
    from phalanx.loop.hooks import Callback


class RecordedText(SampleText):
    """Records what would be reported."""

    text = ""

    def on_fit_end(self, trainer) -> None:
        with patch.object(trainer.report.events, "emit", lambda event: setattr(self, "text", event.text)):
            super().on_fit_end(trainer)


def sample(folder: str, **settings) -> str:
    torch.manual_seed(3)
    model = build("llama", layers=2, seq_len=16).double()
    tokens = torch.randint(32, 126, (8, 17), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    sampler: Callback = RecordedText("def ", 20)
    config = DistributedConfig(device="cpu", progress=False, max_steps=2, learning_rate=1e-2, **settings)
    run_job(Job("fit", TrainTask(model, data, callbacks=[sampler]), config, Path(folder)), in_place=True)
    assert model.training
    return sampler.text


@pytest.mark.parametrize("layout", [{"strategy": "ddp"}, {"strategy": "fsdp"}, {"tensor_parallel": 2}])
def test_every_layout_draws_the_text_of_one_process(ranks, tmp_path, layout):
    """The text outgrows seq_len, and passes through lengths that two ranks cannot share."""
    expected = ranks(lambda: sample(str(tmp_path), batch_size=4), world_size=1)[0]
    assert expected.startswith("def ")
    assert len(expected) >= len("def ") + 15
    batch_size = 4 if "tensor_parallel" in layout else 2
    assert set(ranks(lambda: sample(str(tmp_path), batch_size=batch_size, **layout), world_size=2)) == {expected}


def test_control_characters_do_not_reach_the_terminal():
    assert as_text([*b"a\x1b[31m\n\tb\xff", 300]) == "a\N{REPLACEMENT CHARACTER}[31m\n\tb\N{REPLACEMENT CHARACTER}"
