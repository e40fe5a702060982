"""A rank that horovodrun or mpirun started never outlives the launcher. No Horovod is needed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import uuid

import programs
import pytest
from command import clean_environment, end, write_script

from phalanx.engines.horovod.entry_point import STARTED, network


@pytest.fixture
def launcher():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(f"\0phalanx-{uuid.uuid4().hex}")
        door.listen(1)
        door.settimeout(30)
        yield door


def begin(folder, name, where, program):
    """Start rank 0 as mpirun does."""
    target = {"script": str(write_script(folder / "train.py", program)), "args": []}
    request = {"target": target, "path": [], "log_dir": str(folder / "logs"), "events": name, "network": where}
    request["loopback"] = False
    return programs.Popen(
        [sys.executable, "-c", "from phalanx.engines.horovod.entry_point import main; main()", json.dumps(request)],
        env=clean_environment(OMPI_COMM_WORLD_RANK="0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_rank_ends_with_the_launcher(tmp_path, launcher):
    rank = begin(tmp_path, launcher.getsockname()[1:].decode(), network(), "import time\ntime.sleep(60)")
    try:
        line, _ = launcher.accept()
        assert json.loads(line.recv(1 << 16)) == {"event": STARTED, "rank": 0, "pid": rank.pid}
        assert rank.poll() is None
        line.close()
        rank.communicate(timeout=120)
        assert rank.returncode == -signal.SIGKILL
    finally:
        end(rank)


def test_a_rank_that_comes_after_the_launchers_end_does_not_begin(tmp_path):
    rank = begin(tmp_path, "phalanx-gone", network(), "print('trained')")
    out, err = rank.communicate(timeout=120)
    assert (rank.returncode, out) == (1, "")
    assert "the launcher had ended" in err


def test_a_rank_of_another_machine_runs_without_a_connection(tmp_path):
    rank = begin(tmp_path, "phalanx-elsewhere", "another machine", "print('trained')")
    out, err = rank.communicate(timeout=120)
    assert (rank.returncode, out) == (0, "trained\n"), err
