"""Random faults on a real run: the weights are those of a quiet run, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from command import phalanx as command
from long_proofs import long_proof
from network_hosts import network
from torch import nn
from torch.utils.data import Dataset

import phalanx
from phalanx.errors import UsageError
from phalanx.reliability import Mark, Marks, read_faults

EXACT = ("--strategy", "ring", "--fixed-order", "--device", "cpu")
FIXED = (*EXACT, "--heartbeat-timeout", "0.5")


class Rows(Dataset):
    def __init__(self) -> None:
        self.x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index], (self.x[index].sum() > 0).long()


def train(folder: Path, steps: int, plan: phalanx.FaultPlan | None = None):
    """Train on four ranks, and return the weights and the changes of the group."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    trainer = phalanx.PyTorchDDPTrainer(
        model=model,
        num_workers=4,
        device="cpu",
        batch_size=4,
        progress=False,
        run_dir=str(folder),
        strategy="ring",
        fixed_order=True,
        max_restarts=1000,
        heartbeat_timeout=0.3,
        max_steps=steps,
        learning_rate=0.02,
        callbacks=[] if plan is None else [plan],
    )
    trainer.fit(Rows())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "run_started" for event in events) == 1, "no restart from a checkpoint"
    return model.state_dict(), [event for event in events if event["event"] == "recovered"]


def prove(tmp_path: Path, faults: int, steps: int, seed: int) -> None:
    quiet, _ = train(tmp_path / "quiet", steps)
    plan = phalanx.FaultPlan.random(faults, ranks=4, steps=steps, seed=seed)
    hit, changes = train(tmp_path / "hit", steps, plan)
    marks = Marks(tmp_path / "hit" / "faults").read()
    assert len(marks) == faults, "every fault happened, and once"
    for mark in marks.values():
        after = next(change for change in changes if change["time"] > mark.time)
        assert mark.step - after["step"] <= 1, "at most one step is lost"
    for name, tensor in quiet.items():
        assert torch.equal(tensor, hit[name]), name


def test_random_faults_leave_the_weights_as_they_are(tmp_path, fork_server):
    prove(tmp_path, 6, 30, seed=4)


@long_proof
@pytest.mark.parametrize("seed", [1, 2])
def test_two_hundred_random_faults_leave_the_weights_as_they_are(tmp_path, seed, fork_server):
    prove(tmp_path, 200, 500, seed)


@long_proof
def test_the_command_survives_a_killed_launcher_and_a_damaged_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults = ["--fault", "corrupt:step=24", "--fault", "launcher:step=25", "--fault", "kill:rank=1,step=30"]
    words = ["verify", "digits", "--num-workers", "2", "--max-steps", "40", *FIXED, *faults, "--json"]
    answer = command(*words, "--no-async-checkpoint", "--out", "out")  # the save of step 23 is complete before step 24
    report = json.loads(answer.out)
    assert answer.code == 0, report
    assert (report["difference"], report["left"], report["problems"]) == (0.0, [], [])
    _, launcher, kill = report["faults"]
    assert launcher["how"] == "resumed by a new command"
    assert launcher["lost_steps"] == 25 - 20, "the damaged checkpoint of step 23, the first epoch, was passed over"
    assert (kill["how"], kill["lost_steps"]) == ("in place, 2 ranks", 0)


@long_proof
def test_the_command_survives_a_full_disk_a_killed_store_and_other_sizes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faults.toml").write_text(
        '[[fault]]\nkind = "disk"\nrank = 1\nstep = 15\n[[fault]]\nkind = "store"\nstep = 30\n'
        '[[fault]]\nkind = "scale"\nranks = 2\nstep = 50\n[[fault]]\nkind = "scale"\nranks = 4\nstep = 60\n'
    )
    words = ["verify", "digits", "--num-workers", "1:4", "--max-steps", "90", *FIXED, "--fault-plan", "faults.toml"]
    answer = command(*words, "--json")
    report = json.loads(answer.out)
    assert (answer.code, report["difference"], report["problems"]) == (0, 0.0, []), report
    hows = [fault["how"] for fault in report["faults"]]
    assert hows == ["restart from a checkpoint"] * 2 + ["in place, 2 ranks", "in place, 4 ranks"]


@long_proof
def test_the_command_cuts_and_slows_links_between_hosts(tmp_path, monkeypatch):
    with network(1):  # else skipped
        pass
    monkeypatch.chdir(tmp_path)
    faults = ["--fault", "slow:rank=2,step=10,rate=20mbit,seconds=1", "--fault", "cut:rank=2,step=40"]
    words = ["verify", "digits", "--num-workers", "2:4", "--num-nodes", "2", "--max-steps", "100", *EXACT, *faults]
    answer = command(*words, "--heartbeat-timeout", "2", "--json")
    report = json.loads(answer.out)
    assert (answer.code, report["difference"], report["problems"]) == (0, 0.0, []), report
    assert [fault["how"] for fault in report["faults"]] == ["the ranks went on", "in place, 2 ranks"]


def test_a_run_that_fails_and_what_it_leaves_are_reported(tmp_path, monkeypatch):
    """One rank, and no restart is left: the run cannot go on."""
    monkeypatch.chdir(tmp_path)
    faults = ["--fault", "exception:step=5", "--fault", "exception:step=6", "--max-restarts", "1"]
    answer = command("verify", "digits", "--num-workers", "1", "--max-steps", "20", "--device", "cpu", *faults)
    assert answer.code == 1
    assert "the run failed with exit code" in answer.out
    assert "InjectedFault" in answer.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fault", "kil:rank=1,step=5"], "Did you mean 'kill'"),
        (["--fault", "kill:rank=1"], "needs step=N"),
        (["--fault", "kill:rnk=1,step=5"], "rank"),
        (["--fault", "kill:rank=7,step=5"], "ranks 0 to 1"),
        (["--fault", "kill:step=500"], "the run has 30 steps"),
        (["--fault", "cut:step=5"], "--num-nodes 2"),
        (["--fault", "scale:step=5"], "how many ranks"),
        (["--fault", "kill:step=x"], "step = 'x'"),
        (["--fault-plan", "none.toml"], "no file at none.toml"),
        (["--faults", "0"], "draw 1 or more"),
        (["--kinds", "kill"], "--faults 20"),
        (["--faults", "3", "--kinds", "cut"], "not drawn at random"),
        (["--faults", "2", "--run-dir", "x"], "--out"),
    ],
)
def test_mistakes_are_reported(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = command("verify", "digits", "--num-workers", "2", "--max-steps", "30", *words)
    assert answer.code == 2
    assert said in answer.text
    assert not list(tmp_path.iterdir())


def test_objects_of_a_recipe_are_not_asked_for_with_a_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    answer = command("verify", "--script", str(script), "--num-workers", "2", "--fault", "kill:step=5", "--own-objects")
    assert answer.code == 2
    assert "--own-objects is for recipes" in answer.text


def test_plans_are_read_from_files_and_drawn_from_a_seed(tmp_path):
    path = tmp_path / "faults.toml"
    path.write_text('[[fault]]\nkind = "kill"\nrank = 2\nstep = 50\n')
    assert [str(fault) for fault in read_faults(path)] == ["kill:step=50,rank=2"]
    path.write_text("faults = 3\n")
    with pytest.raises(UsageError, match="does not hold a list"):
        read_faults(path)
    one, same, other = (
        phalanx.FaultPlan.random(20, ranks=4, steps=100, seed=seed, kinds=["kill", "stop"]).faults for seed in (1, 1, 2)
    )
    assert one == same != other
    assert len({fault.step for fault in one}) == 20
    assert {fault.kind for fault in one} == {"kill", "stop"}


def test_a_fault_happens_once(tmp_path):
    marks = Marks(tmp_path / "marks")
    assert marks.take(Mark(3, 1, 20, 0.0))
    assert not marks.take(Mark(3, 1, 21, 0.0))
    assert marks.read()[3].step == 20


def test_a_plan_by_the_environment_needs_no_change_of_the_code(tmp_path, monkeypatch, fork_server):
    plan = tmp_path / "plan.json"
    plan.write_text('[{"kind": "exception", "rank": 1, "step": 10}]')
    monkeypatch.setenv("PHALANX_FAULTS", str(plan))
    _, changes = train(tmp_path / "hit", 20)
    assert [change["lost"] for change in changes] == [[1]]
    assert "InjectedFault" in changes[0]["reason"]


@pytest.mark.parametrize("text", [None, "no JSON", "3", '[{"kind": "kil", "step": 3}]'])
def test_a_plan_that_cannot_be_read_is_named(tmp_path, monkeypatch, text):
    plan = tmp_path / "plan.json"
    if text is not None:
        plan.write_text(text)
    monkeypatch.setenv("PHALANX_FAULTS", str(plan))
    with pytest.raises(UsageError, match=r"plan\.json|Did you mean 'kill'"):
        phalanx.FaultPlan.from_environment()


def test_links_are_cut_in_namespaces_only(monkeypatch):
    """A link of the machine itself must never be touched."""
    from phalanx.loop import faults

    monkeypatch.delenv(faults.LINK, raising=False)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a command was run"))
    with pytest.raises(UsageError, match="network namespaces"):
        faults._change_link(faults.Fault("cut", 5))
