"""Packed documents under every layout that knows masks: the weights of one process."""

from __future__ import annotations

import pytest
import torch
from layouts import MODELS, assert_same
from token_folders import make_documents, write_folder

from phalanx import PyTorchDDPTrainer
from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.run.weights import whole_weights
from phalanx.zoo.data import load


def train(folder: str, name: str, batch_size: int, **settings) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    torch.manual_seed(3)
    # The balance loss of a mixture is a mean over sequences, and cannot be weighed by labels.
    model = MODELS[name](layers=2, vocab_size=61, seq_len=16, **({"balance": 0.0} if name == "moe" else {})).double()
    train, val = (load(f"{folder}/shards", split, seq_len=16, packing="documents") for split in ("train", "val"))
    defaults = {"device": "cpu", "progress": False, "learning_rate": 1e-2, "run_dir": f"{folder}/run", "max_steps": 4}
    trainer = PyTorchDDPTrainer(model, DistributedConfig(**defaults, batch_size=batch_size, **settings))
    history = trainer.fit(train, val)
    weights = whole_weights(trainer.model)
    assert weights is not None
    return {key: value.cpu().clone() for key, value in weights.items()}, history.epochs[-1].val


@pytest.fixture
def folder(tmp_path) -> str:
    # The last sequences have much padding: a mean over the labels of all ranks is not the mean of their means.
    write_folder(tmp_path / "shards", [make_documents(60, longest=14)])
    return str(tmp_path)


@pytest.mark.parametrize(
    ("name", "settings", "batch_size"),
    [
        ("gpt", {}, 2),
        ("gpt", {"tensor_parallel": 2}, 4),
        ("llama", {"tensor_parallel": 2}, 4),
        ("llama", {"strategy": "fsdp", "activation_checkpointing": True}, 2),
        ("moe", {"strategy": "fsdp", "expert_parallel": 2}, 2),
    ],
)
def test_two_ranks_train_as_one(ranks, folder, name, settings, batch_size):
    ((expected, metrics),) = ranks(lambda: train(folder, name, 4), world_size=1)
    for weights, found in ranks(lambda: train(folder, name, batch_size, **settings), world_size=2):
        assert_same(weights, expected, 1e-8, str(settings))
        assert found["loss"] == pytest.approx(metrics["loss"], abs=1e-8)


@pytest.mark.parametrize("setting", ["context_parallel", "pipeline_parallel"])
def test_layouts_without_masks_refuse_packed_documents(ranks, folder, setting):
    with pytest.raises(UsageError, match=f"{setting} cannot keep documents apart"):
        ranks(lambda: train(folder, "llama", 4, **{setting: 2}), world_size=2)
