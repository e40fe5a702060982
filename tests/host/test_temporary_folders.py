"""Temporary folders: removed with their block, or by a later run where their owner was killed."""

from __future__ import annotations

import subprocess
import sys

from phalanx.host.files import close_scratch, open_scratch, scratch_folder, sweep

KILLED = """
import os, signal
from phalanx.host.files import close_scratch, open_scratch
print(open_scratch("run"), flush=True)
kept = open_scratch("logs")
close_scratch(kept, keep=True)
print(kept, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_owners_folder_is_removed_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    left, kept = done.stdout.split()
    (tmp_path / "phalanx-of-a-user").mkdir()
    mine = open_scratch("job")
    sweep(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {mine.name, kept.rpartition("/")[2], "phalanx-of-a-user"}
    assert left.startswith(str(tmp_path))
    close_scratch(mine)
    assert not mine.exists()


def test_a_folder_is_private_and_ends_with_its_block():
    with scratch_folder("run") as path:
        assert path.stat().st_mode & 0o777 == 0o700
    assert not path.exists()
