"""A profile of two machines on a slow link: `phalanx report --profile` finds the time that the link takes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from command import ROOT, clean_environment, phalanx
from long_proofs import long_proof
from network_hosts import HostNamespace, network

BYTES = 2_500_000
SCRIPT = f"""
import statistics, time
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from phalanx import Callback, PyTorchDDPTrainer

class Measured(Callback):
    "What the link really takes for these bytes, as TCP and the shaper give it."
    def on_fit_start(self, trainer):
        gradient, seconds = torch.ones({BYTES // 4}), []
        for _ in range(5):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(gradient)
            seconds.append(time.perf_counter() - began)
        open(f"link-{{trainer.formation.rank}}", "w").write(str(statistics.median(seconds)))

data = TensorDataset(torch.randn(64, 1), torch.randn(64, {BYTES // 8}))
PyTorchDDPTrainer(
    torch.nn.Linear(1, {BYTES // 8}), loss_fn=torch.nn.functional.mse_loss, batch_size=1, max_steps=8, device="cpu",
    strategy="ddp", optimizer="sgd", progress=False, log_every_n_steps=1000, callbacks=[Measured()],
).fit(data)
"""


def start(host: HostNamespace, node: int, endpoint: str, folder: Path) -> subprocess.Popen[str]:
    words = ["train", "--script", "train.py", "--num-workers", 2, "--num-nodes", 2, "--node-rank", node]
    words += ["--rdzv-endpoint", endpoint, "--run-dir", "run", "--profile", "steps=3:7", "ranks=0,1"]
    own = folder / f"tmp{node}"
    own.mkdir()
    return programs.Popen(
        host.command(sys.executable, "-m", "phalanx", *map(str, words)),
        cwd=folder,
        env={**clean_environment(), "PYTHONPATH": str(ROOT), "TMPDIR": str(own)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@long_proof
def test_a_link_of_100_mbit_is_found_in_exposed_communication(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    with network(2) as hosts:
        for host in hosts:
            host.slow("100mbit")
        endpoint = f"{hosts[0].address}:29433"
        running = [start(host, node, endpoint, tmp_path) for node, host in enumerate(hosts)]
        printed = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], printed
    answer = phalanx("report", "run", "--profile", "--json")
    assert answer.code == 0, answer.text
    found = json.loads(answer.out)
    for rank in (0, 1):
        own = [split for split in found["splits"] if split["rank"] == rank]
        alone = [s["seconds"]["exposed"] - sum(s["waited_for"].values()) for s in own]
        link = float(Path(f"link-{rank}").read_text())
        assert link == pytest.approx(BYTES * 8 / 100e6, rel=0.3)
        assert statistics.median(alone) == pytest.approx(link, rel=0.1)
    assert found["verdict"].startswith("communication-bound"), found["verdict"]
    half = next(each["seconds"] for each in found["what_if"] if each["change"] == "network twice as fast")
    assert found["step_seconds"] - half == pytest.approx(link / 2, rel=0.15)
