"""Launch lines of other starters on real hosts: torchrun on two network namespaces, srun on a real Slurm."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from command import ROOT, clean_environment
from long_proofs import long_proof
from network_hosts import network
from slurm_cluster import slurm_cluster

EXAMPLE = str(ROOT / "examples/01-ddp-basics/ddp_mnist.py")


@long_proof
def test_torchrun_on_two_hosts(tmp_path):
    with network(2) as hosts:
        meeting = [f"--master_addr={hosts[0].address}", "--master_port=29431"]
        started = []
        for number, host in enumerate(hosts):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
            command = host.command(*torchrun, f"--node_rank={number}", *meeting, EXAMPLE, "--num-epochs", "1")
            environment = clean_environment(OMP_NUM_THREADS="1", TMPDIR=str(tmp_path), GLOO_SOCKET_IFNAME=host.link)
            started.append(
                subprocess.Popen(
                    command,
                    cwd=tmp_path,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=400)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert "epoch 1/1 loss" in outputs[0]


def test_srun_on_a_real_slurm(tmp_path):
    folder = Path("/tmp") / f"slurm-lines-{time.time_ns() % 10**6}"
    folder.mkdir()  # sockets have short names
    with slurm_cluster(folder) as cluster:
        ran = subprocess.run(
            ["srun", "--ntasks=2", sys.executable, EXAMPLE, "--num-epochs", "1"],
            cwd=tmp_path,
            env=clean_environment(OMP_NUM_THREADS="1", **cluster.environment),
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    shutil.rmtree(folder, ignore_errors=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("epoch 1/1 loss") == 1, ran.stdout
