"""Ranks on Ray: a real head and a second node, a killed worker, a killed machine, what does not answer or fit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from command import COMMAND, Answer, finish, write_script

pytest.importorskip("ray", reason="Ray is not installed: pip install 'phalanx[ray]'")

from ray_cluster_hosts import TwoMachines, in_a_namespace_of_its_own, ray_environment, silent_port, why_no_namespaces

from phalanx.errors import UsageError
from phalanx.launch import ray_cluster
from phalanx.launch.ray_cluster import check_address
from phalanx.launch.ray_train import read_resources

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from phalanx import PyTorchDDPTrainer

def watch(info):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if sys.argv[1] == "die" and first and info.step == 5 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "wait" and os.environ["WORLD_SIZE"] == "2":
        if info.step == 5:
            Path(f"reached-{os.environ['RANK']}").touch()
            time.sleep(120)

torch.manual_seed(0)
x = torch.randn(32, 4)
data = TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
trainer = PyTorchDDPTrainer(model, batch_size=4, epochs=2, checkpoint_frequency="4 steps", hooks=[watch])
trainer.fit(data)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "ends after", sys.argv[1])
if os.environ["RANK"] == "0":
    torch.save(trainer.model.state_dict(), "weights.pt")
"""
STEPS = 8
"""Of 32 samples, 4 on each of two ranks, twice."""


@pytest.fixture(scope="module")
def machines() -> Iterator[TwoMachines]:
    """One cluster for the whole module; the last test pulls the plug of its second machine."""
    reason = why_no_namespaces()
    if reason is not None:
        pytest.skip(reason)
    found = TwoMachines()
    try:
        found.up()
        yield found
    finally:
        found.down()


def train(machines: TwoMachines, folder: Path, *words: str, seconds: float = 150) -> Answer:
    """Run `phalanx train --backend ray` on the first machine."""
    return finish(start(machines, folder, *words), seconds)


def start(machines: TwoMachines, folder: Path, *words: str) -> subprocess.Popen[str]:
    flags = ("--backend", "ray", "--device", "cpu", "--address", machines.address, "--run-dir", "run", "--no-progress")
    own = words.index("--") if "--" in words else len(words)
    return subprocess.Popen(
        machines.command(*COMMAND, "train", *words[:own], *flags, *words[own:]),
        cwd=folder,
        env=ray_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run/events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


def test_a_killed_worker_restarts_from_the_checkpoint_and_ends_with_the_weights_of_a_local_run(machines, tmp_path):
    on_ray, here = tmp_path / "ray", tmp_path / "local"
    for folder in (on_ray, here):
        folder.mkdir()
        write_script(folder / "train.py", SCRIPT)
    answer = train(machines, on_ray, "--script", "train.py", "--num-workers", "2", "--max-restarts", "1", "--", "die")
    assert answer.code == 0, answer.text
    assert "rank 0 of 2 ends after die" in answer.out
    assert "rank 1 is gone: its process was killed" in answer.err
    assert "restart 1 with 2 ranks" in answer.err
    assert [event["first_step"] for event in events(on_ray, "run_started")] == [0, 4]
    assert "ends after die" in (on_ray / "run/logs/rank-1.log").read_text()
    words = ("--script", "train.py", "--num-workers", "2", "--device", "cpu", "--no-progress")
    local = subprocess.run(
        [*COMMAND, "train", *words, "--", "live"], cwd=here, env=ray_environment(), check=False, capture_output=True
    )
    assert local.returncode == 0, local.stderr
    ours, theirs = (torch.load(folder / "weights.pt") for folder in (on_ray, here))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-7)
    told_to_ray = json.loads((on_ray / "run/checkpoint_manager_snapshot.json").read_text())
    assert f"step-{STEPS:08d}" in json.dumps(told_to_ray)


def test_more_workers_than_fit_are_refused_with_what_is_there(machines, tmp_path):
    write_script(tmp_path / "train.py", SCRIPT)
    answer = train(machines, tmp_path, "--script", "train.py", "--num-workers", "3", "--", "live", seconds=60)
    assert answer.code == 2
    assert "3 workers with 1 CPU each do not fit" in answer.err
    assert "room for 2: 2 machines, together 2 CPU" in answer.err


def test_a_run_goes_on_with_fewer_ranks_when_a_machine_is_gone(machines, tmp_path):
    write_script(tmp_path / "train.py", SCRIPT)
    running = start(
        machines, tmp_path, "--script", "train.py", "--num-workers", "2", "--min-workers", "1", "--", "wait"
    )
    deadline = time.monotonic() + 120
    while not all((tmp_path / f"reached-{rank}").exists() for rank in range(2)):
        assert running.poll() is None, finish(running).text
        assert time.monotonic() < deadline, "step 5 was never reached"
        time.sleep(0.1)
    machines.kill_second_machine()
    answer = finish(running, 150)
    assert answer.code == 0, answer.text
    assert "restart 1 with 1 rank" in answer.err
    assert "is gone" in answer.err
    begun = [(event["world_size"], event["first_step"]) for event in events(tmp_path, "run_started")]
    assert begun == [(2, 0), (1, 4)]
    assert "rank 0 of 1 ends after wait" in answer.out


# --- one machine ------------------------------------------------------------------------------------------------

INSIDE = """
import json, os, ray, torch
from ray import tune
from torch import nn
from torch.utils.data import TensorDataset
from phalanx import RayTrainer
from phalanx.launch.ray_cluster import open_cluster

x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 0).long()

def train_fn(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, config["hidden_size"]), nn.Linear(config["hidden_size"], 2))
    trainer = RayTrainer(model, config, progress=False, device="cpu", epochs=2, log_every_n_steps=1)
    trainer.fit(TensorDataset(x, y), TensorDataset(x, y))
    return {"accuracy": trainer.best_accuracy, "loss": trainer.history.steps[-1]["loss"]}

with open_cluster(num_cpus=3):
    data = ray.data.from_items([{"x": x[i].numpy(), "y": int(y[i])} for i in range(32)])
    settings = {"batch_size": 4, "epochs": 2, "log_every_n_steps": 1, "progress": False, "device": "cpu"}
    trainer = RayTrainer(nn.Linear(4, 2), settings, num_workers=2)
    history = trainer.fit(data, data)
    told = {"steps": history.steps[-1]["step"], "accuracy": trainer.best_accuracy}
    # One worker trains where it is, two are workers of a Ray Train run inside the trial.
    workers = tune.sample_from(lambda spec: 1 if spec.config.batch_size == 8 else 2)
    space = {"hidden_size": 8, "lr": 0.1, "batch_size": tune.grid_search([8, 4]), "num_workers": workers}
    analysis = tune.run(train_fn, config=space, resources_per_trial={"cpu": 1}, max_concurrent_trials=1, verbose=0,
                        storage_path=os.path.abspath("tune"))
    told["losses"] = [trial.last_result["loss"] for trial in analysis.trials]
    told["accuracies"] = [trial.last_result["accuracy"] for trial in analysis.trials]
told["still"] = ray.is_initialized()
print("told:", json.dumps(told))
"""


def test_ray_data_and_tune_trials_on_a_local_ray(tmp_path):
    reason = why_no_namespaces()
    if reason is not None:
        pytest.skip(reason)
    script = write_script(tmp_path / "inside.py", INSIDE)
    process = subprocess.Popen(
        in_a_namespace_of_its_own(sys.executable, str(script)),
        cwd=tmp_path,
        env=ray_environment(HOME=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    answer = finish(process, 240)
    assert answer.code == 0, answer.text
    told = json.loads(answer.out.split("told:")[1])
    assert told["steps"] == STEPS
    assert 0.0 <= told["accuracy"] <= 1.0
    alone, nested = told["losses"]  # the same global batch of 8, on one rank and on two
    assert nested == pytest.approx(alone, rel=1e-4)
    assert told["accuracies"][0] == told["accuracies"][1]
    assert not told["still"]
    assert not (tmp_path / ".ray").exists(), "a token was written into the home directory"
    assert "left to your code: hidden_size" in answer.text


# --- what needs no cluster --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://head:8265", "begins with 'http://'"),
        ("head", "is no host:port"),
        ("ray://127.0.0.1:9", "no Ray answers at ray://127.0.0.1:9"),
    ],
)
def test_a_wrong_address_is_refused_at_once(address, words):
    began = time.monotonic()
    with pytest.raises(UsageError, match=words):
        check_address(address)
    assert time.monotonic() - began < 2


def test_a_port_that_does_not_speak_rays_language_is_refused_and_says_after_how_long(monkeypatch):
    monkeypatch.setattr(ray_cluster, "PROBE_SECONDS", 0.3)
    with silent_port() as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UsageError, match=r"did not answer as Ray does in 0\.3 s"):
            check_address(address)


def test_resources_are_read_and_mistakes_named():
    assert read_resources("GPU=0.5, big_memory=1") == {"GPU": 0.5, "big_memory": 1.0}
    with pytest.raises(UsageError, match="'GPU:1' is no name=amount"):
        read_resources("GPU:1")
