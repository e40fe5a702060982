"""The metrics endpoint: what events and heartbeats become, how many series there are, and the files of deploy."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest
import torch
from command import ROOT
from torch import nn
from waiting import LIMIT_SECONDS

from phalanx import PyTorchDDPTrainer
from phalanx.config import DistributedConfig
from phalanx.errors import ConfigError, UsageError
from phalanx.observe import events
from phalanx.observe.heartbeat import Gauges, HeartbeatBoard, board_path
from phalanx.run.job import JobResult
from phalanx.trackers import prometheus

pytest.importorskip("prometheus_client", reason="pip install 'phalanx[monitor]'")
MONITORING = ROOT / "deploy" / "monitoring"


def scrape(sink: prometheus.MetricsSink) -> dict[str, float]:
    with urllib.request.urlopen(sink.url, timeout=LIMIT_SECONDS) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@pytest.fixture
def sink(tmp_path):
    made = prometheus.MetricsSink("a", tmp_path)
    yield made
    made.close()


def beat(tmp_path: Path, ranks: int) -> None:
    HeartbeatBoard.create(tmp_path / "heartbeats", ranks).close()
    for rank in range(ranks):
        board = HeartbeatBoard(tmp_path / "heartbeats", rank)
        board.beat(7)
        board.gauge(Gauges(own_seconds=0.1 + 0.1 * (rank == 1), gpu_utilization=0.5, gpu_memory=2.0**30, memory=3.0))
        board.close()


def test_events_and_heartbeats_become_series(sink, tmp_path):
    beat(tmp_path, 3)
    run = events.RunStarted("digits", "runs/1", 3, "cpu", "ddp", "fp32", 10, 32, 1, 64, 100, 5)
    for event in (
        run,
        events.StepDone(5, 1, math.nan, 0.5, samples=320),
        events.CheckpointSaved(5, "step-5", 0.1, 99, stall=0.05, time=50.0),
        events.Goodput(5, 0, {"productive": 3.0, "idle": 1.0}, 1.0),
        events.Phase("evaluate", "begin"),
        events.RankLost(1, "was killed", "replace", 2, "why"),
        events.Recovered(5, 0, 0.4, "why", 2, [1]),
    ):
        sink.handle(event)
    found = scrape(sink)
    expected = {
        'phalanx_step{run="a"}': 7.0,
        'phalanx_loss_is_finite{run="a"}': 0.0,
        'phalanx_samples_total{run="a"}': 320.0,
        'phalanx_checkpoint_timestamp_seconds{run="a"}': 50.0,
        'phalanx_goodput_ratio{run="a"}': 0.75,
        'phalanx_goodput_seconds{category="idle",run="a"}': 1.0,
        'phalanx_phase{phase="evaluate",run="a"}': 1.0,
        'phalanx_failures_total{run="a"}': 1.0,
        'phalanx_ranks{run="a"}': 2.0,
        'phalanx_rank_step{rank="2",run="a"}': 7.0,
        'phalanx_slowest_rank_ratio{run="a"}': 2.0,
        'DCGM_FI_DEV_GPU_UTIL{rank="0",run="a"}': 50.0,
        'DCGM_FI_DEV_FB_USED{rank="0",run="a"}': 1024.0,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert 'strategy="ddp"' in next(name for name in found if name.startswith("phalanx_run_info"))
    sink.handle(events.RunEnded("finished", 5, 1.0, 1.0))
    assert scrape(sink)['phalanx_running{run="a"}'] == 0.0
    assert {name.partition("{")[0] for name in found} <= prometheus.NAMES


def test_the_number_of_series_is_bounded(sink, tmp_path):
    beat(tmp_path, 2000)
    found = scrape(sink)
    assert sum(name.startswith("phalanx_rank_step{") for name in found) == 64
    assert found['phalanx_ranks_quantile{gauge="own_seconds",quantile="1",run="a"}'] == pytest.approx(0.2)
    assert len(found) < 1000


def test_a_machine_serves_its_own_ranks_and_the_main_one_compares_all(sink, tmp_path):
    beat(tmp_path, 2)
    HeartbeatBoard.create(board_path(tmp_path, 1), 4).close()  # this process is now the launcher of the second machine
    for rank, seconds in ((2, 0.1), (3, 0.4)):
        board = HeartbeatBoard(board_path(tmp_path, 1), rank)
        board.beat(7)
        board.gauge(Gauges(own_seconds=seconds))
        board.close()
    found = scrape(sink)
    assert not any(name.startswith("phalanx_phase") for name in found), "only the main rank's events say it"
    assert {name for name in found if name.startswith("phalanx_rank_step{")} == {
        f'phalanx_rank_step{{rank="{rank}",run="a"}}' for rank in (2, 3)
    }
    assert found['phalanx_ranks_quantile{gauge="own_seconds",quantile="0.5",run="a"}'] == pytest.approx(0.1)
    sink.handle(events.RunStarted("digits", "runs/1", 4, "cpu", "ddp", "fp32", 10, 32, 1, 64, 100, 5))
    assert scrape(sink)['phalanx_slowest_rank_ratio{run="a"}'] == pytest.approx(4.0)
    assert sum(name.startswith("phalanx_rank_step{") for name in scrape(sink)) == 2


def test_a_port_in_use_and_wrong_settings_are_answered(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(UsageError, match=r"cannot be served \(Address already in use\)"):
            prometheus.MetricsSink("a", tmp_path, port=taken.getsockname()[1])
    with pytest.raises(UsageError, match="Cannot assign requested address") as caught:
        prometheus.MetricsSink("a", tmp_path, host="192.0.2.1")
    assert "an address of this machine" in caught.value.hint
    with pytest.raises(ConfigError, match=r"metrics_port = 'node1': a port is a number"):
        DistributedConfig(metrics_port="node1")
    assert DistributedConfig(metrics_port="0.0.0.0:9400").metrics_address == ("0.0.0.0", 9400)
    assert DistributedConfig(metrics_port="[::1]:0").metrics_address == ("::1", 0)
    assert DistributedConfig(metrics_port=0).metrics_address == ("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="a port is a number up to 65535"):
        DistributedConfig(metrics_port=70000)


def test_only_training_serves_and_reports(monkeypatch):
    """A run that still trains may hold the port, and the machine may lack a tracker's package."""
    asked = []
    monkeypatch.setattr("phalanx.run.trainer.send_job", lambda job, layout, data: asked.append(job) or JobResult())
    settings = {"num_workers": 2, "device": "cpu", "metrics_port": 9400, "mlflow": True}
    trainer = PyTorchDDPTrainer(nn.Linear(1, 1), DistributedConfig(**settings))
    trainer.evaluate([torch.ones(1, 1)])
    trainer.predict([torch.ones(1, 1)])
    assert [(job.action, job.config.metrics_port, job.config.mlflow) for job in asked] == [
        ("evaluate", None, False),
        ("predict", None, False),
    ]
    assert trainer.config.metrics_port == 9400


def test_dashboards_are_up_to_date_and_every_metric_exists():
    made = runpy.run_path(str(ROOT / "tools" / "grafana_dashboards.py"))
    for name, text in made["files"]().items():
        assert (made["FOLDER"] / name).read_text() == text, "run: python tools/grafana_dashboards.py"
        board = json.loads(text)
        targets = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
        assert len(targets) >= 16
        used = {found for text in targets for found in re.findall(r"\b(?:phalanx|DCGM)_\w+", text)}
        assert used <= prometheus.NAMES


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_alert_rules_hold_their_tests_and_use_metrics_that_exist():
    for words in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            ["promtool", *words], cwd=MONITORING, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    text = (MONITORING / "alerts.yml").read_text()
    used = set(re.findall(r"\bphalanx_\w+", text))
    assert used <= prometheus.NAMES
    tested = set(re.findall(r"alertname: (\w+)", (MONITORING / "alerts_test.yml").read_text()))
    assert tested == set(re.findall(r"- alert: (\w+)", text))
