"""Runs that share a checkpoint directory: each has its own identity, over restarts too, and leaves the others alone."""

from __future__ import annotations

import os

import pytest
import torch

import phalanx
from phalanx.checkpoint import RunLock, Snapshot, choose, list_checkpoints, save
from phalanx.errors import CheckpointError
from phalanx.loop.formation import Formation
from phalanx.world.env import read_rank_env

DATA = [(torch.ones(4, 2), torch.zeros(4, 1))] * 4


@pytest.fixture
def attempt(monkeypatch):
    """Be a rank that a launcher started: attempt(number, launch_id)."""

    def become(number: int, launch_id: str) -> None:
        monkeypatch.setattr("phalanx.loop.formation._FORMATIONS", iter(range(1, 99)))  # a process of its own
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "TORCHELASTIC_RESTART_COUNT": str(number),
            "PHALANX_RUN_ID": launch_id,
        }.items():
            monkeypatch.setenv(name, value)

    return become


def fit(directory, *, rate: float, **settings):
    model = torch.nn.Linear(2, 1)
    trainer = phalanx.PyTorchDDPTrainer(
        model=model, device="cpu", optimizer="sgd", learning_rate=rate, progress=False,
        checkpoint_dir=str(directory), run_dir=str(directory / "run"), **settings,
    )  # fmt: skip
    history = trainer.fit(DATA)
    return [step["learning_rate"] for step in history.steps], history


def test_a_restart_does_not_continue_another_run(tmp_path, attempt):
    attempt(0, "yesterday")
    fit(tmp_path, rate=0.01, epochs=2)
    attempt(1, "today")
    rates, history = fit(tmp_path, rate=0.3, epochs=1)
    assert (set(rates), len(history.epochs)) == ({0.3}, 1)


def test_a_restart_continues_the_same_run_and_not_a_newer_one(tmp_path, attempt):
    attempt(0, "today")
    fit(tmp_path, rate=0.3, epochs=1)
    attempt(0, "other")
    fit(tmp_path, rate=0.01, epochs=3)
    attempt(1, "today")
    _, history = fit(tmp_path, rate=0.3, epochs=2)
    assert [(epoch.epoch, epoch.learning_rate) for epoch in history.epochs] == [(1, 0.3), (2, 0.3)]


def test_a_restart_whose_only_checkpoint_is_damaged_ends_with_an_error(tmp_path, attempt):
    attempt(0, "today")
    fit(tmp_path, rate=0.3, epochs=1)
    (manifest,) = tmp_path.glob("step-*/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-3])
    attempt(1, "today")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is usable"):
        fit(tmp_path, rate=0.3, epochs=1)
    attempt(0, "tomorrow")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is usable"):
        fit(tmp_path, rate=0.3, epochs=1, resume_from_checkpoint=True)


def test_each_formation_of_a_launch_is_a_run_and_keeps_its_name_after_a_restart(attempt):
    attempt(0, "launch")
    first = [Formation(device="cpu").run_id for _ in range(2)]
    attempt(1, "launch")
    assert [Formation(device="cpu").run_id for _ in range(2)] == first
    assert len(set(first)) == 2


def test_torchrun_on_one_node_is_identified_by_its_process():
    env = {"RANK": "0", "WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    assert str(os.getppid()) in read_rank_env(env).launch_id.split("/")
    assert read_rank_env({**env, "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job7"}).launch_id == "job7"
    assert read_rank_env({"RANK": "0", "WORLD_SIZE": "1"}).launch_id == ""


def own_loop(directory, resume: bool = True) -> Formation:
    formation = Formation(device="cpu", keep_last=2)
    model = formation.prepare(torch.nn.Linear(2, 1))
    formation.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    if resume:
        formation.load(directory, required=False)
    return formation


def save_at(formation: Formation, directory, *steps: int) -> None:
    for step in steps:
        formation.gradients.steps = step
        formation.save(directory)


def steps_in(directory) -> list[tuple[int, str]]:
    return sorted((found.step, found.manifest.run_id) for found in list_checkpoints(directory))


def test_two_runs_that_continue_one_checkpoint_stay_separate(tmp_path):
    with own_loop(tmp_path) as first:
        save_at(first, tmp_path, 10, 20)
    with own_loop(tmp_path) as one, own_loop(tmp_path) as other:
        assert len({first.run_id, one.run_id, other.run_id}) == 3
        assert one.lineage == other.lineage == [{"run_id": first.run_id, "step": 20}]
        save_at(one, tmp_path, 30, 40)
        save_at(other, tmp_path, 30, 40, 50)
        save_at(one, tmp_path, 50)
        kept = {one.run_id: [40, 50], other.run_id: [40, 50]}
        assert steps_in(tmp_path) == sorted((step, run) for run, steps in kept.items() for step in steps)


def test_a_resumed_run_removes_checkpoints_of_the_finished_run_it_continues(tmp_path):
    first = own_loop(tmp_path)
    save_at(first, tmp_path, 10, 20)
    with own_loop(tmp_path) as second:
        save_at(second, tmp_path, 30)
        assert [step for step, _ in steps_in(tmp_path)] == [10, 20, 30]  # the first is under way
        first.close()
        save_at(second, tmp_path, 40)
        assert [step for step, _ in steps_in(tmp_path)] == [30, 40]
    assert not list(tmp_path.glob(".run-*"))


def test_a_branch_from_an_earlier_step_does_not_change_the_run(tmp_path):
    with own_loop(tmp_path) as first:
        save_at(first, tmp_path, 10, 20)
    with own_loop(tmp_path / "step-00000010") as branch:
        save_at(branch, tmp_path, 15, 16, 17)
    assert [step for step, _ in steps_in(tmp_path)] == [10, 16, 17, 20]


def test_a_checkpoint_published_by_a_clock_that_is_behind_is_still_the_newest(tmp_path, monkeypatch):
    snapshot = Snapshot(1, 0, {"model": {"w": torch.zeros(2)}})
    save(tmp_path, snapshot, run_id="run")
    monkeypatch.setattr("phalanx.checkpoint.write.time.time", lambda: 0.0)
    save(tmp_path, Snapshot(2, 0, snapshot.tensors), run_id="run")
    assert choose(tmp_path).checkpoint.step == 2


def test_the_lock_of_an_ended_run_is_removed_and_that_of_a_running_one_kept(tmp_path):
    dead, living = RunLock(tmp_path, "dead"), RunLock(tmp_path, "living")
    os.close(dead._file)
    save(tmp_path, Snapshot(1, 0, {"model": {"w": torch.zeros(2)}}), run_id="run")
    assert [path.name for path in tmp_path.glob(".run-*")] == [".run-living.lock"]
    living.release()
