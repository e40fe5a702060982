"""Lost ranks are replaced in place: the others keep their processes, and the weights are those of a quiet run."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from layouts import make_tokens
from long_proofs import long_proof
from torch import nn
from torch.utils.data import Dataset
from waiting import until

import phalanx
from phalanx.errors import RankFailedError
from phalanx.recovery import request_ranks
from phalanx.reliability import Fault
from phalanx.zoo.models.gpt import gpt

STEPS = 40
FIXED = {"strategy": "ring", "fixed_order": True}
AVERAGED = {"ema_decay": 0.9}


class Rows(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(512, 8, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index], (self.x[index].sum() > 0).long()


class Faults(phalanx.Callback):
    """Sends signals to ranks after steps, each once: `(rank, step, signal)`; or raises, where the signal is None."""

    def __init__(self, folder: Path, faults, pause: float = 0.0) -> None:
        self.folder, self.faults, self.pause = folder, list(faults), pause

    def on_fit_start(self, trainer) -> None:
        (self.folder / f"slot-{os.environ['PHALANX_SLOT']}").touch()

    def on_step_end(self, trainer, info) -> None:
        time.sleep(self.pause)
        for number, (rank, step, what) in enumerate(self.faults):
            mark = self.folder / f"fault-{number}"
            if (trainer.formation.rank, info.step) == (rank, step) and not mark.exists():
                mark.write_text(str(os.getpid()))
                if what is None:
                    raise ValueError("a fault of this test")
                os.kill(os.getpid(), what)


def make_model(*, buffers: bool = False) -> nn.Module:
    torch.manual_seed(3)
    norm = [nn.BatchNorm1d(16)] if buffers else []
    return nn.Sequential(nn.Linear(8, 16), *norm, nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))


def train(tmp_path, name, faults=(), *, ranks=4, pause=0.0, buffers=False, plan=None, make=None, **settings):
    """Train, and return the weights and the events."""
    folder = tmp_path / name
    folder.mkdir()
    model = make() if make is not None else make_model(buffers=buffers)
    chosen = {"max_restarts": 20, "max_steps": STEPS, "learning_rate": 0.02, **settings}
    if chosen["max_restarts"] or not isinstance(ranks, int):
        chosen.setdefault("heartbeat_timeout", 1.0)
    trainer = phalanx.PyTorchDDPTrainer(
        model=model,
        num_workers=ranks,
        device="cpu",
        batch_size=4,
        progress=False,
        run_dir=str(folder / "run"),
        callbacks=[Faults(folder, faults, pause), *([] if plan is None else [plan])],
        **chosen,
    )
    trainer.fit(Rows())
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    assert all((folder / f"fault-{number}").exists() for number in range(len(faults))), "every fault happened"
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, events


def assert_equal(one, other) -> None:
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.fixture(scope="module")
def quiet(tmp_path_factory, fork_server):
    """The weights of a run in a fixed order that nothing disturbs, which several tests compare with."""
    weights, _ = train(tmp_path_factory.mktemp("quiet"), "quiet", **FIXED)
    return weights


def recoveries(events):
    return [event for event in events if event["event"] == "recovered"]


KILL, STOP = signal.SIGKILL, signal.SIGSTOP


# Plain ddp is `test_buffers_are_those_of_the_last_step`, and with an average of the weights here. In a fixed order
# several are lost in `test_several_at_once_a_stopped_one_and_an_exception`.
@pytest.mark.parametrize(
    "settings",
    [pytest.param(chosen, marks=long_proof) for chosen in (FIXED, {"compression": "topk"})] + [AVERAGED],
    ids=str,
)
def test_killed_ranks_are_replaced_and_the_weights_are_those_of_a_quiet_run(tmp_path, settings, fork_server):
    quiet, _ = train(tmp_path, "quiet", **settings)
    hit, events = train(tmp_path, "hit", [(2, 10, KILL), (0, 20, KILL), (3, 21, KILL)], **settings)
    assert [event["lost"] for event in recoveries(events)] == [[2], [0], [3]]
    assert all(event["lost_steps"] == 0 for event in recoveries(events))
    assert sum(event["event"] == "run_started" for event in events) == 1
    if "compression" in settings:  # what a lost rank kept back is lost with it
        assert all(torch.isfinite(tensor).all() for tensor in hit.values())
    else:
        assert_equal(quiet, hit)


def test_several_at_once_a_stopped_one_and_an_exception(tmp_path, quiet):
    faults = [(1, 8, KILL), (2, 8, KILL), (3, 8, KILL), (1, 16, STOP), (2, 24, None)]
    hit, events = train(tmp_path, "hit", faults, **FIXED)
    reasons = " ".join(event["reason"] for event in recoveries(events))
    assert "SIGKILL" in reasons
    assert "ValueError: a fault of this test" in reasons
    assert_equal(quiet, hit)


def test_buffers_are_those_of_the_last_step(tmp_path, fork_server):
    quiet, _ = train(tmp_path, "quiet", buffers=True, ranks=2, strategy="ddp")
    hit, _ = train(tmp_path, "hit", [(1, 10, KILL)], buffers=True, ranks=2, strategy="ddp")
    assert_equal(quiet, hit)


class Meet(torch.autograd.Function):
    """All ranks meet in the backward pass, as those of a synchronised BatchNorm do."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.distributed.all_reduce(torch.zeros(1))
        return gradient


class MeetsInBackward(nn.Sequential):
    def forward(self, inputs):
        return self[1](Meet.apply(self[0](inputs)))


class HoldsTrainers(phalanx.Callback):
    """Holds every trainer that it was called with, as users' callbacks do, and kills rank 1 in a backward pass."""

    def __init__(self, mark: Path) -> None:
        self.mark, self.trainers = mark, []

    def on_fit_start(self, trainer) -> None:
        self.trainers.append(trainer)
        last = next(trainer.formation.unwrap(trainer.model)[1].parameters())
        last.register_hook(lambda gradient: self.kill(trainer))

    def kill(self, trainer) -> None:
        if trainer is self.trainers[-1] and (trainer.formation.rank, trainer.step) == (1, 9) and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), KILL)

    def __getstate__(self):
        return {"mark": self.mark, "trainers": []}


def test_a_callback_may_hold_the_trainer_of_an_interrupted_pass(tmp_path, fork_server):
    """DDP's hooks of that pass stay on the parameters as long as the trainer is held."""
    settings = {"ranks": 2, "strategy": "ddp", "bucket_cap_mb": 0.0001, "make": make_meeting_model}
    quiet, _ = train(tmp_path, "quiet", **settings)
    hit, events = train(tmp_path, "hit", plan=HoldsTrainers(tmp_path / "killed"), **settings)
    assert [event["lost"] for event in recoveries(events)] == [[1]]
    assert_equal(quiet, hit)


def make_meeting_model() -> nn.Module:
    torch.manual_seed(3)
    return MeetsInBackward(nn.Linear(8, 16), nn.Linear(16, 2))


def test_where_all_ranks_are_lost_they_start_again_from_a_checkpoint(tmp_path, quiet):
    everyone = [(rank, 20, KILL) for rank in range(4)]
    hit, events = train(tmp_path, "hit", everyone, checkpoint_frequency="5 steps", **FIXED)
    assert sum(event["event"] == "run_started" for event in events) == 2
    assert_equal(quiet, hit)


def test_without_restarts_left_the_run_goes_on_with_fewer_ranks(tmp_path, quiet):
    hit, events = train(tmp_path, "hit", [(1, 10, KILL)], ranks=(1, 4), max_restarts=0, **FIXED)
    assert [event["world_size"] for event in recoveries(events)] == [2], "the largest power of two below 3"
    assert_equal(quiet, hit)


def test_without_restarts_and_without_a_range_the_run_fails(tmp_path, fork_server):
    with pytest.raises(RankFailedError, match="SIGKILL"):
        train(tmp_path, "hit", [(1, 10, KILL)], max_restarts=0)


@pytest.mark.parametrize("settings", [FIXED, pytest.param({}, marks=long_proof)], ids=["fixed order", "auto"])
def test_the_number_of_ranks_changes_at_a_step_and_the_global_batch_does_not(tmp_path, settings, fork_server):
    quiet, _ = train(tmp_path, "quiet", max_steps=150, **settings)
    wanted = (2, 4) if "fixed_order" in settings else (3, 4)

    def ask() -> None:
        logs = tmp_path / "hit" / "run" / "logs"
        until(lambda: count(tmp_path / "hit" / "run", "step") > 0)
        for number, ranks in enumerate(wanted):
            request_ranks(logs, ranks)
            until(lambda expected=number + 1: count(tmp_path / "hit" / "run", "recovered") == expected)

    asking = threading.Thread(target=ask)
    asking.start()
    hit, events = train(tmp_path, "hit", ranks=(1, 4), pause=0.03, max_steps=150, **settings)
    asking.join()
    assert [event["world_size"] for event in recoveries(events)] == list(wanted)
    if "fixed_order" in settings:
        assert_equal(quiet, hit)
    else:
        for name, tensor in quiet.items():
            torch.testing.assert_close(tensor, hit[name], rtol=1e-4, atol=1e-5)


def count(run: Path, kind: str) -> int:
    path = run / "events.jsonl"
    return sum(json.loads(line)["event"] == kind for line in path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("strategy", [pytest.param("local-sgd", marks=long_proof), "diloco"])
def test_ranks_that_average_now_and_then_go_on(tmp_path, strategy, fork_server):
    hit, events = train(tmp_path, "hit", [(2, 10, KILL), (0, 23, KILL)], strategy=strategy, sync_every=4)
    assert len(recoveries(events)) == 2
    assert all(torch.isfinite(tensor).all() for tensor in hit.values())


@pytest.mark.parametrize(
    "settings",
    [{"strategy": "fsdp"}, pytest.param({"strategy": "fsdp", "sharding": "hybrid"}, marks=long_proof)],
    ids=str,
)
def test_shards_come_from_the_memory_of_neighbours(tmp_path, settings, fork_server):
    settings = {"memory_frequency": 4, "threads_per_rank": 1, **settings}
    quiet, _ = train(tmp_path, "quiet", **settings)
    hit, events = train(tmp_path, "hit", [(2, 10, KILL), (0, 21, KILL)], **settings)
    assert [event["lost"] for event in recoveries(events)] == [[2], [0]]
    assert recoveries(events)[0]["step"] in (4, 8), "the shards of step 8 may be on their way"
    assert recoveries(events)[1]["step"] in (16, 20)
    assert sum(event["event"] == "run_started" for event in events) == 1
    assert_equal(quiet, hit)


@pytest.mark.parametrize(
    "axis",
    [
        "tensor_parallel",
        pytest.param("pipeline_parallel", marks=long_proof),
        pytest.param("context_parallel", marks=long_proof),
    ],
)
def test_model_parallel_ranks_are_replaced(tmp_path, axis, fork_server):
    def fit(name, faults):
        (tmp_path / name).mkdir()
        torch.manual_seed(5)
        model = gpt(layers=2, vocab_size=61, seq_len=16)
        trainer = phalanx.PyTorchDDPTrainer(
            model=model,
            num_workers=4,
            device="cpu",
            batch_size=8,
            max_steps=8,
            max_restarts=3,
            memory_frequency=3,
            threads_per_rank=1,
            progress=False,
            run_dir=str(tmp_path / name / "run"),
            callbacks=[Faults(tmp_path / name, faults)],
            **{axis: 2},
        )
        trainer.fit(make_tokens(64, 16, ignoring=False))
        return model.state_dict(), tmp_path / name / "run"

    quiet, _ = fit("quiet", [])
    hit, run = fit("hit", [(1, 5, KILL)])
    assert count(run, "recovered") == 1
    assert_equal(quiet, hit)


@long_proof
def test_a_shard_that_two_lost_ranks_held_comes_from_a_checkpoint(tmp_path, fork_server):
    settings = {"strategy": "fsdp", "memory_frequency": 4, "checkpoint_frequency": "5 steps", "async_checkpoint": False}
    quiet, _ = train(tmp_path, "quiet", **settings)
    hit, events = train(tmp_path, "hit", [(1, 12, KILL), (2, 12, KILL)], **settings)
    assert recoveries(events)[-1]["step"] == 10
    assert_equal(quiet, hit)


@pytest.mark.parametrize(("lost", "mode"), [(1, "sync"), pytest.param(2, "async", marks=long_proof), (0, "sync")])
def test_workers_of_parameter_servers_are_replaced(tmp_path, lost, mode, fork_server):
    """Rank 0 runs the shard: with it the state is lost, and the ranks go on from the last checkpoint, in place."""
    settings = {"strategy": "parameter-server", "server_mode": mode, "checkpoint_frequency": "5 steps"}
    settings["async_checkpoint"] = False  # a save in flight is lost with rank 0
    hit, events = train(tmp_path, "hit", [(lost, 13, KILL)], **settings)
    assert [event["lost"] for event in recoveries(events)] == [[lost]]
    assert sum(event["event"] == "run_started" for event in events) == 1
    assert recoveries(events)[0]["step"] >= (10 if lost == 0 else 12)
    assert all(torch.isfinite(tensor).all() for tensor in hit.values())


class Odd(phalanx.Callback):
    """Changes one weight of a rank after a step, as a bad memory cell does; or makes a rank slow or sleep, once."""

    def __init__(self, mark: Path, what: str) -> None:
        self.mark, self.what = mark, what

    def on_step_end(self, trainer, info) -> None:
        if trainer.formation.rank != 1 or (self.mark.exists() and self.mark.read_text() != str(os.getpid())):
            return
        if self.what == "slow" and not self.mark.exists():
            model = trainer.formation.unwrap(trainer.model)
            model.register_forward_pre_hook(lambda module, inputs: time.sleep(0.05))
        if self.what == "flip" and info.step == 12:
            with torch.no_grad():
                next(trainer.formation.unwrap(trainer.model).parameters()).view(-1)[0] += 1.0
        if self.what == "sleep" and info.step == 12:
            time.sleep(240)
        self.mark.write_text(str(os.getpid()))


@pytest.mark.parametrize(
    ("what", "settings"),
    [
        ("flip", {"check_replicas_every": 4, "on_corruption": "replace"}),
        ("slow", {"straggler_factor": 3.0, "on_straggler": "replace", "max_steps": 60}),
        ("sleep", {"stall_timeout": 2.0}),
    ],
    ids=["wrong weights", "slow", "without progress"],
)
def test_an_odd_rank_is_replaced(tmp_path, what, settings, fork_server):
    model, folder = make_model(), tmp_path / "run"
    settings = {"max_steps": STEPS, "max_restarts": 3, "batch_size": 4, "num_workers": 3, "strategy": "ddp", **settings}
    trainer = phalanx.PyTorchDDPTrainer(
        model=model, device="cpu", run_dir=str(folder), callbacks=[Odd(tmp_path / "mark", what)], **settings
    )
    trainer.fit(Rows())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["lost"] for event in recoveries(events)] == [[1]]


def test_spare_ranks_take_over(tmp_path, quiet):
    hit, events = train(tmp_path, "hit", [(1, 20, KILL)], spares=1, **FIXED)
    assert len(recoveries(events)) == 1
    assert (tmp_path / "hit" / "slot-4").exists(), "the spare rank was used, not one that was started after the loss"
    assert_equal(quiet, hit)


def test_ranks_that_are_lost_while_the_others_form_a_group(tmp_path, quiet):
    """A rank stops some step times after another was killed: while survivors leave, and while they connect.

    `test_group` has a second loss in every state, `test_fault_runs` losses at random moments.
    """
    faults = [
        fault
        for number, phase in enumerate((1, 8))
        for fault in (Fault("kill", 5 + 6 * number, 2), Fault("stop", 5 + 6 * number, 3, phase=float(phase)))
    ]
    plan = phalanx.FaultPlan(*faults, folder=tmp_path / "marks")
    hit, events = train(tmp_path, "hit", plan=plan, heartbeat_timeout=0.5, **FIXED)
    assert sum(event["event"] == "run_started" for event in events) == 1, "no restart from a checkpoint"
    assert len(list((tmp_path / "marks").iterdir())) == len(faults)
    lost = {rank for event in recoveries(events) for rank in event["lost"]}
    assert lost == {2, 3}, "no survivor was killed because it did not leave"
    assert_equal(quiet, hit)
