"""Survivors that are busy when a rank is lost leave soon, and are not killed while they make progress."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from long_proofs import long_proof
from torch import nn
from torch.utils.data import Dataset

import phalanx
from phalanx.checkpoint.hashed_files import HashedFile
from phalanx.host.files import replace_file

LONG = 30.0
"""Seconds that a survivor would be busy; a recovery takes below one, on a busy machine some."""


class Rows(Dataset):
    """Rank 1 is killed, once, by a sample of its evaluation, in which the others are for `LONG` seconds."""

    def __init__(self, mark: Path | None = None) -> None:
        self.x, self.mark = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), mark

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        if self.mark is not None and not self.mark.exists() and os.environ["RANK"] == "1":
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mark is not None and "PHALANX_GENERATION" not in os.environ:
            time.sleep(LONG / 32)
        return self.x[index], self.x[index].sum(0, keepdim=True)


class SlowDisk(phalanx.Callback):
    """The disk of rank 0 holds a save up, in the background or in the foreground, while rank 1 is killed."""

    def __init__(self, mark: Path, *, foreground: bool) -> None:
        self.mark, self.foreground = mark, foreground

    def on_fit_start(self, trainer) -> None:
        write, mark, foreground = HashedFile.write, self.mark, self.foreground

        def slow_write(file, data):
            if file.path.name.startswith("shard-00000") and not mark.exists():
                mark.touch()
                time.sleep(LONG)
            if file.path.name.startswith("shard-00001") and foreground and not mark.with_suffix(".killed").exists():
                mark.with_suffix(".killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return write(file, data)

        HashedFile.write = slow_write

    def on_step_end(self, trainer, info) -> None:
        time.sleep(0.01)
        killed = self.mark.with_suffix(".killed")
        if self.mark.exists() and not self.foreground and trainer.formation.rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def recovered(tmp_path: Path, val: Dataset | None = None, **settings) -> list[dict]:
    trainer = phalanx.PyTorchDDPTrainer(
        model=nn.Linear(8, 1),
        num_workers=settings.pop("num_workers", 2),
        device="cpu",
        batch_size=settings.pop("batch_size", 1),
        strategy=settings.pop("strategy", "ddp"),
        loss_fn="mse",
        max_restarts=2,
        threads_per_rank=1,
        progress=False,
        run_dir=str(tmp_path / "run"),
        **settings,
    )
    trainer.fit(Rows(), val)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "run_started" for event in events) == 1, "no restart"
    return [event for event in events if event["event"] == "recovered"]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [32, 64]),
        ({"eval_every": "20 steps"}, [20, 40, 60, 64]),
        ({"eval_every": 0.25, "strategy": "fsdp", "epochs": 1, "memory_frequency": 1}, [8, 16, 24, 32]),
    ],
)
def test_an_evaluation_is_left_at_once_and_made_once(tmp_path, settings, steps, fork_server):
    (event,) = recovered(tmp_path, Rows(tmp_path / "killed"), sanity_val_batches=0, **{"epochs": 2, **settings})
    assert event["step"] + event["lost_steps"] == steps[0]
    assert event["lost_steps"] <= ("strategy" in settings), "a shard of the last step may be on its way to a neighbour"
    assert event["seconds"] < LONG / 2
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    measured = [event["step"] for event in events if event["event"] == "metrics" and event["split"] == "val"]
    assert measured == steps


@pytest.mark.parametrize("foreground", [False, True])
def test_a_save_that_the_disk_holds_up_is_left_behind(tmp_path, foreground, fork_server):
    settings = {"checkpoint_frequency": "20 steps", "max_steps": 40, "async_checkpoint": not foreground}
    disk = SlowDisk(tmp_path / "slow", foreground=foreground)
    (event,) = recovered(tmp_path, callbacks=[disk], checkpoint_dir=str(tmp_path / "kept"), **settings)
    assert event["lost_steps"] == 0
    assert event["seconds"] < LONG / 2
    steps = sorted(path.name for path in (tmp_path / "kept").glob("step-*") if path.name[-1].isdigit())
    assert steps[-1] == "step-00000040"
    # One in the foreground is given up at its own step, where it is still due after the recovery: it is saved then.
    assert ("step-00000020" in steps) is foreground, "a save that was given up is not published"


class Sleeps(phalanx.Callback):
    """One rank is killed while another sleeps, once."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_step_end(self, trainer, info) -> None:
        rank = trainer.formation.rank
        mark = self.mark.with_suffix(f".{rank}")
        if info.step != 5 or rank == 0 or mark.exists():
            return
        mark.touch()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)


class LongCallback(phalanx.Callback):
    """Rank 0 takes long after the first epoch, as for an upload, while rank 1 is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_epoch_end(self, trainer, epoch, metrics) -> None:
        if epoch == 0 and trainer.formation.rank == 0:
            time.sleep(4.0)
        if epoch == 0 and trainer.formation.rank == 1 and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_in_a_long_callback_is_alive_and_named(tmp_path, monkeypatch, capfd, fork_server):
    monkeypatch.setattr("phalanx.recovery.launcher.policy._LEAST_PATIENCE", 1.0)
    (event,) = recovered(tmp_path, callbacks=[LongCallback(tmp_path)], epochs=2, heartbeat_timeout=0.5, batch_size=8)
    assert event["lost"] == [1], "the rank in the callback was not killed"
    assert event["lost_steps"] == 0
    assert "rank 0 is in on_epoch_end: the others wait for it" in capfd.readouterr().err


class TunersGate(phalanx.Callback):
    """Rank 1 is killed while the ranks wait for the tuner, which answers when they have gone on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer) -> None:
        if "PHALANX_GENERATION" in os.environ and trainer.formation.rank == 0:
            threading.Timer(0.5, replace_file, (self.folder / "gate", json.dumps({"through": 100}))).start()

    def on_epoch_end(self, trainer, epoch, metrics) -> None:
        if epoch == 0 and trainer.formation.rank == 1 and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()


def test_ranks_that_wait_for_the_tuner_leave_at_once_and_ask_again(tmp_path, monkeypatch, fork_server):
    monkeypatch.setenv("PHALANX_TRIAL_CONTROL", json.dumps({"file": str(tmp_path / "gate"), "at": [1]}))
    (event,) = recovered(tmp_path, callbacks=[TunersGate(tmp_path)], epochs=2, batch_size=8)
    assert (event["lost"], event["lost_steps"]) == ([1], 0)
    assert event["seconds"] < LONG / 2


@long_proof
def test_a_rank_that_does_not_leave_is_killed_and_named_with_its_line(tmp_path, fork_server):
    (event,) = recovered(
        tmp_path, callbacks=[Sleeps(tmp_path / "slept")], num_workers=3, heartbeat_timeout=1.0, timeout=40.0
    )
    said = "rank 2 did not go on after other ranks were lost, and was killed: it was at test_recovery_progress.py:"
    assert said in event["reason"]
    assert event["lost"] == [1, 2]
