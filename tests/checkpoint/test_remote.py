"""Checkpoints at URLs: a real S3 server, memory, and everything that can be wrong with a URL."""

from __future__ import annotations

import os
import re
import threading
import urllib.request

import pytest
import torch
from waiting import LIMIT_SECONDS

from phalanx.checkpoint import (
    Snapshot,
    check_writable,
    choose,
    find_best,
    list_checkpoints,
    load,
    mark_best,
    read_manifest,
    save,
    verify,
)
from phalanx.checkpoint.copy import copy_checkpoint
from phalanx.checkpoint.differences import compare
from phalanx.checkpoint.hashed_files import FileRecord
from phalanx.checkpoint.locations import storage_at
from phalanx.checkpoint.manifest import dump_manifest
from phalanx.errors import CheckpointError, UsageError
from phalanx.host.remote import RemotePath, as_path
from phalanx.observe.best_mark import Best

pytestmark = pytest.mark.usefixtures("bucket")


def snapshot(step: int, value: float = 0.0, size: int = 4) -> Snapshot:
    return Snapshot(step, 1, {"model": {"w": torch.full((size,), value)}}, shared={"note": "hi"})


def fail_next(server: str, count: int) -> None:
    request = urllib.request.Request(f"{server}/-/fail/{count}", method="PUT", data=b"")
    urllib.request.urlopen(request, timeout=LIMIT_SECONDS).close()


def names(url: str) -> list[str]:
    return storage_at(url).names()


def steps(url: str) -> list[str]:
    """Return the names less what each save has of its own."""
    return [name.rpartition("-")[0] for name in names(url)]


def test_what_is_saved_at_a_url_comes_back(bucket):
    saved = save(f"{bucket}/kept", snapshot(3, 2.5), run_id="r")
    assert re.fullmatch(rf"{bucket}/kept/step-00000003-[0-9a-f]{{6}}", str(saved.path))
    assert names(f"{bucket}/kept") == [saved.path.name]
    (found,) = list_checkpoints(f"{bucket}/kept")
    assert verify(found.path) == []
    chosen = choose(f"{bucket}/kept", required=True).checkpoint
    template = {"model": {"w": torch.zeros(4)}}
    loaded = load(chosen, template)
    assert loaded.step == 3
    assert loaded.shared == {"note": "hi"}
    assert template["model"]["w"].tolist() == [2.5] * 4


def test_keep_last_and_the_mark_of_the_best_hold_at_a_url(bucket):
    url = f"{bucket}/kept"
    first = save(url, snapshot(1), run_id="r", keep_last=2)
    mark_best(Best(first.path, 1, "val/loss", "min", 0.5))
    for step in (2, 3, 4):
        save(url, snapshot(step), run_id="r", keep_last=2, best=first.path)
    assert steps(url) == ["step-00000001", "step-00000003", "step-00000004"]
    assert find_best(url).step == 1


def test_a_step_that_is_saved_again_replaces_the_first_and_other_runs_keep_theirs(bucket):
    url = f"{bucket}/kept"
    save(url, snapshot(5, 1.0), run_id="one")
    save(url, snapshot(5, 2.0), run_id="two")
    assert len(list_checkpoints(url)) == 2
    save(url, snapshot(5, 3.0), run_id="one")
    assert sorted(one.manifest.run_id for one in list_checkpoints(url)) == ["one", "two"]


def test_two_runs_that_save_one_step_at_the_same_moment_both_have_a_checkpoint(bucket):
    url, gate = f"{bucket}/kept", threading.Barrier(2)

    def saves(run_id: str, value: float) -> None:
        save(url, snapshot(50, value), run_id=run_id)
        gate.wait()
        save(url, snapshot(100, value, 1 << 18), run_id=run_id, keep_last=1)

    threads = [threading.Thread(target=saves, args=each) for each in (("one", 1.0), ("two", 2.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {one.manifest.run_id: one for one in list_checkpoints(url)}
    assert [found[run].step for run in ("one", "two")] == [100, 100]
    for run, value in (("one", 1.0), ("two", 2.0)):
        template = {"model": {"w": torch.zeros(1 << 18)}}
        load(found[run], template)
        assert template["model"]["w"].unique().tolist() == [value]


def test_what_a_killed_save_left_is_removed_without_the_files_of_a_save_of_the_same_step(bucket):
    """A run may sweep when another one has already begun to upload this step."""
    url = f"{bucket}/kept"
    place = storage_at(url)
    killed, live = place.begin(7), place.begin(7)
    for writing in (killed, live):
        with writing.create("shard") as stream:
            stream.write(b"x")
    killed.discard()
    assert place.list(live.path.name) == ["shard"]


def test_an_unfinished_save_is_not_listed_and_the_next_save_removes_it(bucket):
    url = f"{bucket}/kept"
    save(url, snapshot(1), run_id="r")
    place = storage_at(url)
    writing = place.begin(2)
    with writing.create("shard") as stream:
        stream.write(b"x" * 1000)
    unfinished = writing.path.file_system.open(str(writing.path / "big"), "wb", seq_len=5 << 20)
    unfinished.write(b"y" * (6 << 20))  # one part is in the store, as after a kill
    assert [one.step for one in list_checkpoints(url)] == [1]
    assert choose(url).notes == []
    save(url, snapshot(3), run_id="r")
    assert steps(url) == ["step-00000001", "step-00000003"]
    assert not writing.path.file_system.list_multipart_uploads(bucket.removeprefix("s3://"))
    unfinished.closed = True  # its destructor would complete it


def test_another_machines_save_in_progress_is_left_alone(bucket):
    url = f"{bucket}/kept"
    place = storage_at(url)
    marker = ".writing-step-00000009-0badcafe-1-abcdef"
    (as_path(url) / marker).write_bytes(b'{"name": "step-00000009"}')
    place.put("step-00000009", "shard", b"half")
    save(url, snapshot(1), run_id="r")
    assert marker in names(url)
    assert place.list("step-00000009") == ["shard"]


def test_a_large_file_is_uploaded_in_parts_and_read_by_ranges(bucket):
    place = storage_at(f"{bucket}/kept")
    writing = place.begin(1)
    data = os.urandom(1 << 20) * 104
    with writing.create("big") as stream:
        stream.write(data)
    reader = place.open(writing.path.name, "big")
    assert reader.size == len(data) == writing.records["big"].size
    parts = [bytearray(17 << 20), bytearray(3)]
    reader.read_into([memoryview(part) for part in parts], 30 << 20)
    assert b"".join(parts) == data[30 << 20 : (47 << 20) + 3]
    info = writing.path.file_system.info(str(writing.path / "big"))
    assert int(info["ETag"].strip('"').split("-")[1]) >= 2  # S3 says how many parts there were


def test_a_busy_store_is_tried_again(bucket, s3_server):
    fail_next(s3_server, 3)
    save(f"{bucket}/kept", snapshot(1), run_id="r")
    assert [one.step for one in list_checkpoints(f"{bucket}/kept")] == [1]


def test_a_store_that_stays_broken_loses_no_earlier_checkpoint(bucket, s3_server, monkeypatch):
    monkeypatch.setattr("phalanx.host.remote._PAUSES", (0.01,))
    save(f"{bucket}/kept", snapshot(1, 1.0), run_id="r", keep_last=1)
    fail_next(s3_server, 1000)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    files = as_path(f"{bucket}/x").file_system
    files.clear_instance_cache()
    monkeypatch.setattr(type(files), "retries", 1)
    with pytest.raises(CheckpointError, match="request rate"):
        save(f"{bucket}/kept", snapshot(2), run_id="r", keep_last=1)
    fail_next(s3_server, 0)
    files.clear_instance_cache()
    (found,) = list_checkpoints(f"{bucket}/kept")
    assert (found.step, verify(found.path)) == (1, [])


def test_a_copy_to_a_url_and_back_is_verified_and_continues_where_it_stopped(bucket, tmp_path):
    source = save(tmp_path / "a", snapshot(7, 4.0, size=1000), run_id="r").path
    (one,) = list_checkpoints(tmp_path / "a")
    first, *rest = sorted(one.manifest.files)
    as_path(f"{bucket}/kept/step-00000007/{first}").write_bytes((source / first).read_bytes())
    as_path(f"{bucket}/kept/step-00000007/{rest[0]}").write_bytes(b"half")
    assert list_checkpoints(f"{bucket}/kept") == []
    copied = copy_checkpoint(one, as_path(f"{bucket}/kept"))
    assert copied.files == len(rest)
    (there,) = list_checkpoints(f"{bucket}/kept")
    assert verify(there.path) == []
    copy_checkpoint(there, tmp_path / "b")
    (back,) = list_checkpoints(tmp_path / "b")
    assert verify(back.path) == []
    assert compare(one, back).same_tensors
    assert copy_checkpoint(there, tmp_path / "b").files == 0


def test_a_copy_of_a_damaged_checkpoint_is_refused(bucket, tmp_path):
    source = save(tmp_path / "a", snapshot(7), run_id="r").path
    (one,) = list_checkpoints(tmp_path / "a")
    file = max(source.iterdir(), key=lambda path: path.stat().st_size if path.name in one.manifest.files else 0)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{file.name} does not match its hash"):
        copy_checkpoint(one, as_path(f"{bucket}/kept"))
    assert list_checkpoints(f"{bucket}/kept") == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://no-such-bucket/x", "The bucket must exist"),
        ("http://127.0.0.1:9/x", "http:// is read-only"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_training(bucket, url, message):
    with pytest.raises(CheckpointError, match=message):
        check_writable(url)


def test_missing_credentials_are_named(bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    files = as_path(f"{bucket}/x").file_system
    files.clear_instance_cache()
    try:
        with pytest.raises(CheckpointError, match=r"no credentials for s3://.*\. Set AWS_ACCESS_KEY_ID"):
            check_writable(f"{bucket}/x")
    finally:
        files.clear_instance_cache()


def test_a_url_is_a_path_that_keeps_its_slashes():
    path = as_path("memory://one/two")
    assert isinstance(path, RemotePath)
    assert str(path / "three") == "memory://one/two/three"
    assert str(path.parent) == "memory://one"
    assert path / "x" == as_path("memory://one/two/x")
    assert str(as_path("file:///tmp/x")) == "/tmp/x"
    assert not isinstance(as_path("file:///tmp/x"), RemotePath)
    with pytest.raises(UsageError, match=r"unknown protocol 's4'. Did you mean s3://\?"):
        as_path("s4://bucket/x")


def test_the_name_of_a_file_cannot_lead_out_of_a_url(bucket, tmp_path):
    saved = save(f"{bucket}/kept", snapshot(1), run_id="r").path
    manifest = read_manifest(saved)
    manifest.files["../../../x"] = FileRecord(0, "")
    (saved / "manifest.json").write_bytes(dump_manifest(manifest).encode())
    with pytest.raises(CheckpointError, match="it lists the file"):
        choose(saved)
    with pytest.raises(CheckpointError, match="it lists the file"):
        choose(f"{bucket}/kept")


def writable_in_memory(url: str) -> str:
    with pytest.raises(CheckpointError) as refused:
        check_writable(url)
    return str(refused.value)


def test_the_memory_of_a_process_holds_checkpoints_of_one_rank(ranks):
    url = "memory://kept/one"
    for step in (1, 2, 3):
        save(url, snapshot(step, float(step)), run_id="r", keep_last=2)
    assert steps(url) == ["step-00000002", "step-00000003"]
    template = {"model": {"w": torch.zeros(4)}}
    assert load(choose(url, required=True).checkpoint, template).step == 3
    assert template["model"]["w"].tolist() == [3.0] * 4
    as_path(url).remove_tree()
    refused = ranks(writable_in_memory, url, world_size=2)
    assert all("the memory of one process, and there are 2 ranks\n  Set checkpoint_dir" in text for text in refused)


@pytest.mark.parametrize("kind", ["full", "incremental"])
def test_every_kind_is_saved_pruned_and_copied_at_a_url(bucket, tmp_path, kind):
    for step in (1, 2, 3):
        save(f"{bucket}/kept", snapshot(step, float(step)), run_id="r", keep_last=2, kind=kind)
    found = list_checkpoints(f"{bucket}/kept")
    assert [one.step for one in found] == [3, 2]
    copied = copy_checkpoint(found[1], tmp_path / "copy")
    (one,) = list_checkpoints(tmp_path / "copy")
    assert (copied.path, one.manifest.kind, verify(one.path)) == (one.path, kind, [])
    assert compare(one, found[1]).same_tensors
    assert compare(one, found[0]).differences[0].max_abs == 1.0
