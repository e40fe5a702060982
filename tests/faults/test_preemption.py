"""Notices that a run has to end: each becomes a checkpoint at the next step and exit code 75, and the run resumes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import phalanx, write_script
from torch.utils.data import Dataset, TensorDataset
from waiting import until

from phalanx import Callback, PyTorchDDPTrainer
from phalanx.config import DistributedConfig
from phalanx.errors import EXIT_PREEMPTED
from phalanx.loop import preemption
from phalanx.loop.preemption import StopNotices, job_end

SCRIPT = """
import time
import torch
from torch.utils.data import TensorDataset
from phalanx import PyTorchDDPTrainer

data = TensorDataset(torch.randn(100, 4), torch.randn(100, 1))
PyTorchDDPTrainer(
    torch.nn.Linear(4, 1), loss_fn=torch.nn.functional.mse_loss, batch_size=2, device="cpu",
    callbacks=[lambda info: time.sleep(0.05)], checkpoint_dir="kept", resume_from_checkpoint=True,
).fit(data)
"""


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)


def train(*words: object, max_steps: int = 2000) -> Any:
    path = write_script(Path("train.py"), SCRIPT)
    return phalanx("train", "--script", path, "--num-workers", 2, "--max-steps", max_steps, *words)


def saved_steps() -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in Path("kept").glob("step-*"))


def test_a_notice_file_ends_the_run_with_a_checkpoint_from_which_it_resumes():
    def write_when_it_trains() -> None:
        until(Path("kept").is_dir)
        time.sleep(0.5)  # it trains whatever comes first
        Path("notice").touch()

    agent = threading.Thread(target=write_when_it_trains)
    agent.start()
    answer = train("--preemption-file", "notice")
    agent.join()
    assert answer.code == EXIT_PREEMPTED, answer.text
    assert "stopped by the preemption notice notice after step" in answer.text
    (step,) = saved_steps()
    assert step > 0
    again = train("--preemption-file", "notice", max_steps=step + 3)
    assert again.code == 0, again.text
    assert "existed before this run" in again.text
    assert saved_steps()[-1] == step + 3


def test_a_slurm_time_limit_ends_the_run_with_a_checkpoint(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))
    answer = train("--preemption-margin", 54)
    assert answer.code == EXIT_PREEMPTED, answer.text
    assert "stopped by the time limit of the Slurm job, " in answer.text
    assert saved_steps()


@pytest.mark.parametrize(
    ("left", "seconds"),
    [("59:30", 3570), ("1:00:00", 3600), ("2-03:04:05", 2 * 86400 + 3 * 3600 + 245), ("UNLIMITED", None), ("", None)],
)
def test_the_time_left_is_asked_of_slurm(tmp_path, monkeypatch, left, seconds):
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f'#!/bin/sh\\n[ "$2" = --jobs=7 ] && echo "{left}"\\n'.replace("\\n", "\n"))
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    before, found = time.time(), job_end({"SLURM_JOB_ID": "7"})
    assert found is None if seconds is None else before + seconds - 1 <= found <= time.time() + seconds + 1


def test_without_squeue_there_is_no_limit(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert job_end({"SLURM_JOB_ID": "7"}) is None
    assert job_end({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1700000000"}) == 1_700_000_000.0


def watched(config: DistributedConfig, environ: dict[str, str], *, asks: bool = False, **rank: Any) -> list[str]:
    """Return what a watcher asked for: in a third of a second, or, if it `asks`, as soon as it has."""
    env = SimpleNamespace(local_rank=rank.get("local_rank", 0))
    world: Any = SimpleNamespace(env=env, is_main=rank.get("is_main", True))
    asked: list[str] = []
    watcher = StopNotices(config, world, asked.append, lambda text, level: None, environ)
    watcher.watch()
    if asks:
        until(lambda: asked)
    time.sleep(0.3)
    watcher.close()
    return asked


def test_which_rank_watches_what(monkeypatch):
    monkeypatch.setattr(preemption, "_NOTICE_SECONDS", 0.05)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 600)}
    assert len(watched(DistributedConfig(preemption_margin=598.5), job, asks=True)) == 1
    assert watched(DistributedConfig(preemption_margin=1200.0), job) == []  # half of the time is left for training
    assert watched(DistributedConfig(preemption_margin=10.0), job) == []
    assert watched(DistributedConfig(preemption_margin=0.0), job) == []
    assert watched(DistributedConfig(), job, is_main=False) == []
    assert watched(DistributedConfig(), {}) == []


def test_a_notice_that_came_while_ranks_were_replaced_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(preemption, "_NOTICE_SECONDS", 0.05)
    notice = tmp_path / "preempted"
    notice.touch()
    config, now = DistributedConfig(preemption_file=str(notice)), time.time()
    assert len(watched(config, {"PHALANX_LAUNCHED_AT": str(now - 60)}, asks=True)) == 1
    assert watched(config, {"PHALANX_LAUNCHED_AT": str(now + 60)}) == [], "it was there before the launch"
    assert watched(config, {}) == []


class Rows(Dataset):
    """Asks the launcher to stop while a rank that takes over reads its job, before it handles signals."""

    def __init__(self, launcher: int) -> None:
        self.launcher = launcher

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.environ.get("PHALANX_JOINS_LATE"):
            os.kill(self.launcher, signal.SIGTERM)
            time.sleep(0.5)

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Any:
        return torch.ones(4), torch.ones(1)


class Lost(Callback):
    """Kills rank 1 at step 5; with `launcher` after a request to stop, which is not known everywhere then."""

    def __init__(self, launcher: int | None) -> None:
        self.launcher = launcher

    def on_step_end(self, trainer: Any, info: Any) -> None:
        if trainer.formation.rank == 1 and info.step == 5:
            if self.launcher is not None:
                os.kill(self.launcher, signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["before the loss is known", "while the new rank starts"])
def test_a_stop_while_a_rank_is_replaced_saves(tmp_path, moment, capfd):
    early = moment.startswith("before")
    trainer = PyTorchDDPTrainer(
        torch.nn.Linear(4, 1), loss_fn="mse", batch_size=1, device="cpu", num_workers=2, strategy="ddp", max_restarts=2,
        threads_per_rank=1, progress=False, checkpoint_dir="kept", checkpoint_frequency="1000 steps",
        callbacks=[Lost(os.getpid() if early else None), lambda info: time.sleep(0.01)],
    )  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        trainer.fit(TensorDataset(torch.ones(4000, 4), torch.ones(4000, 1)) if early else Rows(os.getpid()))
    assert ended.value.code == EXIT_PREEMPTED
    assert "stopped by SIGTERM after step" in capfd.readouterr().err
    assert saved_steps()
