"""Ranks over nccl that are lost: killed, stopped, failed; in place, and with the weights of a quiet run.

Several ranks share one GPU (`share_gpus`). Each run is a process of its own, so that one that hangs ends by a timeout.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command import ROOT, clean_environment
from waiting import until

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PROGRAM = Path(__file__).parents[1] / "helpers" / "nccl_faults.py"
FOUR = {"num_workers": 4, "max_steps": 24, "batch_size": 4}
SHARDED = {**FOUR, "memory_frequency": 1}


class Run:
    """One or several launchers of a run, and what they leave."""

    def __init__(self, folder: Path, faults: list[list[Any]], launchers: int = 1, **plan: Any) -> None:
        self.folder = folder
        folder.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        self.processes = []
        self.scratch: list[tempfile.TemporaryDirectory[str]] = []
        for number in range(launchers):
            settings = dict(plan.get("settings", {}))
            if launchers > 1:
                settings |= {"num_nodes": launchers, "node_rank": number, "rdzv_endpoint": endpoint}
                settings |= {"run_dir": f"{folder}/run{number}" if number else f"{folder}/run"}
            words = [json.dumps({**plan, "settings": settings, "faults": faults}), str(folder)]
            # Of its own, because what a killed launcher leaves is not looked for; short, for the sockets of MPS.
            own = tempfile.TemporaryDirectory(dir="/tmp", prefix="n", ignore_cleanup_errors=True)
            self.scratch.append(own)
            with (folder / f"output{number}").open("w") as output:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(PROGRAM), *words],
                        env={**clean_environment(), "PYTHONPATH": str(ROOT), "TMPDIR": own.name},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def ended(self, seconds: float = 90.0) -> Run:
        """Wait for the end; print the output if it fails."""
        codes = []
        for process in self.processes:
            try:
                codes.append(process.wait(seconds))
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(15)
                codes.append("timeout")
        if any(code != 0 for code in codes):
            for path in sorted([*self.folder.glob("output*"), *self.folder.glob("run/logs/rank-*.log")]):
                print(f"== {path.name}\n" + "\n".join(line[:200] for line in path.read_text().splitlines()[-60:]))
        assert codes == [0] * len(codes)
        return self

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.folder / "weights.pt")
        return found

    @property
    def output(self) -> str:
        return (self.folder / "output0").read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "run" / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def recovered(self) -> list[dict[str, Any]]:
        return self.events("recovered")

    @property
    def epoch_losses(self) -> list[float]:
        return [event["train_loss"] for event in self.events("epoch")]


def assert_close(quiet: Run, hit: Run) -> None:
    """The weights, and the losses of epochs: those that were not read when a rank was lost, too."""
    assert hit.epoch_losses == pytest.approx(quiet.epoch_losses, rel=1e-4)
    for name, value in quiet.weights.items():
        torch.testing.assert_close(hit.weights[name], value, rtol=1e-4, atol=1e-5)


def gpu_processes() -> set[int]:
    """Return the processes that hold memory of the GPU, but for this one."""
    listed = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    return {int(pid) for pid in listed.stdout.split()} - {os.getpid()}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("nccl") / "quiet", [], settings={"num_workers": 3, "max_steps": 48}).ended()


def test_every_kind_of_loss(tmp_path, quiet):
    before = gpu_processes()
    faults = [
        ["kill", 6, 1, "backward 3"],
        ["raise", 12, 0, "boundary"],
        ["oom", 16, 2, "backward 6"],
        ["kill", 22, 0, "backward 0"],
        ["kill", 22, 1, "backward 0"],
        ["kill", 28, 2, "boundary"],
        ["kill", 1, 2, "forming"],
        ["stop", 36, 1, "backward 2"],
    ]
    settings = {"num_workers": 3, "max_steps": 48, "heartbeat_timeout": 2.0, "checkpoint_frequency": "7 steps"}
    hit = Run(tmp_path / "hit", faults, settings=settings).ended(150)
    assert all((tmp_path / "hit" / f"fault-{number}").exists() for number in range(len(faults)))
    assert_close(quiet, hit)
    seconds = [event["seconds"] for event in hit.recovered()]
    print("recovered in", [f"{each:.2f}" for each in seconds])
    noise = [line for line in hit.output.splitlines() if re.search(r"ProcessGroupNCCL|^nccl|^Last error|^socket", line)]
    assert noise == [], "noise goes to the logs of the ranks"
    until(lambda: gpu_processes() <= before)  # a killed process gives its memory back after it has ended
    assert max(seconds) < 3.0


def test_during_evaluation(tmp_path):
    plan = {"settings": {"num_workers": 2, "epochs": 2, "max_steps": None}, "evaluates": True}
    quiet = Run(tmp_path / "quiet", [], **plan).ended()
    hit = Run(tmp_path / "hit", [["kill", 33, 1, "evaluate"]], **plan).ended()
    assert len(hit.recovered()) == 1
    assert_close(quiet, hit)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("mlp", {**SHARDED, "strategy": "fsdp"}),
        ("gpt", {**SHARDED, "strategy": "auto", "tensor_parallel": 2, "pipeline_parallel": 2}),
        ("mlp", {**FOUR, "strategy": "ring"}),
    ],
    ids=["fsdp", "tensor x pipeline", "ring"],
)
def test_ranks_are_replaced(tmp_path, model, settings):
    plan = {"model": model, "settings": settings}
    quiet = Run(tmp_path / "quiet", [], **plan).ended()
    hit = Run(tmp_path / "hit", [["kill", 10, 1, "boundary"], ["kill", 18, 2, "boundary"]], **plan).ended()
    seconds = [event["seconds"] for event in hit.recovered()]
    print("recovered in", [f"{event['seconds']:.2f} {event['parts']}" for event in hit.recovered()])
    assert len(seconds) == 2
    assert_close(quiet, hit)
    assert max(seconds) < 4.0, "3.2 s on one H200, where four ranks take turns, and 2.3 s under MPS"


@pytest.mark.parametrize("lost", [1, 0], ids=["a machine", "the machine with the store"])
def test_a_lost_machine(tmp_path, lost):
    """Two launchers as two machines; one is killed with its ranks."""
    settings = {"num_workers": "2:4", "max_steps": 400, "heartbeat_timeout": 2.0, "checkpoint_dir": str(tmp_path / "c")}
    run = Run(tmp_path / "hit", [], launchers=2, settings=settings)
    kept = run.processes[1 - lost]
    deadline = time.monotonic() + 60
    path = tmp_path / "hit" / "run" / "events.jsonl"
    while time.monotonic() < deadline and not (path.exists() and '"step"' in path.read_text()):
        time.sleep(0.1)
    run.processes[lost].kill()
    assert kept.wait(90) == 0, (tmp_path / "hit" / f"output{1 - lost}").read_text()[-3000:]


def test_kills_in_the_backward_pass(tmp_path):
    """At random points, in four runs at once: a sum that a lost rank leaves incomplete must never be applied."""
    kills = int(os.environ.get("PHALANX_NCCL_KILLS", "5"))
    settings = {"num_workers": 3, "max_steps": 2 * kills + 6}
    quiet = Run(tmp_path / "quiet", [], settings=settings)
    runs = []
    for seed in range(4):
        draw = random.Random(seed)
        faults = [["kill", 3 + 2 * n, draw.randrange(3), f"backward {draw.randrange(14)}"] for n in range(kills)]
        runs.append(Run(tmp_path / f"hit{seed}", faults, settings=settings))
    quiet.ended()
    for run in runs:
        run.ended(60 + 6 * kills)
    seconds = sorted(event["seconds"] for run in runs for event in run.recovered())
    undone = [path.read_text() for path in tmp_path.glob("hit*/undone-*")]
    print(f"{len(seconds)} recoveries: {seconds[len(seconds) // 2]:.2f} s (median), {seconds[-1]:.2f} s (longest)")
    print(f"{len(undone)} steps of survivors were undone, {undone.count('True')} could not be")
    assert len(seconds) == 4 * kills
    for run in runs:
        assert_close(quiet, run)
