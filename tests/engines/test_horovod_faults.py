"""Horovod's ranks that fail, are told to stop, are killed, or come later."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("horovod.torch", reason="Horovod is not built: run make horovod")

from command import Answer, end, finish, start, write_script
from torch import nn

from phalanx import PyTorchDDPTrainer

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

SCRIPT = """
    import os, signal, sys, time
    import torch
    from torch import nn
    import phalanx

    mode, host = sys.argv[1], os.environ["HOROVOD_HOSTNAME"]
    rank = int(os.environ["HOROVOD_RANK"])

    def after_step(info):
        if mode == "raise" and rank == 1 and info.step == 3:
            raise ValueError("out of luck")
        if mode == "die" and host == sys.argv[2] and info.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "slow":
            time.sleep(0.03)
        if mode == "wait" and info.step == 8:
            open("at-step-8", "w").close()
        if mode == "wait" and int(os.environ["HOROVOD_SIZE"]) == 1 and info.step >= 8:
            time.sleep(0.1)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 6, generator=generator)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Linear(6, 1)
    trainer = phalanx.HorovodTrainer(model, loss_fn=nn.functional.mse_loss, batch_size=4)
    trainer.add_hook(after_step)
    print("hello from", rank, flush=True)
    trainer.fit(data)
    torch.save(model.state_dict(), f"weights-{rank}.pt")
"""


def begin(folder: Path, *mode: str, **flags: object) -> subprocess.Popen[str]:
    """Start the script under phalanx train --backend horovod."""
    write_script(folder / "train.py", SCRIPT)
    words: list[object] = ["train", "--script", "train.py", "--backend", "horovod", "--num-workers", 2]
    words += ["--device", "cpu", "--run-dir", "run"]
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}", value]
    return start(*words, "--", *mode, cwd=folder, OMP_NUM_THREADS="1")


def ended(process: subprocess.Popen[str]) -> Answer:
    """Wait longer than elsewhere: fresh processes import torch, which takes its time on a busy machine."""
    return finish(process, seconds=150)


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Read what the program says until a line holds the text."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if text in line:
            return said
    end(process)
    raise AssertionError(f"never said {text!r}:\n{said}\n{process.stderr.read() if process.stderr else ''}")


def test_the_rank_that_raised_is_named(tmp_path):
    answer = ended(begin(tmp_path, "raise", epochs=50))
    assert answer.code == 1
    assert "rank 1" in answer.err
    assert "at step 3 raised ValueError: out of luck" in answer.err
    assert "1 other rank stopped because of it." in answer.err
    assert "hello from 1" in (tmp_path / "run/logs/rank-1.log").read_text()
    assert "hello from 0" in answer.out
    assert "hello from 1" not in answer.out


def test_sigterm_ends_a_run_with_a_checkpoint(tmp_path):
    process = begin(tmp_path, "slow", epochs=500, checkpoint_dir="kept")
    wait_for(process, "step 1/")
    process.send_signal(signal.SIGTERM)
    answer = ended(process)
    assert answer.code == 75, answer.text
    assert "stopped by SIGTERM" in answer.err
    assert [path.name for path in (tmp_path / "kept").glob("step-*")]


def reference(folder: Path, first: dict[str, Any], then: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train some steps on one number of ranks, and the rest from the checkpoint on another."""
    torch.manual_seed(0)
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Linear(6, 1)
    common = {"batch_size": 4, "device": "cpu", "progress": False, "checkpoint_dir": folder / "reference"}
    for settings in (first, {**then, "resume_from_checkpoint": True}):
        trainer = PyTorchDDPTrainer(
            model, loss_fn=nn.functional.mse_loss, run_dir=folder / f"ref-{len(settings)}", **common, **settings
        )
        trainer.fit(data)
    return model.state_dict()


def elastic(folder: Path, *mode: str) -> subprocess.Popen[str]:
    """Start an elastic run whose machines stand in a file."""
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/machines\n")
    script.chmod(0o755)
    return begin(folder, *mode, epochs=2, min_workers=1, host_discovery_script="./hosts.sh", log_every_n_steps=1)


def assert_weights(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = torch.load(min(folder.glob("weights-*.pt")))  # named by the rank at the start; the first may be gone
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-6), name


def test_a_killed_rank_is_outlived_without_losing_a_step(tmp_path, warm_process):
    """One machine under two names, as Horovod gives up a machine that lost a rank; the main rank is the one to go."""
    (tmp_path / "machines").write_text("localhost:1\n127.0.0.1:1\n")
    process = elastic(tmp_path, "die", "localhost")
    answer = ended(process)
    assert answer.code == 0, answer.text
    assert "the ranks were 2 and are 1: going on after step 5" in answer.text
    assert "is gone (exit code 137)" in answer.text
    # 5 steps of 8 samples, then 14 of 4 to the epoch's end at 96, then 24 more.
    assert steps_of(tmp_path) == list(range(1, 5 + 14 + 24 + 1))
    first = {"num_workers": 2, "max_steps": 5, "epochs": 2}
    assert_weights(tmp_path, reference(tmp_path, first, {"num_workers": 1, "epochs": 2}))


def test_a_machine_that_comes_later_takes_part(tmp_path, warm_process):
    machines = tmp_path / "machines"
    machines.write_text("localhost:1\n")
    process = elastic(tmp_path, "wait")
    try:
        deadline = time.monotonic() + 40
        while not (tmp_path / "at-step-8").exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        machines.write_text("localhost:1\n127.0.0.1:1\n")
        answer: Answer = ended(process)
    finally:
        end(process)
    assert answer.code == 0, answer.text
    assert "the ranks were 1 and are 2: going on after step" in answer.text
    alone = int(answer.text.partition("going on after step ")[2].split()[0])
    epoch, rest = divmod(alone * 4, 96)
    left = -(-(96 - rest) // 8) + 12 * (1 - epoch)
    assert steps_of(tmp_path) == list(range(1, alone + left + 1))
    assert (tmp_path / "weights-1.pt").exists()
    first = {"num_workers": 1, "max_steps": alone, "epochs": 2}
    assert_weights(tmp_path, reference(tmp_path, first, {"num_workers": 2, "epochs": 2}))


def steps_of(folder: Path) -> list[int]:
    """The steps that the run's events tell of, in their order."""
    events = [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]
    return [event["step"] for event in events if event["event"] == "step"]


def test_a_discovery_script_that_cannot_run_is_named(tmp_path):
    answer = ended(begin(tmp_path, "slow", min_workers=1, host_discovery_script="./nowhere.sh"))
    assert answer.code == 2
    assert "'./nowhere.sh' does not exist" in answer.err
