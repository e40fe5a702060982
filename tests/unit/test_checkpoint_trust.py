"""A checkpoint that another user prepared runs no code, does not hang, and is refused with a CheckpointError."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint import metadata as torch_metadata

import phalanx
from phalanx.checkpoint import Snapshot, choose, entries, save
from phalanx.checkpoint.files import hash_file
from phalanx.checkpoint.manifest import _checksum
from phalanx.errors import CheckpointError

METADATA = "torch.distributed.checkpoint.metadata"


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
    (path / ".metadata").write_bytes(payload)
    files = json.loads((path / "manifest.json").read_text())["files"]
    files[".metadata"] = {"size": len(payload), "hash": hash_file(path / ".metadata")}
    rewrite(path, files=files)


def exploit(command: str) -> bytes:
    """Have `dataclass()` execute source text that it builds from the name of a field."""

    def text(value: str) -> bytes:
        return pickle.BINUNICODE + len(value.encode()).to_bytes(4, "little") + value.encode()

    def named(name: str) -> bytes:
        return pickle.GLOBAL + f"{METADATA}\n{name}\n".encode()

    def build(state: bytes) -> bytes:  # (None, attributes): they are set one by one, on classes too
        return pickle.NONE + pickle.EMPTY_DICT + state + pickle.TUPLE2 + pickle.BUILD

    name = f"x:__import__('os').system({command!r})"
    no_init = named("field") + pickle.EMPTY_TUPLE + pickle.REDUCE + build(text("init") + pickle.NEWFALSE + b"s")
    annotations = pickle.EMPTY_DICT + text(name) + text("int") + b"s"
    poisoned = text("__annotations__") + annotations + b"s" + text(name) + no_init + b"s"
    poisoned += text("__dataclass_fields__") + pickle.EMPTY_DICT + b"s"
    target = named("ChunkStorageMetadata") + build(poisoned) + b"0"
    return pickle.PROTO + b"\x02" + target + named("dataclass") + named("ChunkStorageMetadata") + b"\x85R."


def test_an_index_cannot_run_code(tmp_path):
    path, mark = saved(tmp_path / "kept"), tmp_path / "code-ran"
    set_index(path, exploit(f"touch {mark}"))
    trainer = phalanx.PyTorchDDPTrainer(model=torch.nn.Linear(2, 1))
    with pytest.raises(CheckpointError, match=r"names torch\.distributed\.checkpoint\.metadata\.\w+"):
        trainer.load(path)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        entries(choose(path).checkpoint)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["os", "torch", "dataclass", "field", "Enum", "Metadata.__init__", "__builtins__"])
def test_an_index_may_only_contain_its_record_types(tmp_path, name):
    path = saved(tmp_path)
    set_index(path, pickle.GLOBAL + f"{METADATA}\n{name}\n.".encode())
    with pytest.raises(CheckpointError, match="cannot be read"):
        entries(choose(path).checkpoint)


def test_an_index_does_not_change_the_record_types(tmp_path):
    path = saved(tmp_path)
    build = pickle.NONE + pickle.EMPTY_DICT + b"X\x08\x00\x00\x00__hash__" + pickle.NONE + b"s\x86b."
    set_index(path, pickle.PROTO + b"\x02" + pickle.GLOBAL + f"{METADATA}\nMetadataIndex\n".encode() + build)
    with pytest.raises(CheckpointError, match="changes the class MetadataIndex"):
        entries(choose(path).checkpoint)
    assert hash(torch_metadata.MetadataIndex("x"))


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
