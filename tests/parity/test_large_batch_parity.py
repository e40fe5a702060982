"""LARS and LAMB on two ranks: sharded weights take the steps of whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.config import DistributedConfig
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.run.weights import whole_weights
from phalanx.zoo.models import build


def train(folder: str, optimizer: str, strategy: str) -> dict[str, Any]:
    torch.manual_seed(0)
    # 5 and 3 rows: the ranks' shards differ in size.
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 6, dtype=torch.float64, generator=draw), torch.arange(24) % 3)
    config = DistributedConfig(
        device="cpu",
        progress=False,
        optimizer=optimizer,
        strategy=strategy,
        batch_size=4,
        epochs=3,
        learning_rate=0.1,
        weight_decay=0.01,
    )
    task = TrainTask(model, DataLoader(data), loss_fn=nn.CrossEntropyLoss())
    Job("fit", task, config, Path(folder)).run()
    return {name: value.clone() for name, value in (whole_weights(model) or {}).items()}


@pytest.mark.parametrize("optimizer", ["lars", "lamb"])
def test_shards_take_the_steps_of_whole_weights(ranks, tmp_path, optimizer):
    whole = ranks(train, str(tmp_path / "ddp"), optimizer, "ddp", world_size=2)[0]
    sharded = ranks(train, str(tmp_path / "fsdp"), optimizer, "fsdp", world_size=2)[0]
    for name, value in whole.items():
        torch.testing.assert_close(sharded[name], value, rtol=0, atol=1e-12)


def train_decoder(folder: str, optimizer: str, batch_size: int, tensor_parallel: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build("gpt", layers=1, vocab_size=64, seq_len=16).double()
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (2, 8, 16), generator=draw)
    config = DistributedConfig(
        device="cpu",
        progress=False,
        optimizer=optimizer,
        tensor_parallel=tensor_parallel,
        batch_size=batch_size,
        epochs=2,
        learning_rate=0.01,
    )
    Job("fit", TrainTask(model, TensorDataset(*tokens)), config, Path(folder)).run()
    return {name: value.clone() for name, value in (whole_weights(model) or {}).items()}


@pytest.mark.parametrize("optimizer", ["lars", "lamb"])
def test_weights_cut_over_two_axes_take_the_steps_of_whole_ones(ranks, tmp_path, optimizer):
    """Tensor-parallel weights that are also sharded over the data ranks have strided shards."""
    whole = ranks(train_decoder, str(tmp_path / "one"), optimizer, 4, 1, world_size=1)[0]
    split = ranks(train_decoder, str(tmp_path / "four"), optimizer, 2, 2, world_size=4)[0]
    for name, value in whole.items():
        torch.testing.assert_close(split[name], value, rtol=0, atol=1e-12)
