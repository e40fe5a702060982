"""Sampling after training: every rank takes part, whichever part of the model it holds, and the result is one text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

from phalanx.config import DistributedConfig
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.strategies.tensor_parallel import split_tensors
from phalanx.zoo.models import InnerAttention, build
from phalanx.zoo.recipe import SampleText, TextCode

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
    Job("fit", TrainTask(model, data, callbacks=[sampler]), config, Path(folder)).run()
    assert model.training
    return sampler.text


@pytest.mark.parametrize(
    "layout",
    [
        {"strategy": "ddp"},
        {"strategy": "fsdp"},
        {"tensor_parallel": 2},
        {"context_parallel": 2},
        {"pipeline_parallel": 2, "microbatches": 2},
    ],
)
def test_every_layout_draws_the_text_of_one_process(ranks, tmp_path, layout):
    """The text outgrows seq_len, and passes through lengths that two ranks cannot share."""
    expected = ranks(lambda: sample(str(tmp_path), batch_size=4), world_size=1)[0]
    assert expected.startswith("def ")
    assert len(expected) >= len("def ") + 15
    batch_size = 2 if "strategy" in layout else 4
    assert set(ranks(lambda: sample(str(tmp_path), batch_size=batch_size, **layout), world_size=2)) == {expected}


def cached_and_recomputed(name: str, tensor_parallel: int) -> list[list[list[int]]]:
    """Return greedy texts by both ways, of a model that is split over the ranks where it is to be."""
    torch.manual_seed(3)
    model = build(name, seq_len=16).double()
    for parameter in model.parameters():  # as initialised, a model repeats its last token
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    if tensor_parallel > 1:
        split_tensors(model, init_device_mesh("cpu", (tensor_parallel,)))
    prompts = [[5, 9, 2, 40, 77], [11], [200, 4, 19]]
    options = {"temperature": 0, "multiple": tensor_parallel}
    found = [model.generate(prompts, 14, cached=cached, **options) for cached in (True, False)]
    heads = {layer.attention.inner for layer in model.layers}
    assert all(type(inner) is InnerAttention for inner in heads)
    return found


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_tensor_parallel_ranks_cache_their_own_heads(ranks, name):
    expected = ranks(lambda: cached_and_recomputed(name, 1), world_size=1)[0]
    assert expected[0] == expected[1]
    assert len(set(expected[0][0])) > 8  # else equal tokens would prove little
    assert ranks(lambda: cached_and_recomputed(name, 2), world_size=2) == [expected] * 2


def test_control_characters_do_not_reach_the_terminal():
    assert (
        TextCode(None).decode([*b"a\x1b[31m\n\tb\xff", 300])
        == "a\N{REPLACEMENT CHARACTER}[31m\n\tb\N{REPLACEMENT CHARACTER}"
    )
