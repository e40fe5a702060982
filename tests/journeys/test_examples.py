"""The examples run as their first lines say: under phalanx, torchrun, a script of bash, and a stand-in for Slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from long_proofs import long_proof
from ranks import RecordingConsole

from phalanx.config.settings import precision_name
from phalanx.launch import LaunchSpec, ScriptTarget, launch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "01-ddp-basics"
BIN = Path(sys.executable).parent


@pytest.fixture
def run_example(tmp_path, monkeypatch, fork_server):
    """Run an example on two warm ranks, in a folder of its own, and return what the console showed."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *args: str) -> str:
        console = RecordingConsole()
        target = ScriptTarget(EXAMPLES / name, args)
        env = {"PHALANX_DEVICE": "cpu"}
        spec = LaunchSpec(target=target, ranks_per_node=2, log_dir=tmp_path / "logs", env=env, threads_per_rank=1)
        result = launch(spec, console)
        assert result.failure is None, result.failure
        return console.text

    return run


def run_command(words, cwd, **env):
    """Run a command with our Python's own commands first on the path."""
    path = os.pathsep.join([env.pop("first_path", str(BIN)), str(BIN), os.environ["PATH"]])
    full = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    return programs.run(list(map(str, words)), cwd=cwd, env=full, capture_output=True, text=True, timeout=240)


def reports(text):
    """Return the epochs' lines of ddp_mnist.py."""
    return re.findall(r"^epoch .*$", text, flags=re.MULTILINE)


@long_proof
def test_ddp_mnist_learns_and_trains_alike_under_phalanx_and_torchrun(run_example, tmp_path):
    arguments = ("--epochs", "3", "--lr", "5e-3")
    ours = reports(run_example("ddp_mnist.py", *arguments, "--save", "model.pt"))
    torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node=2", EXAMPLES / "ddp_mnist.py", *arguments]
    done = run_command(torchrun, tmp_path, TMPDIR=str(tmp_path))  # torchrun leaves its log folder behind
    assert done.returncode == 0, done.stderr
    assert len(ours) == 3
    assert reports(done.stdout) == ours
    assert float(ours[-1].split()[-1]) > 0.85
    assert (tmp_path / "model.pt").stat().st_size > 0


def test_ddp_mnist_reads_idx_files(run_example, tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    for prefix, count in (("train", 32), ("t10k", 7)):
        images = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28) + bytes(range(256)) * (count * 28 * 28 // 256 + 1)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(images[: 16 + count * 28 * 28])
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">4BI", 0, 0, 8, 1, count) + bytes(count))
    text = run_example("ddp_mnist.py", "--data-dir", str(folder), "--epochs", "2", "--batch-size", "4")
    # All labels are 0, which is soon learnt; 7 samples do not divide by 2 ranks.
    assert text.endswith("accuracy 1.0000")


def test_ddp_mnist_is_short():
    assert len((EXAMPLES / "ddp_mnist.py").read_text().splitlines()) < 150


def test_the_template_checkpoints_resumes_and_saves(run_example, tmp_path):
    arguments = ("--precision", "auto", "--accumulate", "2", "--checkpoint-dir", "ckpt")
    run_example("ddp_training.py", *arguments, "--epochs", "1")
    assert len(list((tmp_path / "ckpt").glob("step-*"))) == 1
    text = run_example("ddp_training.py", *arguments, "--epochs", "3", "--resume", "--save", "model.safetensors")
    assert float(re.search(r"best accuracy ([\d.]+)", text)[1]) > 0.7
    starts = [event for event in read_events(tmp_path) if event["event"] == "run_started"]
    assert [bool(start["resumed_from"]) for start in starts] == [False, True]
    assert starts[0]["precision"] == precision_name(True, "cpu")
    assert starts[0]["global_batch"] == 2 * 2 * 32
    assert len(list((tmp_path / "ckpt").glob("step-*"))) == 2, "keep_last=2"
    assert (tmp_path / "model.safetensors").stat().st_size > 0
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def read_events(folder):
    lines = [line for path in sorted(folder.rglob("events.jsonl")) for line in path.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda event: event["time"])


def test_a_loop_of_ones_own_goes_on_from_its_checkpoint(run_example):
    first = run_example("ddp_own_loop.py", "--epochs", "2", "--checkpoint-dir", "ckpt", "--accumulate", "2")
    assert [line.split()[1] for line in first.splitlines()] == ["1/2", "2/2"]
    second = run_example("ddp_own_loop.py", "--epochs", "3", "--checkpoint-dir", "ckpt", "--accumulate", "2")
    assert [line.split()[1:4] for line in second.splitlines()] == [["3/3", "step", "36"]]
    # Started anew, the third epoch would be at the level of the first.
    assert float(second.split()[-1]) > float(first.splitlines()[0].split()[-1])


@long_proof
def test_the_benchmark_shows_speedup_time_and_accuracy_of_whole_epochs(tmp_path):
    words = "--model vit --ranks 1 2 --epochs 2 --samples 320 --batch-size 16 --scaling strong --device cpu"
    done = run_command([sys.executable, EXAMPLES / "ddp_benchmark.py", *words.split(), "--json=points.json"], tmp_path)
    assert done.returncode == 0, done.stderr
    head, one, two = (line.split() for line in done.stdout.splitlines()[2:5])
    assert head[-5:] == ["samples/s", "time/epoch", "speedup", "efficiency", "accuracy"]
    assert (one[0], one[-3], two[1]) == ("strong", "1.00x", "2")
    single, double = json.loads((tmp_path / "points.json").read_text())
    assert single["epoch_seconds"] == pytest.approx(320 / single["samples_per_second"])
    assert double["speedup"] == pytest.approx(double["samples_per_second"] / single["samples_per_second"])
    assert one[-1].endswith("%"), "evaluated"
    assert single["accuracy"] > 1.5 / 10, "of ten classes"
    assert single["accuracy"] == pytest.approx(double["accuracy"], abs=0.05), "the same batches, so the same model"


@long_proof
def test_the_benchmark_measures_every_number_of_ranks_and_draws(tmp_path):
    small = ["--samples=100", "--steps=10", "--width=32", "--layers=1", "--time=16", "--batch-size=4"]
    words = [
        sys.executable,
        EXAMPLES / "ddp_benchmark.py",
        "--ranks",
        1,
        2,
        *small,
        "--json=points.json",
        "--device=cpu",
    ]
    done = run_command(words, tmp_path)
    assert done.returncode == 0, done.stderr
    points = json.loads((tmp_path / "points.json").read_text())
    assert [(p["scaling"], p["ranks"], p["batch_per_rank"]) for p in points] == [
        ("weak", 1, 4),
        ("weak", 2, 4),
        ("strong", 1, 4),
        ("strong", 2, 2),
    ]
    for point in points:
        assert point["step_ms"] == pytest.approx(
            point["batch_per_rank"] * point["ranks"] / point["samples_per_second"] * 1e3
        )
    assert [p["efficiency"] for p in points if p["ranks"] == 1] == [1.0, 1.0]
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


LAUNCH = EXAMPLES / "launch_ddp.sh"
ONE_EPOCH = {"SCRIPT": str(EXAMPLES / "ddp_mnist.py"), "PHALANX_DEVICE": "cpu"}


def test_launch_on_one_machine(tmp_path):
    done = run_command(["bash", LAUNCH, "local", "--epochs", "1"], tmp_path, RANKS="2", **ONE_EPOCH)
    assert done.returncode == 0, done.stderr
    assert reports(done.stdout)[0].startswith("epoch 1/1")
    assert list(tmp_path.glob("runs/*/logs/rank-0.log"))


def test_launch_on_two_machines(tmp_path):
    """Two supervisors on this machine stand for two machines: they differ in NODE_RANK alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    env = {**os.environ, **ONE_EPOCH, "RANKS": "2", "NNODES": "2", "RDZV": endpoint, "OMP_NUM_THREADS": "1"}
    env |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    nodes = []
    for rank in range(2):
        folder = tmp_path / f"node{rank}"
        folder.mkdir()
        words = ["bash", str(LAUNCH), "multi", "--epochs", "1"]
        node = {"cwd": folder, "env": {**env, "NODE_RANK": str(rank)}, "text": True}
        nodes.append(programs.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **node))
    try:
        outputs = [node.communicate(timeout=240)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert reports(outputs[0])[0].startswith("epoch 1/1")
    assert reports(outputs[1]) == [], "only rank 0 of all machines reports"


FAKE_SRUN = """#!/usr/bin/env bash
# Two tasks on this machine with the variables that Slurm gives its tasks.
[[ $1 == --kill-on-bad-exit=1 ]] || exit 64
shift
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=0 SLURM_NTASKS=2 \\
        SLURM_STEP_TASKS_PER_NODE='2(x1)' "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""


@pytest.fixture
def slurm(tmp_path):
    """Give a folder with stand-ins for srun and scontrol, and the variables of an allocation."""
    folder = tmp_path / "slurm-bin"
    folder.mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", "#!/bin/sh\necho 127.0.0.1\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return {"first_path": str(folder), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-1]", "MASTER_PORT": port}


@long_proof
def test_launch_under_slurm_gives_plain_scripts_torchruns_variables(tmp_path, slurm):
    done = run_command(["bash", LAUNCH, "slurm", "--epochs", "1"], tmp_path, **slurm, **ONE_EPOCH)
    assert done.returncode == 0, done.stderr
    assert len(reports(done.stdout)) == 1, "two ranks that did not meet would both report"


@pytest.mark.parametrize("words", [[], ["nonsense"], ["multi"], ["slurm"]])
def test_launch_says_what_is_missing(words, tmp_path):
    done = run_command(["bash", LAUNCH, *words], tmp_path)
    assert done.returncode == 2
    assert "launch_ddp.sh" in done.stderr


def test_launch_is_clean_bash():
    shellcheck = shutil.which("shellcheck", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    words = [shellcheck, LAUNCH] if shellcheck else ["bash", "-n", LAUNCH]
    done = programs.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.[ps][yh]")), ids=lambda path: path.name)
def test_each_example_opens_with_its_command_and_is_in_the_readme(path):
    head = "\n".join(path.read_text().splitlines()[:12])
    assert re.search(rf"^#?\s+.*(phalanx train|python|bash) .*{re.escape(path.name)}", head, flags=re.MULTILINE)
    assert f"[`{path.name}`]({path.name})" in (EXAMPLES / "README.md").read_text()
