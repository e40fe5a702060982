"""`phalanx serve` as a user starts it: a run answers on a port, and Ctrl-C ends it; mistakes are reported."""

from __future__ import annotations

import http.client
import json
import signal
import socket
from urllib.parse import urlsplit

import pytest
from command import completions, end, phalanx, start
from packages import hide
from waiting import LIMIT_SECONDS

pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two runs: one of a language model, one of images."""
    place = tmp_path_factory.mktemp("serve")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        common = ("--num-workers", 1, "--device", "cpu", "--max-steps", 2, "--checkpoint-frequency", "2 steps")
        for recipe in ("text", "digits"):
            answer = phalanx("train", recipe, *common, "--run-dir", f"runs/{recipe}")
            assert answer.code == 0, answer.text
    return place


def post(address: str, path: str, **body) -> dict:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=LIMIT_SECONDS)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return json.loads(connection.getresponse().read())


def test_a_run_is_served_until_it_is_interrupted(folder):
    process = start("serve", "text", "--port", 0, "--device", "cpu", cwd=folder)
    try:
        line = process.stdout.readline()
        assert line.startswith("text: http://127.0.0.1:"), process.communicate(timeout=LIMIT_SECONDS)
        answer = post(line.split(": ", 1)[1], "/v1/completions", prompt="def ", max_tokens=5, temperature=0)
        assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}
        port = urlsplit(line.split(": ", 1)[1]).port
        taken = phalanx("serve", "text", "--port", port)
        assert (taken.code, f"port {port} of 127.0.0.1 is in use" in taken.err) == (2, True)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_SECONDS) == 0
        assert process.stderr.read() == ""
    finally:
        end(process)
        process.stdout.close()
        process.stderr.close()


def test_what_cannot_be_served_is_explained(folder, monkeypatch):
    monkeypatch.chdir(folder)
    answer = phalanx("serve", "digits", "--port", 0)
    assert answer.code == 2
    assert "holds a ConvNet, and serve answers with texts" in answer.err
    assert "phalanx predict" in answer.err
    for words, said in [
        (["missing"], "missing"),
        (["text", "--port", 70000], "not between 0 and 65535"),
        (["text", "--port", 0, "--max-batch", 0], "--max-batch 0"),
        (["text", "--prot", 1], "Did you mean --port?"),
        (["text", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
    ]:
        answer = phalanx("serve", *words)
        assert answer.code == 2, answer.text
        assert said in answer.err


def test_a_missing_package_is_named(monkeypatch):
    hide(monkeypatch, "uvicorn", "phalanx.tools.web", "phalanx.tools.serve.app")
    answer = phalanx("serve", "text")
    assert answer.code == 2
    assert "serve needs uvicorn, which is not installed" in answer.err
    assert "pip install 'phalanx[serve]'" in answer.err


def test_runs_and_devices_are_completed(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert set(completions("phalanx serve ")) >= {"text", "digits"}
    assert completions("phalanx serve text --device c") == ["cpu", "cuda"]


def test_a_host_that_others_reach_asks_for_a_key(folder):
    process = start("serve", "text", "--port", 0, "--host", "0.0.0.0", "--device", "cpu", cwd=folder)
    try:
        port = urlsplit(process.stdout.readline().split(": ", 1)[1]).port
        key = process.stdout.readline()
        assert key.startswith("key: ")
        assert len(key) > 32
        answer = post(f"http://127.0.0.1:{port}", "/v1/completions", prompt="def ")
        assert answer["error"]["code"] == "invalid_api_key"
    finally:
        end(process)
        process.communicate()


def test_help_says_what_is_served():
    answer = phalanx("serve", "--help")
    assert answer.code == 0
    assert "/v1/chat/completions" in answer.out
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = phalanx("serve", "text", "--port", taken.getsockname()[1])
    assert f"Write --port {used.err.split('--port ')[1].split(',')[0]}, which is free" in used.err
