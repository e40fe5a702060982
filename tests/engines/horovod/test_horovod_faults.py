"""Horovod's ranks that fail, are asked to stop, are killed, or are added later."""

from __future__ import annotations

import json
import re
import signal
import time
from typing import TYPE_CHECKING

import pytest
import torch
from waiting import LIMIT_SECONDS

pytest.importorskip("horovod.torch", reason="Horovod is not built: run make horovod")

from command import Answer, end, finish, start, write_script
from long_proofs import long_proof
from torch import nn

from phalanx import PyTorchDDPTrainer

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

EPOCHS = 4
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
        if mode == "change":
            change(info.step)

    def change(step):
        # Wait for another machine; when it has been there for five steps, the one that was first dies.
        global met_after
        if os.environ["HOROVOD_SIZE"] == "1" and met_after is None and step >= 8:
            open("at-step-8", "w").close()
            time.sleep(0.1)
        if os.environ["HOROVOD_SIZE"] == "2":
            met_after = step - 1 if met_after is None else met_after
            if host == sys.argv[2] and step == met_after + 5:
                os.kill(os.getpid(), signal.SIGKILL)

    met_after = None

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
    return finish(process, seconds=300)


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


@long_proof
def test_sigterm_ends_a_recipe_with_a_checkpoint_and_a_whole_timeline(tmp_path):
    words = ("train", "digits", "--backend", "horovod", "--num-workers", 2, "--epochs", 500, "--device", "cpu")
    kept = ("--run-dir", "run", "--checkpoint-dir", "kept", "--horovod-timeline", "wire.json")
    process = start(*words, *kept, cwd=tmp_path, OMP_NUM_THREADS="1")
    said = wait_for(process, "step 1/")
    process.send_signal(signal.SIGTERM)
    answer = ended(process)
    assert answer.code == 75, answer.text
    assert "2 ranks on cpu · horovod" in said
    assert "stopped by SIGTERM" in answer.err
    assert [path.name for path in (tmp_path / "kept").glob("step-*")]
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert events[0]["strategy"] == "horovod"
    assert {path.name for path in (tmp_path / "run/logs").glob("*.log")} <= {"rank-0.log", "rank-1.log"}
    wire = json.loads((tmp_path / "wire.json").read_text())
    named = {entry["args"]["name"] for entry in wire if entry.get("name") == "process_name" and "name" in entry["args"]}
    assert any(name.startswith("allreduce.") and name.endswith("weight") for name in named)
    assert any(entry.get("name") == "NEGOTIATE_ALLREDUCE" for entry in wire)


def reference(folder: Path, *stages: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Train on each number of ranks until its last step, from the checkpoint of the stage before."""
    torch.manual_seed(0)
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Linear(6, 1)
    for number, (ranks, last_step) in enumerate(stages):
        trainer = PyTorchDDPTrainer(
            model,
            loss_fn=nn.functional.mse_loss,
            num_workers=ranks,
            max_steps=last_step,
            epochs=EPOCHS,
            batch_size=4,
            device="cpu",
            progress=False,
            run_dir=folder / f"reference-{number}",
            checkpoint_dir=folder / "reference",
            resume_from_checkpoint=number > 0,
        )
        trainer.fit(data)
    return model.state_dict()


def elastic(folder: Path, *mode: str) -> subprocess.Popen[str]:
    """Start an elastic run whose machines stand in a file."""
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/machines\n")
    script.chmod(0o755)
    return begin(folder, *mode, epochs=EPOCHS, min_workers=1, host_discovery_script="./hosts.sh", log_every_n_steps=1)


def assert_weights(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = torch.load(min(folder.glob("weights-*.pt")))  # named by the rank at the start; the first may be lost
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-6), name


def went_on(text: str, was: int, are: int) -> int:
    """After which step the ranks met again, by what the run said."""
    found = re.search(rf"the ranks were {was} and are {are}: continuing after step (\d+)", text)
    assert found is not None, text
    return int(found[1])


@long_proof
def test_a_machine_comes_and_the_first_one_is_lost_without_losing_a_step(tmp_path, fork_server):
    """One machine under two names, as Horovod gives up a machine that lost a rank; it is the main rank that goes."""
    machines = tmp_path / "machines"
    machines.write_text("localhost:1\n")
    process = elastic(tmp_path, "change", "localhost")
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (tmp_path / "at-step-8").exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        machines.write_text("localhost:1\n127.0.0.1:1\n")
        answer: Answer = ended(process)
    finally:
        end(process)
    assert answer.code == 0, answer.text
    alone, together = went_on(answer.text, 1, 2), went_on(answer.text, 2, 1)
    assert "was lost (exit code 137)" in answer.text
    assert together == alone + 5
    # Every sample of each epoch is visited once: 4 in a step of one rank, 8 in one of two, fewer where an epoch ends.
    steps = steps_of(tmp_path)
    assert steps == list(range(1, together + steps_left(alone, together) + 1))
    assert_weights(tmp_path, reference(tmp_path, (1, alone), (2, together), (1, steps[-1])))


def steps_left(alone: int, together: int) -> int:
    """How many steps one rank needs for what is left of the epochs."""
    epoch, position = divmod(alone * 4, 96)
    for _ in range(together - alone):
        position = min(96, position + 8)
        if position == 96:
            epoch, position = epoch + 1, 0
    return (EPOCHS - epoch) * 24 - position // 4


def steps_of(folder: Path) -> list[int]:
    """The steps in the run's events, in their order."""
    events = [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]
    return [event["step"] for event in events if event["event"] == "step"]


def test_a_discovery_script_that_cannot_run_is_named(tmp_path):
    answer = ended(begin(tmp_path, "plain", min_workers=1, host_discovery_script="./nowhere.sh"))
    assert answer.code == 2
    assert "'./nowhere.sh' does not exist" in answer.err
