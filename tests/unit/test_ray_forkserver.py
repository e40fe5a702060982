"""A local Ray's fork server and the script that asks it for workers: whom they trust, and what they execute."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from command import ROOT

from phalanx.engines.ray import fork_client, forkserver
from phalanx.engines.ray.forkserver import RayForkServer


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "warm"))
        listening.listen()
        listening.settimeout(10)
        yield listening


@pytest.fixture
def line(listener):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(listener.getsockname())
        yield asking


def test_the_environment_is_handed_to_nobody_but_the_same_user(listener, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not fork_client._is_forked(listener.getsockname())
    accepted, _ = listener.accept()
    with accepted:
        assert socket.recv_fds(accepted, 1, 4)[:2] == (b"", [])


def test_nobody_but_the_same_user_is_forked_for(listener, line, monkeypatch):
    def fork():
        raise AssertionError("forked for a stranger")

    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(os, "fork", fork)
    warm = RayForkServer(listener, os.getpid(), folder="/nowhere")
    try:
        line.send(b"+")  # from another user not even looked at
        assert warm._take() is None
    finally:
        os.close(warm._owner)


KILLED = """
import os, socket, sys
from phalanx.engines.ray.forkserver import RayForkServer

owner = os.fork()
if owner == 0:
    os._exit(0)
silent, other_end = socket.socketpair()
RayForkServer(silent, owner, sys.argv[1])._is_asked(60.0)
os._exit(1)
"""


def test_the_folder_of_a_killed_owner_is_removed(tmp_path):
    left = tmp_path / "ray-1"
    (left / "r/session/logs").mkdir(parents=True)
    # Its output ends with the last process that has it.
    done = subprocess.run([sys.executable, "-c", KILLED, left], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not left.exists()


# --- where a fork will not do ---------------------------------------------------------------------------------------

CHANGED = (signal.SIGCHLD, signal.SIGINT)
OURS = os.path.abspath(fork_client.__file__)


@pytest.fixture
def executed(monkeypatch):
    """Let nothing be executed, but tell what would be, and under which PYTHONPATH."""
    before, signals, folder = dict(os.environ), {n: signal.getsignal(n) for n in CHANGED}, os.getcwd()
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'phalanx[ray]'")
    told: list[tuple[list[str], str | None]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: told.append((words, os.environ.get("PYTHONPATH"))))
    os.environ |= {fork_client.WARM: "/nowhere", "PYTHONPATH": "mine"}
    yield told
    assert fork_client.WARM not in os.environ, "Ray's own script would ask again"
    os.environ.clear()
    os.environ.update(before)
    os.chdir(folder)
    for number, handler in signals.items():
        signal.signal(number, handler)


def test_without_a_warm_process_the_script_is_executed_that_ray_meant(executed):
    fork_client.become_rays_own(["--node-id=1"])
    fork_client.become_rays_own(["--language=PYTHON", OURS, "--node-id=1"])
    default, setup = fork_client.rays_own("default_worker.py"), fork_client.rays_own("setup_worker.py")
    assert [words for words, _ in executed] == [
        [sys.executable, default, "--node-id=1"],
        [sys.executable, setup, "--language=PYTHON", default, "--node-id=1"],
    ]
    assert os.path.isfile(default)
    assert os.path.isfile(setup)


@pytest.mark.parametrize(
    "context",
    [
        {"env_vars": {"PYTHONPATH": "more:${PYTHONPATH}"}},  # read while modules were imported
        {"env_vars": {"PYTHONPATH": "more:${PYTHONPATH}"}, "command_prefix": ["numactl"]},
    ],
)
def test_variables_are_left_to_ray_where_the_worker_is(executed, context, tmp_path):
    imported_under = forkserver._settings()
    arguments = [f"--serialized-runtime-env-context={json.dumps(context)}", "--language=PYTHON", OURS, "--node-id=1"]
    request = {"env": dict(os.environ), "folder": str(tmp_path), "arguments": arguments}
    forkserver._become(request, [], imported_under)
    ((words, path),) = executed
    assert words[1:3] == [fork_client.rays_own("setup_worker.py"), arguments[0]]
    assert path == "mine"
