"""A real Prometheus scrapes a real run of two ranks, and `phalanx top` shows the same ranks."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request

import programs
import pytest
from command import COMMAND, clean_environment
from waiting import LIMIT_SECONDS

pytest.importorskip("prometheus_client", reason="pip install 'phalanx[monitor]'")

SERVER = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def query(port: int, text: str) -> dict[str, str]:
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
    try:
        with urllib.request.urlopen(url, timeout=LIMIT_SECONDS) as answer:
            found = json.load(answer)["data"]["result"]
    except OSError:
        return {}
    return {each["metric"].get("rank", ""): each["value"][1] for each in found}


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="not installed: apt-get install prometheus")
def test_prometheus_scrapes_a_run_and_top_shows_it(tmp_path):
    metrics, own = free_port(), free_port()
    config = {"scrape_configs": [{"job_name": "phalanx", "scrape_interval": "1s",
                                  "static_configs": [{"targets": [f"127.0.0.1:{metrics}"]}]}]}  # fmt: skip
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    words = [*COMMAND, "train", "digits", "--num-workers", "2", "--device", "cpu", "--epochs", "10000",
             "--metrics-port", str(metrics), "--run-dir", "runs/seen", "--no-progress"]  # fmt: skip
    run = programs.Popen(
        words, cwd=tmp_path, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    server = programs.Popen(
        [*SERVER, f"--web.listen-address=127.0.0.1:{own}"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(query(own, "phalanx_rank_own_seconds")) < 2 and time.monotonic() < deadline:
            assert run.poll() is None, run.stderr.read()
            time.sleep(0.5)
        steps = query(own, "phalanx_rank_step")
        assert sorted(steps) == ["0", "1"]
        assert all(int(step) > 0 for step in steps.values())
        assert query(own, "phalanx_running") == {"": "1"}
        assert all(float(cores) > 0 for cores in query(own, "phalanx_rank_cpu_cores").values())
        shown = programs.run([*COMMAND, "top", "--json"], cwd=tmp_path, env=clean_environment(), capture_output=True,
                               text=True, timeout=240, check=True)  # fmt: skip
        document = json.loads(shown.stdout)
        assert (document["run"], document["status"]) == ("seen", "running")
        assert [rank["step"] >= int(steps[str(rank["rank"])]) for rank in document["ranks"]] == [True, True]
        assert all(rank["heartbeat_age"] < 10 for rank in document["ranks"])
    finally:
        for process in (run, server):
            process.terminate()
        for process in (run, server):
            process.wait(LIMIT_SECONDS)
            if process.stderr is not None:
                process.stderr.close()
