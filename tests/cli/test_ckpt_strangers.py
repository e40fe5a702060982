"""`phalanx ckpt` on checkpoints that another user prepared: nothing outside of them and of the target is touched."""

from __future__ import annotations

import contextlib
import json
import os
import shutil

import pytest
import torch
from command import phalanx

from phalanx.checkpoint import Snapshot, load_newest, save
from phalanx.checkpoint.hashed_files import hash_bytes
from phalanx.checkpoint.manifest import _checksum
from phalanx.errors import CheckpointError

SECRET = b"my thesis"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Return a folder with two checkpoints of each kind, and a folder of the user's."""
    top = tmp_path_factory.mktemp("good")
    for kind in ("sharded", "incremental"):
        for step in (1, 2):
            state = {"model": {"w": torch.arange(24.0).reshape(6, 4) + step}}
            save(top / kind, Snapshot(step, 0, state, {}), run_id="run", kind=kind)
    return top


def rewrite(path, **changes) -> None:
    """Change a manifest and give it the checksum that fits: it is not keyed."""
    body = json.loads((path / "manifest.json").read_text())
    body.pop("checksum")
    body |= changes
    (path / "manifest.json").write_text(json.dumps({"checksum": _checksum(body), **body}))


def files_of(path) -> dict:
    return json.loads((path / "manifest.json").read_text())["files"]


def listing(name: str):
    record = {"size": len(SECRET), "hash": hash_bytes(SECRET)}
    return lambda path: rewrite(path, files={**files_of(path), name: record})


def index(**changes):
    def change(path) -> None:
        data = json.dumps({**json.loads((path / "index.json").read_text()), **changes}).encode()
        (path / "index.json").write_bytes(data)
        rewrite(path, files={**files_of(path), "index.json": {"size": len(data), "hash": hash_bytes(data)}})

    return change


def linked(name: str):
    def change(path) -> None:
        if name in files_of(path):
            listing(name)(path)
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(path.parents[1] / "home" / "thesis")

    return change


def linked_chunks(path) -> None:
    shutil.rmtree(path.parent / ".chunks-run")
    (path.parent / ".chunks-run").symlink_to(path.parents[1] / "home")


def linked_part_of_chunks(path) -> None:
    (path.parent / ".chunks-run" / "zz").symlink_to(path.parents[1] / "home" / "folder")


def piped_chunk(path) -> None:
    chunk = next((path.parent / ".chunks-run").glob("*/*"))
    chunk.unlink()
    os.mkfifo(chunk)


NAMES = ("/etc/hostname", "../../login.sh", "..", "manifest.json", "\x1b[2J")
CASES = {
    **{f"file {name[:16]!a}": ("sharded", listing(name)) for name in NAMES},
    **{f"link {name}": ("sharded", linked(name)) for name in ("shard-00000.safetensors", "rank-00000.pt", "best.json")},
    **{
        f"chunks {folder!a}": ("incremental", index(chunk_folder=folder))
        for folder in ("..", "/tmp", "step-00000001", 5)
    },
    "chunks link": ("incremental", linked_chunks),
    "chunks part link": ("incremental", linked_part_of_chunks),
    "chunks pipe": ("incremental", piped_chunk),
    "index file": ("sharded", index(files=[".."])),
    "index rank": ("sharded", index(objects={"model.x": "../x"})),
    "index shape": ("sharded", index(tensors={"model.w": ["float32", [1 << 50, 4], [[[0, 0], [6, 4], 0, 4096]]]})),
    "index no parts": ("sharded", index(tensors={"model.w": ["float32", [6, 4], []]})),
    **{
        f"{name} {str(value)[:16]!a}": ("sharded", lambda path, name=name, value=value: rewrite(path, **{name: value}))
        for name, values in {
            "step": ("../../x", -1),
            "run_id": ("../../x", "\x1b[2J", 5),
            "published_at": (float("nan"), "x"),
            "world_size": (10**12,),
            "kind": ("\x1b[2J",),
            "lineage": ([{"run_id": "../../x", "step": 1}], [{}]),
            "files": ({"index.json": {"size": "4", "hash": 5}},),
            "shared": ({"__phalanx_pairs__": [[[1], 2]]},),
        }.items()
        for value in values
    },
}


def content(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resume(directory) -> None:
    with contextlib.suppress(CheckpointError):  # either it can be read or it is refused
        load_newest(directory, lambda found: {"model": {"w": torch.zeros(6, 4)}})


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "change"), CASES.values(), ids=CASES)
def test_a_checkpoint_of_another_user_touches_nothing_else(good, tmp_path, kind, change):
    (tmp_path / "home" / "folder").mkdir(parents=True)
    (tmp_path / "home" / "thesis").write_bytes(SECRET)
    (tmp_path / "home" / "folder" / "notes").write_bytes(b"mine")
    (tmp_path / "login.sh").write_bytes(SECRET)
    before = content(tmp_path)
    kept, target = tmp_path / "theirs", tmp_path / "here" / "copies"
    shutil.copytree(good / kind, kept)
    newest = kept / "step-00000002"
    change(newest)
    for words in (
        ("ls", kept),
        ("inspect", newest),
        ("verify", kept),
        ("diff", newest, kept / "step-00000001"),
        ("cp", newest, target),
        ("reshard", newest, target, "--ranks", 2),
        ("export", newest, "-o", tmp_path / "here" / "copies" / "model.safetensors"),
        ("prune", kept, "--keep-last", 1),
    ):
        answer = phalanx("ckpt", *words)
        assert "Traceback" not in answer.text
        assert "\x1b[2J" not in answer.text
        if words[0] == "verify":
            resume(kept)
    shutil.rmtree(kept)
    after = content(tmp_path)
    written = {name: after.pop(name) for name in list(after) if name.startswith("here/copies/")}
    assert after == before
    assert SECRET not in written.values()
