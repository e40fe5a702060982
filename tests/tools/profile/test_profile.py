"""`--profile` on two ranks: delays that are put in are found again, by `phalanx report --profile`, where they were."""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from command import phalanx, write_script
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import PyTorchDDPTrainer, StepInfo, torch_compat

SCRIPT = """
import os, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate
from phalanx import Callback, PyTorchDDPTrainer

RANK = int(os.environ["RANK"])
SLOW_RANK, LOADER, SAVING = {slow}, {loader}, {saving}

def collate(samples):
    time.sleep(LOADER)
    return default_collate(samples)

class Data(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        return torch.full((32,), float(index % 7)), index % 10

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 64), nn.Linear(64, 10)
    def forward(self, x):
        if RANK == 1:
            time.sleep(SLOW_RANK)
        return self.outer(torch.relu(self.inner(x)))

class SlowDisk(Callback):
    def on_fit_start(self, trainer):
        begin = trainer.saving.begin
        def slowly(**shared):
            time.sleep(SAVING)
            begin(**shared)
        trainer.saving.begin = slowly

PyTorchDDPTrainer(
    Model(), batch_size=4, max_steps=14, device="cpu", progress=False, log_every_n_steps=1000,
    callbacks=[SlowDisk()] if SAVING else [], {more}
).fit(DataLoader(Data(), batch_size=4, collate_fn=collate))
"""


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)


def record(*words: object, slow: float = 0.0, loader: float = 0.0, saving: float = 0.0, more: str = "") -> tuple:
    """Train with delays in seconds per step; return what the report of the profile says, and what the run printed."""
    script = write_script(Path("train.py"), SCRIPT.format(slow=slow, loader=loader, saving=saving, more=more))
    answer = phalanx("train", "--script", script, "--num-workers", 2, "--run-dir", "run", *words)
    assert answer.code == 0, answer.text
    shown = phalanx("report", "run", "--profile", "--json")
    assert shown.code == 0, shown.text
    return json.loads(shown.out), answer.text


def least(found: dict, rank: int, category: str) -> float:
    return min(s["seconds"][category] for s in found["splits"] if s["rank"] == rank)


def waited(found: dict, rank: int, slow: int) -> float:
    return statistics.median(s["waited_for"].get(str(slow), 0.0) for s in found["splits"] if s["rank"] == rank)


def assert_sums(found: dict) -> None:
    for split in found["splits"]:
        assert sum(split["seconds"].values()) == pytest.approx(split["wall"], rel=1e-6)


SLOW, LOADER, SAVING = 0.1, 0.05, 0.3


def test_a_slow_rank_a_slow_loader_and_a_slow_disk_are_told_apart():
    """A busy machine adds time anywhere, and takes none of a delay away: each is found, whole, where it was put in."""
    found, printed = record(
        *("--profile", "steps=3:12", "ranks=all"),
        slow=SLOW,
        loader=LOADER,
        saving=SAVING,
        more='checkpoint_frequency="6 steps"',
    )
    assert_sums(found)
    assert (found["steps"], found["ranks"]) == (list(range(3, 13)), [0, 1])
    slow = found["straggler"]
    assert (slow["rank"], slow["phase"]) == (1, "forward")
    assert slow["extra_seconds"] > SLOW / 2  # the other rank's forward pass takes time, too
    assert waited(found, rank=0, slow=1) > SLOW / 2  # and so does its other work
    for rank in (0, 1):
        assert least(found, rank, "data") > 0.99 * LOADER
        (saved,) = [s["seconds"]["checkpoint"] for s in found["splits"] if (s["step"], s["rank"]) == (6, rank)]
        assert saved > 0.99 * SAVING
    others = [s["seconds"]["checkpoint"] for s in found["splits"] if s["step"] != 6]
    assert statistics.median(others) < LOADER / 2
    assert found["verdict"].startswith("straggler-bound"), found["verdict"]
    assert "wait for rank 1 on" in found["verdict"]
    assert found["verdict"] in printed  # at the end of the run, with the command that shows more
    assert "phalanx report run --profile" in printed
    assert {"inner", "outer", "Model"} >= {each["name"] for each in found["modules"]["0"]} >= {"inner", "outer"}
    check_merged(Path("run/profile/trace.json.gz"))
    shown = phalanx("report", "run", "--profile", "--rank", 1, "--svg", "steps.svg")
    drawn = "".join(ElementTree.parse("steps.svg").getroot().itertext())
    assert all(text in drawn for text in ("rank 0", "rank 1", "step 3, ", "backward"))
    assert "step 8" in shown.out
    assert "critical path" in shown.out
    assert phalanx("report", "run", "--profile", "--rank", 7).err.strip().endswith("Recorded ranks: 0, 1")


def check_merged(path: Path) -> None:
    """The merged trace is what Perfetto reads: a process per rank, ranges of the loop, flows that begin and end."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {rank: name.partition(" (")[0] for rank, name in names.items()} == {0: "rank 0", 1: "rank 1"}
    for rank in (0, 1):
        ranges = {event["name"] for event in events if event["pid"] == rank and event["ph"] == "X"}
        wanted = ("step 6", "data", "forward", "backward", "optimizer", "checkpoint")
        assert {f"phalanx:{name}" for name in wanted} <= ranges
        assert any(name.startswith(("c10d::allreduce", "phalanx:all-reduce")) for name in ranges)
    flows: dict[int, list[dict]] = {}
    for event in events:
        if event.get("cat") == "collective":
            flows.setdefault(event["id"], []).append(event)
    assert flows
    for ends in flows.values():
        assert [(each["ph"], each["name"]) for each in ends] == [("s", ends[0]["name"]), ("f", ends[0]["name"])]
        assert {each["pid"] for each in ends} == {0, 1}
        assert ends[0]["ts"] <= ends[1]["ts"]
        for each in ends:  # an arrow is drawn where a range of that thread holds its time
            assert any(
                e["ph"] == "X" and (e["pid"], e["tid"]) == (each["pid"], each["tid"])
                and e["ts"] <= each["ts"] <= e["ts"] + e["dur"]
                for e in events
            )  # fmt: skip
    own = [event["id"] for event in events if event["ph"] == "s"]
    assert len(own) == len(set(own)), "flows of two ranks have different numbers"


def test_one_rank_and_the_memory_of_its_steps():
    found, _ = record("--profile", "ranks=1 memory steps=3", more='strategy="ring"')
    assert (found["ranks"], found["steps"]) == ([1], [3])
    assert [path.name for path in sorted(Path("run/profile").iterdir())] == ["rank-1.json.gz", "trace.json.gz"]
    owners = {name for name, _, _ in found["memory"]["1"]["owners"]}
    assert found["memory"]["1"]["peak"] > 0
    assert owners & {"inner", "outer", "Model"}, owners
    shown = phalanx("report", "run", "--profile").out
    assert "memory of rank 1 at its peak" in shown
    assert "memray run --follow-fork" in shown


def test_steps_and_ranks_that_the_run_does_not_have():
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    trainer = PyTorchDDPTrainer(nn.Linear(4, 1), batch_size=4, epochs=1, num_workers=2, device="cpu", progress=False)
    with pytest.raises(Exception, match="the run has 4 steps"):
        trainer.fit(data, profile="steps=50:60")
    with pytest.raises(Exception, match="there is no rank 5"):
        trainer.fit(data, profile="ranks=5")
    with pytest.raises(Exception, match="nvtx marks ranges for nsys, and needs ranks on GPUs"):
        trainer.fit(data, profile="nvtx")


def test_a_profiler_around_fit_does_not_see_the_ranks():
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    trainer = PyTorchDDPTrainer(nn.Linear(4, 1), batch_size=4, max_steps=1, num_workers=2, device="cpu", progress=False)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.warns(UserWarning, match=r"2 ranks that train are other processes.*profile='steps=10:15'"),
    ):
        trainer.fit(data)


def alone(**settings: object) -> PyTorchDDPTrainer:
    return PyTorchDDPTrainer(
        nn.Linear(4, 1), batch_size=4, max_steps=4, num_workers=1, device="cpu", run_dir="run", **settings
    )


def test_another_profiler_in_the_same_process_is_left_alone(capsys):
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as other:
        alone().fit(data, profile="steps=2:3")
    assert any(event.key == "Optimizer.step#AdamW.step" for event in other.key_averages())
    shown = capsys.readouterr()
    assert "another torch.profiler is active here" in shown.out + shown.err
    assert not Path("run/profile").exists()


def test_a_run_that_fails_while_it_records_leaves_no_profiler_behind():
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))

    def fail(info: StepInfo) -> None:
        if info.step == 3:
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        alone(callbacks=[fail]).fit(data, profile="steps=2:4")
    assert not torch_compat.is_profiling()
    assert not nn.modules.module._global_forward_hooks
    assert "ended before it was complete, at step" in phalanx("report", "run", "--profile").err
    alone().fit(data, profile="steps=2:3", run_dir="again")
    assert phalanx("report", "again", "--profile").code == 0
