"""A checkpoint that another user prepared runs no code, does not hang, and is refused with a CheckpointError."""

from __future__ import annotations

import json
import os

import pytest
import torch

import phalanx
from phalanx.checkpoint import Snapshot, choose, entries, read_manifest, save
from phalanx.checkpoint.hashed_files import hash_file
from phalanx.checkpoint.manifest import _checksum
from phalanx.errors import CheckpointError


def saved(directory, step: int = 1):
    model = torch.nn.Linear(2, 1)
    return save(directory, Snapshot(step, 0, {"model": model.state_dict()}, {}), run_id="run").path


def rewrite(path, **changes) -> None:
    """Change a manifest and give it the checksum that fits: it is not keyed."""
    body = json.loads((path / "manifest.json").read_text())
    body.pop("checksum")
    body |= changes
    (path / "manifest.json").write_text(json.dumps({"checksum": _checksum(body), **body}))


def set_index(path, payload: bytes) -> None:
    (path / "index.json").write_bytes(payload)
    files = json.loads((path / "manifest.json").read_text())["files"]
    files["index.json"] = {"size": len(payload), "hash": hash_file(path / "index.json")}
    rewrite(path, files=files)


def changed_index(path, **changes) -> bytes:
    return json.dumps({**json.loads((path / "index.json").read_text()), **changes}).encode()


def weight_as(dtype: str = "float32", shape: object = (1, 2), file: int = 0, start: int = 4096) -> dict:
    return {"model.weight": [dtype, shape, [[[0, 0], shape, file, start]]]}


INDEXES = {
    "not JSON": b"pickle",
    "nested": b"[" * 100_000,
    "a list": b"[]",
    "a path": {"files": ["../../../etc/passwd"]},
    "a path of chunks": {"chunk_folder": "../other"},
    "the folder above": {"chunk_folder": ".."},
    "a folder of checkpoints": {"chunk_folder": "step-00000001"},
    "our manifest": {"files": ["manifest.json"]},
    "a line end": {"files": ["shard-00000.safetensors\n"]},
    "a rank that is a path": {"objects": {"model.x": "../x"}},
    "no values": {"tensors": {"model.weight": ["float32", [1, 2], []]}},
    "more than its file": {"tensors": {"model.weight": ["float32", [1 << 50, 2], [[[0, 0], [1 << 50, 2], 0, 4096]]]}},
    "a huge leaf": {"leaves": [[[1 << 50, "0" * 64]]]},
    "a wrong hash": {"leaves": [[[4, "../../x"]]]},
    "a type that is not one": {"tensors": weight_as("load")},
    "a negative shape": {"tensors": weight_as(shape=[-1, 2])},
    "a file that is not listed": {"tensors": weight_as(file=7)},
}


@pytest.mark.parametrize("content", INDEXES.values(), ids=INDEXES)
def test_an_index_of_any_content_is_refused(tmp_path, content):
    path = saved(tmp_path)
    set_index(path, content if isinstance(content, bytes) else changed_index(path, **content))
    with pytest.raises(CheckpointError, match="is not an index of tensors"):
        entries(choose(path).checkpoint)


@pytest.mark.parametrize("start", [1 << 50, -4096, 4100])
def test_an_index_that_points_outside_of_its_file_is_refused(tmp_path, start):
    path = saved(tmp_path)
    body = json.loads((path / "index.json").read_text())
    body["tensors"]["model.weight"][2][0][3] = start
    set_index(path, json.dumps(body).encode())
    trainer = phalanx.PyTorchDDPTrainer(model=torch.nn.Linear(2, 1))
    if start == 4100:  # inside of the file: other bytes, which are its own affair
        trainer.load(path)
        return
    with pytest.raises(CheckpointError, match="outside of shard-00000"):
        trainer.load(path)


NAMES = [
    *("/etc/passwd", "../x", "a/b", "a\\b", "", ".", "..", "~", "-rf", "\x1b[2J", "x\n", "x" * 9000, "index.json/"),
    *("manifest.json", "best.json", "rank-00001.pt\n", "rank-00001.pt\0", "rank-\u0660\u0660\u0660\u0660\u0661.pt"),
]


@pytest.mark.parametrize("name", NAMES, ids=[ascii(name[:20]) for name in NAMES])
def test_a_file_that_phalanx_does_not_write_is_refused(tmp_path, name):
    path = saved(tmp_path)
    files = json.loads((path / "manifest.json").read_text())["files"]
    rewrite(path, files={**files, name: {"size": 0, "hash": ""}})
    with pytest.raises(CheckpointError, match=r"it lists the file .*, which is not a name") as refused:
        read_manifest(path)
    assert str(refused.value).isprintable()


def nested(path) -> None:
    (path / "manifest.json").write_text("[" * 100_000)


def piped(path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def mistyped(path) -> None:
    rewrite(path, files=["no", "records"])


def piped_shard(path) -> None:
    files = json.loads((path / "manifest.json").read_text())["files"]
    (path / "rank-00000.pt").unlink()
    os.mkfifo(path / "rank-00000.pt")
    rewrite(path, files={**files, "rank-00000.pt": {"size": 0, "hash": ""}})


@pytest.mark.timeout(20)
@pytest.mark.parametrize("damage", [nested, piped, mistyped, piped_shard])
def test_a_manifest_of_any_content_is_skipped(tmp_path, damage):
    whole, bad = saved(tmp_path, 1), saved(tmp_path, 2)
    damage(bad)
    chosen = choose(tmp_path)
    assert chosen.checkpoint.path == whole
    assert chosen.notes[0].startswith(f"passed over {bad}: ")
