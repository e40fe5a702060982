"""Killed, full and forbidden: a save that fails says why on every rank and leaves the previous checkpoint alone."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import programs
import pytest
import torch
from waiting import LIMIT_SECONDS

from phalanx.checkpoint import Snapshot, check_writable, choose, save, verify
from phalanx.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

KILLED_WRITER = """
import sys, torch
from phalanx.checkpoint import Snapshot, save
state = {"model": {f"w{i}": torch.ones(1_000_000) for i in range(16)}}
step = 0
while True:
    step += 1
    save(sys.argv[1], Snapshot(step, 0, state), run_id="run")
"""


def snapshot(step: int, elements: int = 4) -> Snapshot:
    return Snapshot(step, 0, {"model": {"w": torch.ones(elements)}})


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def stopped_while_writing(writer: subprocess.Popen, directory: Path) -> Path:
    """Freeze the writer at a moment when a second checkpoint is half written, and return that directory."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        assert writer.poll() is None, "the writer ended by itself"
        if not (directory / "step-00000001").exists() or not list(directory.glob(".writing-*/shard-00000.safetensors")):
            continue
        writer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
        half_written = list(directory.glob(".writing-*"))
        if half_written and not (half_written[0] / "manifest.json").exists():
            return half_written[0]
        writer.send_signal(signal.SIGCONT)
    raise AssertionError("never saw a checkpoint being written")


def test_a_kill_in_the_middle_of_a_save_keeps_the_previous_checkpoint(tmp_path):
    writer = programs.Popen([sys.executable, "-c", KILLED_WRITER, str(tmp_path)])
    try:
        half_written = stopped_while_writing(writer, tmp_path)
    finally:
        writer.kill()
        writer.wait()
    published = [name for name in names_in(tmp_path) if not name.startswith(".")]
    chosen = choose(tmp_path, required=True)
    assert chosen.checkpoint.path.name == published[-1]
    assert chosen.notes == []
    assert verify(chosen.checkpoint.path) == []
    assert half_written.exists()

    save(tmp_path, snapshot(10_000), run_id="run")
    assert names_in(tmp_path) == [*published, "step-00010000"]


def save_with_one_rank_out_of_room(directory: str) -> tuple[str, str]:
    save(directory, snapshot(1), run_id="run")
    if torch.distributed.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    tensors = {"model": {f"w{index}": torch.ones(100_000) for index in range(2)}}
    try:
        save(directory, Snapshot(2, 0, tensors), run_id="run")
    except CheckpointError as error:
        return error.message, error.hint
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "", ""


def test_no_room_on_one_rank_is_the_same_error_on_all(tmp_path, ranks):
    first, second = ranks(save_with_one_rank_out_of_room, str(tmp_path), world_size=2)
    assert first == second
    message, hint = first
    assert message.startswith(f"rank 1 could not write {tmp_path}/.writing-step-00000002-")
    assert os.strerror(errno.EFBIG) in message
    assert "404.1 kB needed by this rank" in message
    assert " free, " in message
    assert "keep_last" in hint
    assert names_in(tmp_path) == ["step-00000001"]


@pytest.fixture
def tiny_disk(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_keeps_the_previous_checkpoint(tiny_disk):
    save(tiny_disk, snapshot(1), run_id="run")
    with pytest.raises(CheckpointError, match=r"No space left on device \(.* free, 4\.0 MB needed by this rank\)"):
        save(tiny_disk, snapshot(2, elements=1_000_000), run_id="run")
    assert names_in(tiny_disk) == ["step-00000001"]
    assert choose(tiny_disk, required=True).checkpoint.step == 1


def test_a_disk_with_no_room_at_all_is_found_before_training(tiny_disk):
    with pytest.raises(OSError, match="No space left"):
        (tiny_disk / "ballast").write_bytes(bytes(1_000_000))
    with pytest.raises(CheckpointError, match="No space left on device"):
        check_writable(tiny_disk)
    assert names_in(tiny_disk) == ["ballast"]


def test_a_directory_that_is_missing_is_created(tmp_path):
    check_writable(tmp_path / "new" / "checkpoints")
    assert names_in(tmp_path / "new" / "checkpoints") == []


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_file_in_the_way_is_named(tmp_path, below):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for attempt in (lambda: check_writable(file / below), lambda: save(file / below, snapshot(1), run_id="run")):
        with pytest.raises(CheckpointError, match=rf"{file} is a file"):
            attempt()
    assert file.read_text() == "mine"


OTHER_USER = 65534
FORBIDDEN = """
import os, sys
from phalanx.checkpoint import Snapshot, check_writable, save
from phalanx.errors import CheckpointError
if os.getuid() == 0:
    os.setuid(int(sys.argv[2]))
for attempt in (lambda: check_writable(sys.argv[1]), lambda: save(sys.argv[1], Snapshot(1, 0, {}), run_id="run")):
    try:
        attempt()
    except CheckpointError as error:
        print(error)
"""


def test_a_directory_that_may_not_be_written_is_named(tmp_path):
    forbidden = tmp_path / "forbidden"
    forbidden.mkdir(mode=0o555)
    for place in [tmp_path, *tmp_path.parents][:3]:
        if place.stat().st_uid == os.getuid() and "pytest" in str(place):
            place.chmod(place.stat().st_mode | 0o011)
    command = [sys.executable, "-c", FORBIDDEN, str(forbidden), str(OTHER_USER)]
    output = programs.run(command, capture_output=True, text=True, check=True).stdout
    assert output.count(f"rank 0 could not write {forbidden}") == 2, output
    assert output.count("Permission denied") == 2
    assert output.count("Set checkpoint_dir to a directory that you may write to.") == 2


def save_where_one_rank_sees_nothing(directory: str) -> str:
    os.chdir(directory if torch.distributed.get_rank() == 0 else "/")
    try:
        save("checkpoints", snapshot(1), run_id="run")
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_directory_that_is_not_shared_is_refused_on_all_ranks(tmp_path, ranks):
    first, second = ranks(save_where_one_rank_sees_nothing, str(tmp_path), world_size=2)
    assert first == second
    assert first.startswith("rank 1 on ")
    assert "which rank 0 has just created" in first
    assert "file system that all hosts share" in first
    assert names_in(tmp_path / "checkpoints") == []


class Interrupted(dict):
    def items(self):
        raise KeyboardInterrupt


def test_ctrl_c_in_the_middle_of_a_save_stays_ctrl_c(tmp_path):
    save(tmp_path, snapshot(1), run_id="run")
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, Snapshot(2, 0, {}, Interrupted()), run_id="run")
    assert names_in(tmp_path) == ["step-00000001"]
