"""Which checkpoints stay: keep_last, other runs' checkpoints, redone steps, and what dead writers left."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from phalanx.checkpoint import Request, Saver, Snapshot, choose, find, list_checkpoints, load, publish, save
from phalanx.checkpoint import publish as names
from phalanx.errors import CheckpointError
from phalanx.observe.best_mark import Best, mark_best


def snapshot(step: int, value: float = 0.0) -> Snapshot:
    return Snapshot(step, 0, {"model": {"w": torch.full((4,), value)}})


def names_in(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_keep_last_removes_the_oldest_of_the_same_run_only(tmp_path):
    save(tmp_path, snapshot(1), run_id="other")
    for step in (10, 20, 30):
        save(tmp_path, snapshot(step), run_id="mine", keep_last=2)
    assert names_in(tmp_path) == ["step-00000001", "step-00000020", "step-00000030"]


def test_a_name_that_another_run_has_taken_since_is_that_run_s(tmp_path):
    """The first run has removed its own step 10, and the second one, which is behind, takes the name."""
    savers = {"ahead": Saver(), "behind": Saver()}
    for run_id, step in (("ahead", 10), ("ahead", 20), ("behind", 10), ("ahead", 30)):
        savers[run_id].begin(snapshot(step), Request(directory=tmp_path, run_id=run_id, keep_last=1))
        savers[run_id].finish()
    for saver in savers.values():
        saver.release()
    assert {(one.manifest.run_id, one.step) for one in list_checkpoints(tmp_path)} == {("ahead", 30), ("behind", 10)}


def test_two_runs_that_publish_one_step_at_the_same_moment_both_have_a_checkpoint(tmp_path, monkeypatch):
    """The second run takes the name between the first one's look at the names and its rename."""
    real = names._free_name
    other = save(tmp_path / "aside", snapshot(10), run_id="second").path

    def free_name(directory, step, run_id):
        found = real(directory, step, run_id)
        if other.exists():
            other.rename(directory / other.name)
        return found

    monkeypatch.setattr(names, "_free_name", free_name)
    save(tmp_path / "kept", snapshot(10), run_id="first")
    assert sorted(one.manifest.run_id for one in list_checkpoints(tmp_path / "kept")) == ["first", "second"]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path):
    save(tmp_path, snapshot(10), run_id="mine")
    damaged = save(tmp_path, snapshot(20), run_id="mine").path
    (damaged / "shard-00000.safetensors").unlink()
    save(tmp_path, snapshot(30), run_id="mine", keep_last=2)
    assert names_in(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]


@pytest.mark.parametrize("keep_last", [None, 2])
def test_a_save_reads_no_manifest_that_it_has_read_before(tmp_path, monkeypatch, keep_last):
    for step in range(1, 6):
        save(tmp_path, snapshot(step), run_id="other")
    read: list[str] = []
    real = find.read_manifest
    monkeypatch.setattr(find, "read_manifest", lambda path: (read.append(path.name), real(path))[1])
    saver = Saver()
    request = Request(directory=tmp_path, run_id="mine", keep_last=keep_last)
    for step in range(10, 15):
        saver.begin(snapshot(step), request)
        saver.finish()
    saver.release()
    assert sorted(read) == [f"step-0000000{step}" for step in range(1, 6)]
    assert len(list_checkpoints(tmp_path)) == 5 + (keep_last or 5)


def test_keep_last_must_leave_one(tmp_path):
    with pytest.raises(CheckpointError, match="keep_last is 0; it must be 1 or more"):
        save(tmp_path, snapshot(1), run_id="mine", keep_last=0)


def test_another_runs_checkpoint_of_the_same_step_keeps_its_name(tmp_path):
    save(tmp_path, snapshot(5, 1.0), run_id="first")
    mine = save(tmp_path, snapshot(5, 2.0), run_id="second/run")
    assert names_in(tmp_path) == ["step-00000005", "step-00000005-second"]
    assert list_checkpoints(tmp_path)[0].path == mine.path
    again = save(tmp_path, snapshot(5, 3.0), run_id="second/run")
    assert again.path == mine.path


@pytest.mark.parametrize("exchange", [True, False])
def test_a_redone_step_replaces_its_predecessor(tmp_path, monkeypatch, exchange):
    if not exchange:  # As on a file system that cannot swap two directories.
        monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    save(tmp_path, snapshot(5, 1.0), run_id="mine")
    save(tmp_path, snapshot(5, 2.0), run_id="mine")
    assert names_in(tmp_path) == ["step-00000005"]
    template = {"model": {"w": torch.zeros(4)}}
    load(choose(tmp_path).checkpoint, template)
    assert template["model"]["w"].tolist() == [2.0] * 4


def test_a_checkpoint_that_is_being_replaced_still_counts(tmp_path):
    path = save(tmp_path, snapshot(5), run_id="mine").path
    aside = path.with_name(names.replaced_name(path.name))
    path.rename(aside)
    assert choose(tmp_path).checkpoint.path == aside


def test_the_newest_is_the_one_published_last(tmp_path):
    save(tmp_path, snapshot(20), run_id="a")
    save(tmp_path, snapshot(10), run_id="b")
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [10, 20]


def test_leftovers_of_an_ended_process_are_removed_and_those_of_a_running_one_kept(tmp_path):
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        owner = f"{names.this_machine()}-{{}}-abcdef"
        keep = tmp_path / f".writing-step-00000001-{owner.format(living.pid)}"
        keep.mkdir()
        stranger = tmp_path / ".writing-step-00000001-01234567-1-abcdef"
        stranger.mkdir()
        silent = tmp_path / ".writing-step-00000002-01234567-1-abcdef"
        silent.mkdir()
        os.utime(silent, (0, 0))
        save(tmp_path, snapshot(1), run_id="mine")
        assert names_in(tmp_path) == sorted([keep.name, stranger.name, "step-00000001"])
    finally:
        living.communicate(b"\n")
    removing = tmp_path / f".removing-step-00000009-{owner.format(living.pid)}"
    removing.mkdir()
    save(tmp_path, snapshot(2), run_id="mine")
    assert names_in(tmp_path) == [stranger.name, "step-00000001", "step-00000002"]


def test_what_cannot_be_removed_becomes_a_note(tmp_path, monkeypatch):
    save(tmp_path, snapshot(1), run_id="mine")

    def refuse(path):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr("phalanx.checkpoint.keep.remove", refuse)
    saved = save(tmp_path, snapshot(2), run_id="mine", keep_last=1)
    assert saved.notes == (
        f"{tmp_path / 'step-00000001'} is beyond keep_last and cannot be removed: Operation not permitted",
    )


def test_a_clock_that_was_set_back_does_not_remove_the_newest(tmp_path, monkeypatch):
    save(tmp_path, snapshot(1), run_id="mine")
    monkeypatch.setattr("phalanx.checkpoint.write.time.time", lambda: 0.0)
    save(tmp_path, snapshot(2), run_id="mine", keep_last=1)
    assert names_in(tmp_path) == ["step-00000002"]


def test_a_run_without_a_best_one_leaves_what_the_run_it_continues_marked(tmp_path):
    best = save(tmp_path, snapshot(10), run_id="mine").path
    mark_best(Best(best, 10, "val/loss", "min", 0.1))
    save(tmp_path, snapshot(20), run_id="mine")
    for step in (30, 40):
        save(tmp_path, snapshot(step), run_id="next", lineage=[{"run_id": "mine", "step": 20}], keep_last=1)
    assert names_in(tmp_path) == ["step-00000010", "step-00000040"]
