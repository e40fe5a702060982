"""Several nccl ranks on one GPU (`share_gpus`): they train, verify and measure, and leave neither daemon nor memory.

`SHARING_REHEARSAL=cpu` runs the same bodies on CPU ranks, without what only a GPU can show.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
from command import clean_environment, finish, phalanx, start, write_script

from phalanx.host.addresses import free_port

REHEARSAL = os.environ.get("SHARING_REHEARSAL") == "cpu"
ON_GPU = torch.cuda.is_available() and not REHEARSAL
SHARED = ("--share-gpus",) if ON_GPU else ("--device", "cpu")
GPUS = torch.cuda.device_count() if ON_GPU else 1
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
HAS_MPS = shutil.which("nvidia-cuda-mps-control") is not None

pytestmark = pytest.mark.skipif(not ON_GPU and not REHEARSAL, reason="needs a GPU")


def used_memory() -> list[int]:
    """Return the megabytes in use on each GPU."""
    if not ON_GPU:
        return [0]
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()]


def daemons(folder: str) -> list[str]:
    """Return the processes of MPS whose pipes are in a folder, as text: other jobs of the machine have their own."""
    listed = psutil.process_iter(["name", "status"])
    mps = [one for one in listed if "nvidia-cuda-mps" in one.info["name"] and one.info["status"] != "zombie"]
    return [str(one) for one in mps if one.environ().get(PIPES, "").startswith(folder)]


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (PIPES, "NCCL_HOSTID"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s") as folder:  # short, for the sockets of MPS
        monkeypatch.setenv("TMPDIR", folder)
        memory = used_memory()
        yield
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and (daemons(folder) or used_memory() > [each + 300 for each in memory]):
            time.sleep(0.2)
        assert daemons(folder) == []
    assert used_memory() <= [each + 300 for each in memory], f"MB in use, before: {memory}"


def document(answer) -> dict:
    assert answer.code == 0, answer.text
    return json.loads(answer.out)


def expected(ranks: int) -> int:
    return -(-ranks // GPUS) if ON_GPU else 1


def test_ranks_train_and_each_figure_is_marked(fork_server):
    ranks = 4 * GPUS
    words = ("digits", "--num-workers", ranks, "--strategy", "ddp", "--max-steps", 30, "--run-dir", "run", *SHARED)
    answer = phalanx("train", *words, "--json")
    found = document(answer)
    assert (found["status"], found["ranks_per_gpu"]) == ("finished", expected(ranks))
    lines = Path("run/events.jsonl").read_text().splitlines()
    losses = [event["loss"] for event in map(json.loads, lines) if event["event"] == "step"]
    assert losses[-1] < losses[0], losses
    if expected(ranks) > 1:
        how = "MPS" if HAS_MPS else "in turns"
        assert re.search(rf"{expected(ranks)} ranks share each GPU \(\d+ GB each; {how}", answer.err), answer.err
        assert "speed is not representative" in phalanx("runs", "show", "run", "--runs-dir", ".").out


SCRIPT = """
    import torch, phalanx

    def check_memory(device):
        total = torch.cuda.get_device_properties(device).total_memory
        share = total // PER_GPU
        torch.empty(share // 2, dtype=torch.uint8, device=device)
        torch.cuda.empty_cache()
        try:
            torch.empty(share, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            print("refused:", error)
        else:
            raise SystemExit(f"a rank may allocate {share} of {total} bytes: the memory is not divided")

    with phalanx.Formation(batch_size=8) as f:
        if f.device.type == "cuda":
            check_memory(f.device)
        sums = torch.full((1 << 20,), f.rank + 1.0, device=f.device)
        torch.distributed.all_reduce(sums)
        assert sums.eq(f.world_size * (f.world_size + 1) / 2).all(), sums
        print("reduced on", f.device.type, "by", torch.distributed.get_backend())
"""


def test_each_rank_of_a_script_has_its_share_of_the_memory(fork_server, tmp_path):
    script = write_script(tmp_path / "train.py", SCRIPT.replace("PER_GPU", "4"))
    answer = phalanx("train", "--script", script, "--num-workers", 4 * GPUS, *SHARED, "--run-dir", "run")
    assert answer.code == 0, answer.text
    assert ("reduced on cuda by nccl" if ON_GPU else "reduced on cpu by") in answer.out, answer.text
    assert ("refused:" in answer.out) == ON_GPU, answer.text


def test_a_layout_is_proved_on_the_gpu_that_will_train_it(fork_server):
    answer = phalanx("verify", "digits", "--num-workers", 4, "--strategy", "fsdp", "--max-steps", 3, *SHARED)
    assert answer.code == 0, answer.text
    where = f"cuda, {expected(4)} on each GPU" if expected(4) > 1 else SHARED[-1].replace("--share-gpus", "cuda")
    assert f"AGREES  fsdp, 4 ranks on {where}: it gives the result of one process" in answer.out, answer.text


def test_nccl_is_measured_and_its_rows_are_marked(fork_server):
    backend = ("--share-gpus",) if ON_GPU else ("--algo", "gloo")
    answer = phalanx("bench", "comm", "--num-workers", 2, "--sizes", "1K,1M", "--iters", 5, "--json", *backend)
    assert answer.code == 0, answer.text
    rows = json.loads(answer.out)
    assert [(row["algo"], row["wrong"], row["ranks_per_gpu"]) for row in rows] == [
        ("nccl" if ON_GPU else "gloo", 0, expected(2))
    ] * 2, answer.text
    assert ("not representative" in answer.err) == (expected(2) > 1), answer.err


def test_two_machines_share_a_gpu(tmp_path):
    """Two launchers with a rank each, as on two machines; every launcher runs a daemon of its own."""
    place = f"127.0.0.1:{free_port()}"
    words = ("train", "digits", "--num-workers", 2, "--num-nodes", 2, "--rdzv-endpoint", place, "--strategy", "ddp")
    words = (*words, "--max-steps", 5, "--run-dir", "run", *SHARED)
    nodes = [start(*words, "--node-rank", node, cwd=tmp_path) for node in range(2)]
    answers = [finish(node) for node in nodes]
    assert [answer.code for answer in answers] == [0, 0], "\n".join(answer.text for answer in answers)
    if expected(2) > 1:
        assert all("2 ranks share each GPU" in answer.text for answer in answers), [each.text for each in answers]


def test_ranks_of_torchrun_share_a_gpu_too(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "phalanx.cli", "train", "digits", "--strategy", "ddp"]
    command += ["--max-steps", "5", *SHARED]
    environment = clean_environment(TMPDIR=str(tmp_path))  # where torchrun leaves a folder
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("speed is not representative" in done.stdout) == (expected(2) > 1), done.stdout


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_more_ranks_than_memory_allows_are_refused_before_any_starts():
    answer = phalanx("train", "digits", "--num-workers", 500 * GPUS, "--share-gpus")
    assert answer.code == 2, answer.text
    assert re.search(r"500 ranks do not fit on a GPU with \d+ GB", answer.err), answer.err
    assert re.search(r"Request at most \d+ per GPU", answer.err), answer.err
    assert not Path("runs").exists()
