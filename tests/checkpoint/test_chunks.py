"""Full and incremental checkpoints: what they hold, what they write, and what pruning leaves."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import phalanx
from phalanx.checkpoint import Snapshot, choose, list_checkpoints, load, read_index, save, verify
from phalanx.checkpoint.layout import Extent, lay_out
from phalanx.errors import CheckpointError

KINDS = ("sharded", "full", "incremental")
ODD = {
    "half": torch.randn(7, 3).half(),
    "brain": torch.randn(5).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(11, dtype=torch.uint8),
    "long": torch.arange(4),
    "complex": torch.randn(3, dtype=torch.complex128),
    "nothing": torch.zeros(0, 4),
    "number": torch.tensor(1.5),
    "large": torch.randn(1_500_000),
    "strided": torch.randn(40, 30).t(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_and_shape_comes_back(tmp_path, kind):
    save(tmp_path, Snapshot(1, 0, {"model": ODD}), run_id="run", kind=kind)
    template = {"model": {name: torch.zeros_like(value) for name, value in ODD.items()}}
    checkpoint = choose(tmp_path).checkpoint
    load(checkpoint, template)
    for name, value in ODD.items():
        assert torch.equal(template["model"][name], value), name
    assert checkpoint.manifest.kind == kind
    assert verify(checkpoint.path) == []


def test_the_files_open_with_safetensors(tmp_path):
    for kind, file in (("full", "state.safetensors"), ("sharded", "shard-00000.safetensors")):
        path = save(tmp_path / kind, Snapshot(1, 0, {"model": ODD}), run_id="run", kind=kind).path
        opened = load_file(path / file)
        for name, value in ODD.items():
            found = opened[f"model.{name}"]
            found = found.view(value.dtype) if name == "complex" else found  # safetensors has no such type
            assert torch.equal(found, value), name


def save_shards(directory: str, kind: str) -> dict:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 33), nn.Linear(33, 3))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model)
    save(directory, Snapshot(1, 0, {"model": model.state_dict(), "count": 7}, {}), run_id="run", kind=kind)
    template = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}, "count": 0}
    load(choose(directory).checkpoint, template)
    assert template["count"] == 7
    assert all(torch.equal(template["model"][name].full_tensor(), value) for name, value in whole.items())
    return whole


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_three_ranks_are_one_state(tmp_path, ranks, kind):
    whole, *_ = ranks(save_shards, str(tmp_path), kind, world_size=3)
    checkpoint = choose(tmp_path, required=True).checkpoint
    template = {"model": {name: torch.zeros_like(value) for name, value in whole.items()}}
    load(checkpoint, template)
    assert all(torch.equal(template["model"][name], value) for name, value in whole.items())
    files = sorted(name for name in checkpoint.manifest.files if name.endswith(".safetensors"))
    if kind == "full":
        assert files == ["state.safetensors"]
        opened = load_file(checkpoint.path / "state.safetensors")
        assert all(torch.equal(opened[f"model.{name}"], value) for name, value in whole.items())
    else:
        assert len(files) == (3 if kind == "sharded" else 0)


def load_by_columns(directory: str) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    shapes = {"0.weight": (33, 6), "1.weight": (3, 33)}
    template = {name: distribute_tensor(torch.zeros(shape), mesh, [Shard(1)]) for name, shape in shapes.items()}
    load(choose(directory, required=True).checkpoint, {"model": template})
    return {name: value.full_tensor() for name, value in template.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_four_ranks_load_as_columns_of_two(tmp_path, ranks, kind):
    whole, *_ = ranks(save_shards, str(tmp_path), kind, world_size=4)
    for found in ranks(load_by_columns, str(tmp_path), world_size=2):
        assert all(torch.equal(value, whole[name]) for name, value in found.items())


def test_lora_on_a_frozen_base_writes_under_five_percent(tmp_path):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
            self.head = nn.Linear(512, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(inputs))

    data = torch.utils.data.TensorDataset(torch.randn(64, 512), torch.randint(0, 4, (64,)))
    trainer = phalanx.PyTorchDDPTrainer(
        model=Net(), loss_fn=nn.functional.cross_entropy, lora_rank=2, lora_targets="blocks*", max_steps=8,
        checkpoint_dir=str(tmp_path), checkpoint_frequency="2 steps", checkpoint_kind="incremental", keep_last=None,
        run_dir=str(tmp_path / "run"), batch_size=8,
    )  # fmt: skip
    trainer.fit(data)
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    found = [event for event in map(json.loads, lines) if event["event"] == "checkpoint"]
    assert len(found) == 4
    for event in found[1:]:
        assert event["written"] < 0.05 * event["bytes"], event


def state(value: float) -> Snapshot:
    return Snapshot(int(value), 0, {"model": {"w": torch.full((5000,), value), "frozen": torch.ones(90_000)}})


def chunks_in(directory) -> set[str]:
    return {path.name for path in directory.glob(".chunks-*/*/*")}


def test_every_increment_restores_alone_and_pruning_keeps_what_is_used(tmp_path):
    for step in (1, 2, 3):
        saved = save(tmp_path, state(step), run_id="run", kind="incremental", keep_last=2)
    assert saved.written < 0.2 * saved.bytes
    first, second = list_checkpoints(tmp_path)
    assert chunks_in(tmp_path) == {
        leaf.hash for one in (first, second) for leaves in read_index(one).leaves.values() for leaf in leaves
    }
    shutil.rmtree(second.path)
    save(tmp_path, state(4), run_id="run", kind="incremental", keep_last=1)
    template = {"model": {"w": torch.zeros(5000), "frozen": torch.zeros(90_000)}}
    load(choose(tmp_path, required=True).checkpoint, template)
    assert template["model"]["w"].eq(4).all()
    assert template["model"]["frozen"].eq(1).all()
    assert len(chunks_in(tmp_path)) == 3  # header, w, frozen


def test_a_state_that_comes_back_after_its_chunks_were_pruned_is_written_again(tmp_path):
    from phalanx.checkpoint import Request, Saver

    saver = Saver()
    for step, value in enumerate((1.0, 2.0, 1.0), 1):
        snapshot = Snapshot(step, 0, {"model": {"w": torch.full((5000,), value)}})
        saver.begin(snapshot, Request(directory=tmp_path, run_id="run", kind="incremental", keep_last=1))
        saver.finish()
    assert verify(choose(tmp_path, required=True).checkpoint.path) == []
    saver.release()


def test_runs_that_share_a_directory_do_not_prune_each_others_chunks(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, state(step), run_id="one", kind="incremental", keep_last=1)
        save(tmp_path, state(step), run_id="other", kind="incremental", keep_last=1)
    assert [verify(one.path) for one in list_checkpoints(tmp_path)] == [[], []]


@pytest.mark.parametrize("how", ["missing", "changed"])
def test_a_damaged_chunk_is_found(tmp_path, how):
    intact = save(tmp_path, state(1), run_id="run", kind="incremental").path
    before = chunks_in(tmp_path)
    damaged = save(tmp_path, state(2), run_id="run", kind="incremental").path
    (new,) = [path for path in tmp_path.glob(".chunks-*/*/*") if path.name not in before]
    new.unlink() if how == "missing" else new.write_bytes(bytes(new.stat().st_size))
    chosen = choose(tmp_path)
    assert chosen.checkpoint.path == intact
    assert chosen.notes[0].startswith(f"passed over {damaged}: the chunk .chunks-run/")
    with pytest.raises(CheckpointError, match=r"is missing or does not match its hash"):
        choose(damaged)
    # The next save of the same content repairs it.
    save(tmp_path, state(2), run_id="run", kind="incremental")
    assert choose(tmp_path).checkpoint.path == damaged


def test_keep_every_holds_for_all_kinds(tmp_path):
    for kind in KINDS:
        for step in range(1, 8):
            save(tmp_path / kind, state(step), run_id="run", kind=kind, keep_last=1, keep_every=3)
        assert sorted(one.step for one in list_checkpoints(tmp_path / kind)) == [3, 6, 7]
        assert all(verify(one.path) == [] for one in list_checkpoints(tmp_path / kind))


def test_extents_are_aligned_and_cut_at_large_tensors():
    shapes = [(3, torch.uint8), (5000, torch.float32), (7, torch.float64), (2_000_000, torch.float32), (9, torch.int16)]
    layout = lay_out(Extent(f"t{n}", (0,), (size,), dtype, True) for n, (size, dtype) in enumerate(shapes))
    assert all(extent.start % extent.dtype.itemsize == 0 for extent in layout.pieces)
    cuts = layout.cuts()
    assert [start for start, _ in cuts][1:] == [start + size for start, size in cuts][:-1]
    assert sum(size for _, size in cuts) == layout.size
    large = [extent.start for extent in layout.pieces if extent.bytes >= 4096]
    assert set(large) <= {start for start, _ in cuts}
