"""A local Ray's fork server and its client: which users they trust, and which script they execute."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from command import ROOT

from phalanx.engines.ray import fork_client, local
from phalanx.engines.ray.local import RayForkServer


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "forkserver"))
        listening.listen()
        listening.settimeout(10)
        yield listening


@pytest.fixture
def connection(listener):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(listener.getsockname())
        yield asking


def test_the_client_sends_its_environment_to_the_same_user_only(listener, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not fork_client._is_forked(listener.getsockname())
    accepted, _ = listener.accept()
    with accepted:
        assert socket.recv_fds(accepted, 1, 4)[:2] == (b"", [])


def test_the_server_forks_for_the_same_user_only(listener, connection, monkeypatch):
    def fork():
        raise AssertionError("forked for another user")

    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(os, "fork", fork)
    server = RayForkServer(listener, os.getpid(), folder="/nowhere")
    try:
        connection.send(b"+")  # from another user: not read
        assert server._fork() is None
    finally:
        os.close(server._owner)


KILLED = """
import os, socket, sys
from phalanx.engines.ray.local import RayForkServer

owner = os.fork()
if owner == 0:
    os._exit(0)
silent, other_end = socket.socketpair()
RayForkServer(silent, owner, sys.argv[1])._has_request(60.0)
os._exit(1)
"""


def test_the_folder_of_a_killed_owner_is_removed(tmp_path):
    left = tmp_path / "ray-1"
    (left / "r/session/logs").mkdir(parents=True)
    # Its output ends with the last process that has it.
    done = subprocess.run([sys.executable, "-c", KILLED, left], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not left.exists()


# --- where a fork is not suitable --------------------------------------------------------------------------------

CHANGED = (signal.SIGCHLD, signal.SIGINT)
OURS = os.path.abspath(fork_client.__file__)


@pytest.fixture
def executed(monkeypatch):
    """Record what would be executed, and under which PYTHONPATH."""
    before, signals, folder = dict(os.environ), {n: signal.getsignal(n) for n in CHANGED}, os.getcwd()
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'phalanx[ray]'")
    calls: list[tuple[list[str], str | None]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: calls.append((words, os.environ.get("PYTHONPATH"))))
    os.environ |= {fork_client.SERVER: "/nowhere", "PYTHONPATH": "mine"}
    yield calls
    assert fork_client.SERVER not in os.environ, "Ray's own script would request a fork again"
    os.environ.clear()
    os.environ.update(before)
    os.chdir(folder)
    for number, handler in signals.items():
        signal.signal(number, handler)


def test_without_a_fork_server_the_script_that_ray_meant_is_executed(executed):
    fork_client.execute_rays_script(["--node-id=1"])
    fork_client.execute_rays_script(["--language=PYTHON", OURS, "--node-id=1"])
    default, setup = fork_client.rays_script("default_worker.py"), fork_client.rays_script("setup_worker.py")
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
def test_ray_sets_the_variables_where_it_starts_the_worker_itself(executed, context, tmp_path):
    imported_under = local._import_settings()
    arguments = [f"--serialized-runtime-env-context={json.dumps(context)}", "--language=PYTHON", OURS, "--node-id=1"]
    request = {"env": dict(os.environ), "folder": str(tmp_path), "arguments": arguments}
    local.become_worker(request, [], imported_under)
    ((words, path),) = executed
    assert words[1:3] == [fork_client.rays_script("setup_worker.py"), arguments[0]]
    assert path == "mine"
