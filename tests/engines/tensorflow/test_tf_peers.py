"""Peers of a TF_CONFIG that never answer: reported while the waiting process holds the interpreter's lock."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import subprocess
import sys

import pytest
from command import clean_environment, finish, start, write_script

from phalanx.engines.tensorflow.tf_config import Task, needed_peers, wait_for_peers
from phalanx.errors import CommunicationError

SERVED = {"chief": ["a:1"], "worker": ["a:2", "b:3"], "ps": ["c:4"]}


@pytest.fixture(autouse=True)
def _default_hangup():
    """Programs that the tests start receive SIGHUP as usual, although the tests themselves may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def silent():
    """An address at which no process listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("task", "names"),
    [
        (Task("worker", 0, {"worker": ["a:1", "b:2", "c:3"]}), ["worker 1", "worker 2"]),
        (Task("worker", 0, {"chief": ["a:1"], "worker": ["b:2"], "evaluator": ["c:3"]}), ["chief"]),
        (Task("chief", 0, SERVED), ["worker 0", "worker 1", "ps 0"]),
        (Task("ps", 0, SERVED), []),
        (Task("evaluator", 0, {"worker": ["a:1"], "evaluator": ["c:3"]}), []),
    ],
)
def test_the_peers_that_a_task_waits_for(task, names):
    assert list(needed_peers(task)) == names


def test_those_that_do_not_answer_are_named(silent, listening):
    wait_for_peers({"worker 1": listening}, 0.01, print)
    peers = {"worker 1": silent, "worker 2": listening, "ps 0": "no port"}
    with pytest.raises(CommunicationError) as caught:
        wait_for_peers(peers, 0.01, print)
    assert caught.value.message == (
        f"2 tasks of TF_CONFIG did not answer within 0.01 s: worker 1 ({silent}), ps 0 (no port)"
    )


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_a_process_that_waits_too_long_is_ended_with_the_reason(tmp_path, silent, listening):
    """The script waits as TensorFlow does: in C, with the interpreter's lock held."""
    script = tmp_path / "train.py"
    script.write_text("import ctypes\nctypes.PyDLL(None).sleep(60)\n")
    cluster = {"worker": ["127.0.0.1:1", silent, listening]}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    words = ("train", "--backend", "tensorflow", "--start-timeout", 0.2, "--script", script)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    process = start(*words, cwd=tmp_path, TF_CONFIG=config)
    signal.signal(signal.SIGHUP, before)
    done = finish(process)
    assert done.code == 1
    assert f"1 task of TF_CONFIG did not answer within 0.2 s: worker 1 ({silent})" in done.err
    assert "--start-timeout" in done.err


HANGUP = """
    import os, signal, sys, threading
    from phalanx.engines.tensorflow.tf_config import Task
    from phalanx.engines.tensorflow import tf_config as peers

    before = sys.argv[1]
    if before != "default":
        signal.signal(signal.SIGHUP, signal.SIG_IGN if before == "ignored" else lambda number, frame: print("heard"))
    peers.watch_peers(Task("worker", 0, {"worker": ["127.0.0.1:1", sys.argv[2]]}), None)
    if sys.argv[3] == "afterwards":
        assert peers._watcher.wait() == 0
        for thread in threading.enumerate():
            if thread is not threading.main_thread():
                thread.join()
    os.kill(os.getpid(), signal.SIGHUP)
    print("still here", flush=True)
    peers._watcher.kill()
"""


@pytest.mark.parametrize(
    ("before", "when", "code", "said"),
    [
        ("default", "meanwhile", 1, ""),
        ("default", "afterwards", -signal.SIGHUP, ""),
        ("ignored", "meanwhile", 0, "still here\n"),
        ("own", "meanwhile", 0, "heard\nstill here\n"),
    ],
)
def test_sighup_is_handled_only_where_it_had_the_default_and_restored_afterwards(
    before, when, code, said, tmp_path, silent, listening
):
    script = write_script(tmp_path / "train.py", HANGUP)
    peer = listening if when == "afterwards" else silent
    config = json.dumps({"cluster": {"worker": ["127.0.0.1:1", peer]}, "task": {"type": "worker", "index": 0}})
    done = subprocess.run(
        [sys.executable, script, before, peer, when],
        env=clean_environment(TF_CONFIG=config),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, said), done.stderr
