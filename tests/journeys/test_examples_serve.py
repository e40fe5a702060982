"""The Ray Serve examples: a trained checkpoint answers requests, on this machine's loopback alone."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import programs
import psutil
import pytest
from command import ROOT, clean_environment, end, phalanx
from long_proofs import long_proof
from waiting import LIMIT_SECONDS

if importlib.util.find_spec("grpc_reflection") is None:  # of all that Ray Serve needs, Ray alone brings not this
    pytest.skip("Ray Serve is not installed: pip install 'phalanx[ray-serve]'", allow_module_level=True)


@long_proof
def test_a_checkpoint_is_served_over_http_on_loopback_and_nothing_stays(tmp_path):
    example = ROOT / "examples/07-ray/serve_checkpoint.py"
    process = programs.Popen(
        [sys.executable, str(example), "--keep", "--requests", "1"],
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("curl "):
                break
        address = re.search(r"http://127\.0\.0\.1:\d+/digits", "".join(said))
        assert address, "".join(said)
        body = json.dumps({"image": [[0.0] * 8] * 8}).encode()
        with urllib.request.urlopen(address[0], body, timeout=LIMIT_SECONDS) as answer:
            found = json.load(answer)
        assert found["digit"] in range(10)
        assert 0.1 <= found["probability"] <= 1
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert {name for name in outer_listeners(family) if "ServeReplica" not in name} == set()
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_SECONDS) == 0
        _, alive = psutil.wait_procs(family, timeout=LIMIT_SECONDS)
        assert not alive
    finally:
        end(process)
        process.stdout.close()


@long_proof
def test_a_language_model_is_deployed_with_the_endpoints_of_serve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--num-workers", 1, "--device", "cpu", "--max-steps", 2, "--checkpoint-frequency", "2 steps")
    assert phalanx("train", "text", *options, "--run-dir", "runs/text").code == 0
    example = ROOT / "examples/07-ray/serve_text.py"
    environment = clean_environment(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = programs.run(
        [sys.executable, str(example), "runs/text"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "def " in done.stdout


def outer_listeners(family: list[psutil.Process]) -> list[str]:
    """Return the listening sockets that other machines could reach; Serve's replicas have one, without a setting."""
    return [
        f"{member.name()} {link.laddr}"
        for member in family
        for link in member.net_connections(kind="tcp")
        if link.status == psutil.CONN_LISTEN and link.laddr.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")
    ]
