"""What is saved comes back bit for bit: one rank, two ranks, and another number of ranks."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # The first optimizer step imports it, and it sets an environment variable of its own.
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from phalanx.checkpoint import Snapshot, choose, list_checkpoints, load, save, verify
from phalanx.errors import CheckpointError


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 / (seed + 1))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def assert_same(one, other, where="") -> None:
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}[{index}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    else:
        assert one == other, where


def test_one_process_loads_every_bit(tmp_path):
    saved = state_of(*trained())
    rng = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    shared = {"position": {"epoch": 1, "batch": 7}, "history": [1.5, float("inf")]}
    result = save(tmp_path, Snapshot(12, 1, saved, rng, shared), run_id="run", mesh={"dp": 1}, config={"lr": 0.01})
    template = state_of(*trained(seed=1))
    chosen = choose(tmp_path, required=True)
    loaded = load(chosen.checkpoint, template)

    assert_same(template, saved)
    assert (loaded.step, loaded.epoch, loaded.shared, loaded.notes) == (12, 1, shared, [])
    assert loaded.rank_state["python"] == rng["python"]
    assert torch.equal(loaded.rank_state["torch"], rng["torch"])
    assert loaded.rank_state["numpy"][0] == "MT19937"
    assert np.array_equal(loaded.rank_state["numpy"][1], rng["numpy"][1])
    assert loaded.rank_state["numpy"][1].dtype == rng["numpy"][1].dtype
    random.setstate(loaded.rank_state["python"])
    np.random.set_state(loaded.rank_state["numpy"])
    assert result.path == tmp_path / "step-00000012"
    assert result.bytes == sum(file.stat().st_size for file in result.path.iterdir() if file.name != "manifest.json")
    manifest = chosen.checkpoint.manifest
    assert (manifest.mesh, manifest.config, manifest.world_size) == ({"dp": 1}, {"lr": 0.01}, 1)
    assert manifest.tensors["0.weight"].shape == (16, 6)
    assert manifest.tensors["1.num_batches_tracked"].dtype == "int64"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000012"]


def save_on_ranks(directory: str) -> dict:
    rank = torch.distributed.get_rank()
    state = state_of(*trained())
    save(directory, Snapshot(3, 0, state, {"rank": rank}, {"seen": 24}), run_id="run")
    template = state_of(*trained(seed=1))
    chosen = choose(directory, required=True)
    loaded = load(chosen.checkpoint, template)
    assert_same(template, state)
    assert loaded.rank_state == {"rank": rank}
    assert loaded.shared == {"seen": 24}
    assert verify(chosen.checkpoint.path) == []
    return {"files": sorted(chosen.checkpoint.manifest.files), "state": state}


def test_two_ranks_load_every_bit_and_one_rank_can_continue(tmp_path, ranks):
    results = ranks(save_on_ranks, str(tmp_path), world_size=2)
    expected = ["index.json", "rank-00000.pt", "rank-00001.pt", "shard-00000.safetensors", "shard-00001.safetensors"]
    assert [result["files"] for result in results] == [expected] * 2

    saved, template = results[0]["state"], state_of(*trained(seed=1))
    loaded = load(choose(tmp_path, required=True).checkpoint, template)
    assert_same(template, saved)
    assert loaded.rank_state is None
    assert loaded.notes == ["saved by 2 ranks and resumed by 1: each rank's random state starts afresh"]


def save_replicated(directory: str) -> None:
    tensors = {"model": {f"w{index}": torch.full((64, 1024), float(index)) for index in range(8)}}
    save(directory, Snapshot(1, 0, tensors), run_id="run")


def test_replicated_tensors_are_written_once_and_evenly(tmp_path, ranks):
    ranks(save_replicated, str(tmp_path), world_size=2)
    (checkpoint,) = list_checkpoints(tmp_path)
    sizes = {name: record.size for name, record in checkpoint.manifest.files.items() if name.startswith("shard-")}
    once = 8 * 64 * 1024 * 4
    assert once <= sum(sizes.values()) < 1.1 * once
    assert max(sizes.values()) < 0.6 * once


def save_sharded(directory: str) -> dict:
    from torch.distributed.fsdp import fully_shard

    model, _ = trained()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model)
    save(directory, Snapshot(1, 0, {"model": model.state_dict()}), run_id="run")
    return whole


def test_shards_of_two_ranks_load_whole_on_one(tmp_path, ranks):
    whole, _ = ranks(save_sharded, str(tmp_path), world_size=2)
    checkpoint = choose(tmp_path, required=True).checkpoint
    assert checkpoint.manifest.tensors["0.weight"].shape == (16, 6)
    template = {"model": trained(seed=1)[0].state_dict()}
    load(checkpoint, template)
    assert_same(dict(template["model"]), whole)


def test_a_part_of_a_checkpoint_can_be_loaded(tmp_path):
    state = state_of(*trained())
    save(tmp_path, Snapshot(1, 0, state), run_id="run")
    template = {"model": trained(seed=1)[0].state_dict()}
    load(choose(tmp_path).checkpoint, template)
    assert_same(template["model"], state["model"])


VALUES = {
    "numbers as keys": {2: 5, 10: 7, 1.5: None, True: "yes"},
    "tuples": (1, [2, (3,)], {(1, "a"): {"b": (4,)}}),
    "our own marks": {"__phalanx_tuple__": [1], "x": {"__phalanx_pairs__": 2}},
    "texts as keys": {"2": 5, "10": [7]},
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_come_back_as_they_were(tmp_path, value):
    save(tmp_path, Snapshot(1, 0, {}, None, {"value": value}), run_id="run", config={"given": value})
    found = choose(tmp_path, required=True).checkpoint
    assert found.manifest.config == {"given": value}
    loaded = load(found, {}).shared["value"]
    assert loaded == value
    assert repr(loaded) == repr(value)  # keys and containers of the same types


def test_state_that_would_need_code_to_load_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"rank_state\['where'\] is a pathlib\.\w*\.?PosixPath"):
        save(tmp_path, Snapshot(1, 0, {}, {"where": Path("/")}), run_id="run")
    with pytest.raises(CheckpointError, match=r"model\.hook is a builtins.function"):
        save(tmp_path, Snapshot(1, 0, {"model": {"hook": trained}}), run_id="run")
    with pytest.raises(CheckpointError, match=r"shared\['loader'\] cannot be stored as JSON: it is a .*set"):
        save(tmp_path, Snapshot(1, 0, {}, None, {"loader": {1, 2}}), run_id="run")
    assert list(tmp_path.iterdir()) == []
