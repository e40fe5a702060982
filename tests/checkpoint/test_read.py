"""Damaged, foreign and mismatching checkpoints each get their own words, and resuming falls back to a whole one."""

from __future__ import annotations

import json
import re

import pytest
import torch

from phalanx.checkpoint import Snapshot, choose, compare_model, load, load_newest, read_manifest, save, verify
from phalanx.errors import CheckpointError


def saved(directory, step: int):
    tensors = {"model": {"layers.0.weight": torch.ones(8, 4), "layers.0.bias": torch.zeros(8)}}
    return save(directory, Snapshot(step, 0, tensors, {"rng": 1}), run_id="run").path


def truncate(path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip_a_bit(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "truncated shard": (
        "shard-00000.safetensors",
        truncate,
        r"shard-00000\.safetensors is truncated: [\d,]+ bytes, but the manifest says",
    ),
    "changed shard": ("shard-00000.safetensors", flip_a_bit, r"shard-00000\.safetensors does not match its hash"),
    "missing rank file": ("rank-00000.pt", lambda path: path.unlink(), r"rank-00000\.pt is missing"),
    "truncated manifest": ("manifest.json", truncate, r"manifest\.json is truncated or not JSON"),
    "missing manifest": ("manifest.json", lambda path: path.unlink(), r"has no manifest\.json: it was not written"),
}


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_skipped_with_a_note(tmp_path, name, damage, words):
    whole, damaged = saved(tmp_path, 1), saved(tmp_path, 2)
    damage(damaged / name)
    chosen = choose(tmp_path)
    assert chosen.checkpoint.path == whole
    (note,) = chosen.notes
    assert note.startswith(f"passed over {damaged}: ")
    assert re.search(words, note), note


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_that_was_named_is_an_error(tmp_path, name, damage, words):
    damaged = saved(tmp_path, 2)
    damage(damaged / name)
    with pytest.raises(CheckpointError, match=words):
        choose(damaged)


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_where_the_only_one_is_damaged_nothing_begins_anew(tmp_path, name, damage, words):
    assert choose(tmp_path).checkpoint is None  # none yet
    damage(saved(tmp_path, 1) / name)
    for run_id in (None, "run"):  # a resume, and a restart of the run
        with pytest.raises(
            CheckpointError, match=rf"no checkpoint in .* is usable:\n  - passed over .*{words}"
        ) as failed:
            choose(tmp_path, run_id=run_id)
        assert "To begin anew, remove them" in failed.value.hint


def save_twice(directory: str) -> None:
    for step in (1, 2):
        state = {"model": {"w": torch.full((4,), float(step))}}
        save(directory, Snapshot(step, 0, state, {"seed": step, "rank": torch.distributed.get_rank()}), run_id="run")


def resume_on_ranks(directory: str) -> tuple[int, list[float], dict, list[str]]:
    template = {"model": {"w": torch.zeros(4)}}
    choice, filled, loaded = load_newest(directory, lambda found: template)
    return loaded.step, filled["model"]["w"].tolist(), loaded.rank_state, choice.notes


def test_all_ranks_fall_back_where_the_state_of_one_is_damaged(tmp_path, ranks):
    ranks(save_twice, str(tmp_path), world_size=2)
    flip_a_bit(tmp_path / "step-00000002" / "rank-00001.pt")
    found = ranks(resume_on_ranks, str(tmp_path), world_size=2)
    assert [(step, weight, state) for step, weight, state, _ in found] == [
        (1, [1.0] * 4, {"seed": 1, "rank": rank}) for rank in (0, 1)
    ]
    assert all("rank-00001.pt does not match its hash" in notes[0] for *_, notes in found)
    # Another number of ranks takes the states over, and so finds the damage too.
    template = {"model": {"w": torch.zeros(4)}}
    _, _, loaded = load_newest(tmp_path, lambda found: template, with_lost_ranks=True)
    assert (loaded.step, loaded.rank_state) == (1, None)
    assert [state["rank"] for state in loaded.taken_over] == [0, 1]


def choose_on_ranks(directory: str) -> tuple[int, list[str]]:
    chosen = choose(directory)
    return chosen.checkpoint.step, chosen.notes


def test_ranks_agree_although_each_hashes_a_share(tmp_path, ranks):
    saved(tmp_path, 1)
    flip_a_bit(saved(tmp_path, 2) / "rank-00000.pt")
    first, second = ranks(choose_on_ranks, str(tmp_path), world_size=2)
    assert first == second
    assert first[0] == 1
    assert "rank-00000.pt does not match its hash" in first[1][0]


def test_verify_names_every_problem_and_only_of_the_files_asked_for(tmp_path):
    path = saved(tmp_path, 1)
    truncate(path / "shard-00000.safetensors")
    (path / "rank-00000.pt").unlink()
    assert [problem.split()[0] for problem in verify(path)] == ["rank-00000.pt", "shard-00000.safetensors"]
    assert verify(path, ["index.json"]) == []


FOREIGN = {
    "torch.save": (["model.pt"], r"a directory of torch\.save files \(model\.pt\)"),
    "dcp": ([".metadata", "__0_0.distcp"], r"a torch\.distributed\.checkpoint directory without a Phalanx manifest"),
    "hf": (["config.json", "model.safetensors"], "a Hugging Face model directory"),
    "tf": (["checkpoint", "ckpt-1.index"], "a TensorFlow checkpoint directory"),
}


@pytest.mark.parametrize(("files", "words"), FOREIGN.values(), ids=FOREIGN)
def test_a_directory_of_another_library_is_recognised(tmp_path, files, words):
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"is not a Phalanx checkpoint: it looks like {words}") as caught:
        choose(tmp_path)
    assert "step-00000100" in caught.value.hint


def test_a_file_is_recognised(tmp_path):
    torch.save({}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"it looks like a single file, as torch\.save writes it"):
        choose(tmp_path / "model.pt")


def test_no_checkpoint_is_none_or_an_error(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert choose(tmp_path).checkpoint is None
    assert choose(tmp_path / "absent").checkpoint is None
    with pytest.raises(CheckpointError, match="absent does not exist"):
        choose(tmp_path / "absent", required=True)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        choose(tmp_path, required=True)


def test_a_manifest_that_was_edited_or_is_newer_is_refused(tmp_path):
    path = saved(tmp_path, 1)
    file = path / "manifest.json"
    body = json.loads(file.read_text())
    file.write_text(json.dumps({**body, "step": 7}))
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        read_manifest(path)
    file.write_text(json.dumps({**body, "format": 99}))
    with pytest.raises(CheckpointError, match="has format 99; this Phalanx reads up to 4"):
        read_manifest(path)


MODEL = {"layers.0.weight": ([8, 4], "float32"), "layers.0.bias": ([8], torch.float32)}
MISMATCH = {
    "shape": (
        {**MODEL, "layers.0.weight": ([16, 4], "float32")},
        r"layers\.0\.weight is \[8, 4\] in the checkpoint and \[16, 4\] in the model",
    ),
    "dtype": (
        {**MODEL, "layers.0.bias": ([8], torch.bfloat16)},
        r"layers\.0\.bias is float32 in the checkpoint and bfloat16",
    ),
    "missing": (
        {**MODEL, "layers.1.weight": ([2, 8], "float32"), "layers.1.bias": ([2], "float32")},
        r"layers\.1\.weight is in the model and not in the checkpoint.*2 of the model's 4 are missing and 0 are",
    ),
    "unexpected": (
        {"layers.0.weight": MODEL["layers.0.weight"]},
        r"layers\.0\.bias is in the checkpoint and not in the model",
    ),
    "renamed": (
        {"layer.0.weight": MODEL["layers.0.weight"], "layers.0.bias": MODEL["layers.0.bias"]},
        r"layer\.0\.weight is in the model and not in the checkpoint \(the checkpoint has layers\.0\.weight\)",
    ),
}


def test_the_same_model_is_accepted(tmp_path):
    compare_model(read_manifest(saved(tmp_path, 1)), MODEL)


@pytest.mark.parametrize(("model", "words"), MISMATCH.values(), ids=MISMATCH)
def test_another_model_is_named_by_its_first_mismatch(tmp_path, model, words):
    with pytest.raises(CheckpointError, match=words):
        compare_model(read_manifest(saved(tmp_path, 1)), model)


def test_loading_something_that_was_not_saved_names_it(tmp_path):
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"Missing key in checkpoint state_dict: optimizer\.lr"):
        load(choose(tmp_path).checkpoint, {"optimizer": {"lr": 0.1}})
