"""Ranks on Ray: a real head and a second node, a killed worker, a killed machine, what does not answer or fit."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from command import COMMAND, ROOT, Answer, finish, write_script
from long_proofs import ALL, long_proof
from packages import require
from ray_cluster_hosts import TwoMachines, in_a_namespace_of_its_own, ray_environment, silent_port, why_no_namespaces

from phalanx import DistributedConfig
from phalanx.engines.ray import cluster
from phalanx.engines.ray import cluster as ray_cluster
from phalanx.engines.ray.cluster import check_address, started_on_this_machine
from phalanx.engines.ray.follow import describe_death
from phalanx.engines.ray.launch import starter
from phalanx.engines.ray.rules import read_resources
from phalanx.engines.ray.sources import PAYLOAD_NAME
from phalanx.engines.ray.trainer import split_hyperparameters
from phalanx.engines.ray.worker import made_next_to
from phalanx.errors import UsageError
from phalanx.world.mesh import plan_layout

require("ray", "Ray is not installed: pip install 'phalanx[ray]'")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

"""Ray's start is slow by itself, and slower still on a busy machine."""

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
            time.sleep(300)

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


def train(machines: TwoMachines, folder: Path, *words: str, seconds: float = 300) -> Answer:
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


SAVE = ("--no-async-checkpoint",)  # the worker dies in the step after a save


@long_proof
def test_a_killed_worker_restarts_from_the_checkpoint_and_ends_with_the_weights_of_a_local_run(machines, tmp_path):
    on_ray, here = tmp_path / "ray", tmp_path / "local"
    for folder in (on_ray, here):
        folder.mkdir()
        write_script(folder / "train.py", SCRIPT)
    answer = train(
        machines, on_ray, "--script", "train.py", "--num-workers", "2", "--max-restarts", "1", *SAVE, "--", "die"
    )
    assert answer.code == 0, answer.text
    assert "rank 0 of 2 ends after die" in answer.out
    # By Ray's word, or by its own silence.
    assert re.search(rf"rank 1 on {socket.gethostname()} at step 5 was lost: .*its process was killed", answer.err)
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


@long_proof
def test_more_workers_than_fit_are_refused_with_what_is_there(machines, tmp_path):
    write_script(tmp_path / "train.py", SCRIPT)
    answer = train(machines, tmp_path, "--script", "train.py", "--num-workers", "3", "--", "live")
    assert answer.code == 2
    assert "3 workers with 1 CPU each do not fit" in answer.err
    assert "room for 2: 2 nodes, together 2 CPU" in answer.err


@long_proof
def test_a_run_continues_with_fewer_ranks_when_a_machine_is_lost(machines, tmp_path):
    write_script(tmp_path / "train.py", SCRIPT)
    elastic = ("--num-workers", "2", "--min-workers", "1", "--checkpoint-dir", "kept")
    running = start(machines, tmp_path, "--script", "train.py", *elastic, "--", "wait")
    deadline = time.monotonic() + 240
    while not all((tmp_path / f"reached-{rank}").exists() for rank in range(2)):
        assert running.poll() is None, finish(running).text
        assert time.monotonic() < deadline, "step 5 was never reached"
        time.sleep(0.1)
    machines.kill_second_machine()
    answer = finish(running, 300)
    assert answer.code == 0, answer.text
    assert "restart 1 with 1 rank" in answer.err
    assert "was lost" in answer.err
    begun = [(event["world_size"], event["first_step"]) for event in events(tmp_path, "run_started")]
    assert begun == [(2, 0), (1, 4)]
    assert "rank 0 of 1 ends after wait" in answer.out
    assert "Checkpoint successfully created" not in answer.text, "Ray repeats what the loop has said"


# --- one machine ------------------------------------------------------------------------------------------------

EXAMPLE = ROOT / "examples/07-ray/ray_training.py"


@long_proof
def test_the_example_trains_on_ray_data_and_in_tune_trials_on_a_local_ray(tmp_path):
    reason = why_no_namespaces()
    if reason is not None:
        pytest.skip(reason)
    process = subprocess.Popen(
        in_a_namespace_of_its_own(sys.executable, str(EXAMPLE), "--batch-sizes", "8", *(["4"] if ALL else [])),
        cwd=tmp_path,
        env=ray_environment(HOME=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    answer = finish(process, 400)
    assert answer.code == 0, answer.text
    assert f"ray data: {STEPS} steps, accuracy 0." in answer.out
    alone, *nested = re.findall(r"trial on (\d): loss ([\d.]+), accuracy ([\d.]+)", answer.out)
    assert alone[0] == "1"
    assert len(nested) == ALL
    for on_two in nested:  # the same global batch of 8, on one rank and on two
        assert on_two[0] == "2"
        assert float(on_two[1]) == pytest.approx(float(alone[1]), rel=1e-4)
        assert on_two[2] == alone[2]
    assert "Ray is stopped" in answer.out
    assert not (tmp_path / ".ray").exists(), "a token was written into the home directory"


LAYOUT_SCRIPT = """
import os, sys
import torch
from phalanx import PyTorchDDPTrainer
from phalanx.zoo.models.gpt import gpt
from phalanx.run.weights import whole_weights
from torch.utils.data import TensorDataset
from long_proofs import long_proof

torch.manual_seed(0)
tokens = torch.randint(61, (16, 9))
model = gpt(vocab_size=61, layers=2, hidden=32, heads=4, seq_len=16).double()
trainer = PyTorchDDPTrainer(model, batch_size=4, epochs=1)
trainer.fit(TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
weights = whole_weights(trainer.model)
if os.environ["RANK"] == "0":
    torch.save(weights, sys.argv[1])
"""


@long_proof
def test_fsdp_times_tensor_parallel_on_rays_workers_trains_what_it_trains_without_ray(tmp_path):
    reason = why_no_namespaces()
    if reason is not None:
        pytest.skip(reason)
    write_script(tmp_path / "train.py", LAYOUT_SCRIPT)
    layout = ("--strategy", "fsdp", "--tensor-parallel", "2", "--num-workers", "4", "--device", "cpu", "--no-progress")
    words = (*COMMAND, "train", "--script", "train.py", *layout)
    runs = {
        "local": [*words, "--", "local.pt"],
        "ray": in_a_namespace_of_its_own(*words, "--backend", "ray", "--cpus-per-worker", "0.5", "--", "ray.pt"),
    }
    for command in runs.values():
        done = subprocess.run(
            command, cwd=tmp_path, env=ray_environment(), check=False, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = (torch.load(tmp_path / f"{name}.pt") for name in ("ray", "local"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-10, atol=1e-12)


# --- what needs no cluster --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://head:8265", "begins with 'http://'"),
        ("head", "is not host:port"),
        ("ray://127.0.0.1:9", "no Ray answers at ray://127.0.0.1:9"),
    ],
)
def test_a_wrong_address_is_refused_at_once(monkeypatch, address, words):
    monkeypatch.setattr(ray_cluster, "PROBE_SECONDS", 240.0)
    began = time.monotonic()
    with pytest.raises(UsageError, match=words):
        check_address(address)
    assert time.monotonic() - began < 120, "not after the whole time of a probe"


def test_auto_means_what_ray_start_started_here_and_no_other(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(UsageError, match="`ray start` has started no Ray on this machine"):
        started_on_this_machine()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("198.51.100.7:6379")
    assert started_on_this_machine() == "198.51.100.7:6379"


def test_a_port_that_does_not_answer_like_ray_is_refused_with_the_time_it_took(monkeypatch):
    monkeypatch.setattr(ray_cluster, "PROBE_SECONDS", 0.3)
    with silent_port() as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UsageError, match=r"did not answer as Ray does in 0\.3 s"):
            check_address(address)


@contextmanager
def grpc_server(answer: Callable[[Any], Any] | None = None) -> Iterator[str]:
    """Serve gRPC, with an answer for every method or for none; yields the address."""
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed")

    class Everything(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: object) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: answer(context)) if answer else None

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, handlers=[Everything()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


@pytest.mark.parametrize(("scheme", "what"), [("ray://", "Ray's client server"), ("", "the head of a Ray cluster")])
def test_a_grpc_server_that_is_not_ray_is_refused_at_once(monkeypatch, scheme, what):
    monkeypatch.setattr(ray_cluster, "PROBE_SECONDS", 240.0)
    with grpc_server() as address:
        began = time.monotonic()
        with pytest.raises(UsageError, match=f"speaks gRPC, but is not {what}"):
            check_address(scheme + address)
        assert time.monotonic() - began < 120, "not after the whole time of a probe"


def test_a_proxy_in_the_environment_is_not_between_us_and_a_head(monkeypatch):
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("grpc_proxy", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nothing listens
    with grpc_server(lambda context: b"") as address:
        check_address(address)


def test_a_head_that_closes_the_connection_is_not_reported_as_a_timeout():
    def leave(context: Any) -> None:
        context.abort(sys.modules["grpc"].StatusCode.UNAVAILABLE, "leaving")

    with (
        grpc_server(leave) as address,
        pytest.raises(UsageError, match="closed the connection when it was asked for"),
    ):
        check_address(address)


def test_resources_are_read_and_mistakes_named():
    assert read_resources("GPU=0.5, big_memory=1") == {"GPU": 0.5, "big_memory": 1.0}
    with pytest.raises(ValueError, match="'GPU:1' is not a name and an amount"):
        read_resources("GPU:1")


def test_a_trials_dict_is_parted_into_settings_and_the_users_own(capsys):
    settings, own = split_hyperparameters({"lr": 0.1, "batch_size": 8, "hidden_size": 16})
    assert settings == {"learning_rate": 0.1, "batch_size": 8}
    assert own == {"hidden_size": 16}
    assert "left to your code: hidden_size" in capsys.readouterr().err
    with pytest.raises(UsageError, match="name the same setting"):
        split_hyperparameters({"lr": 0.1, "learning_rate": 0.2})


def test_gpus_of_a_cluster_are_not_looked_for_here():
    config = DistributedConfig(backend="ray", num_nodes=4, gpus_per_node=8, address="ray://head:10001")
    layout = plan_layout(config, gpus_here=0)
    assert (layout.device, layout.world_size) == ("cuda", 32)
    assert starter(config, layout).resources == {"CPU": 1.0, "GPU": 1.0}


def test_a_head_that_stays_busy_is_reported_as_one_that_could_not_be_joined(monkeypatch):
    """The second try fails in the same words as the first would."""
    tries: list[str] = []

    def join(address: str, **_: object) -> None:
        tries.append(address)
        raise ConnectionError("Starting Ray client server failed. See ray_client_server_23000.err")

    monkeypatch.setattr("ray.init", join)
    told: list[str] = []
    with pytest.raises(UsageError, match="could not be joined: Starting Ray client server failed"):
        cluster._join("ray://head:10001", told.append)
    assert (len(tries), len(told)) == (2, 1)


def test_a_local_ray_that_does_not_start_is_an_error_with_what_to_do(monkeypatch):
    folders = set()

    def start(address: str, _temp_dir: str, **_: object) -> None:
        folders.add(_temp_dir)
        raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", start)
    with pytest.raises(UsageError, match="a local Ray could not be started: The current node timed out") as caught:
        with cluster.open_cluster(num_cpus=2):
            pass
    assert "--backend pytorch-ddp" in str(caught.value.hint)
    assert "RAY_AUTH_TOKEN" not in os.environ
    assert len(folders) == 2, "it is tried twice, in a folder of its own each time"


def test_a_second_local_ray_starts_when_the_processes_of_the_first_have_ended(monkeypatch):
    """Those with its folder in their arguments; another child of this process stays."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(address: str, _temp_dir: str, **_: object) -> None:
        if begun:
            assert begun[0].wait(0) == -signal.SIGKILL
            assert begun[1].poll() is None
            return
        arguments = (f"--session-dir={_temp_dir}/session_1", os.path.dirname(_temp_dir))
        waits = [sys.executable, "-c", "import time; time.sleep(60)"]
        begun.extend(subprocess.Popen([*waits, argument]) for argument in arguments)
        raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", start)
    try:
        with cluster.open_cluster(num_cpus=2) as found:
            assert found.started_here
    finally:
        for process in begun:
            process.kill()
            process.wait()


def test_deaths_of_workers_are_reported_once_and_not_by_ray_too():
    from ray._private.ray_logging import LogDeduplicator

    skip = cluster._QUIET["RAY_DEDUP_LOGS_SKIP_REGEX"]
    told = ["A worker died or was killed while executing a task by an unexpected system error.", "memory is short"]
    batches = LogDeduplicator(5, None, skip).deduplicate({"lines": told, "pid": "raylet", "is_err": False})
    assert [line for batch in batches for line in batch["lines"]] == ["memory is short"]


def test_files_too_large_to_send_back_do_not_keep_the_small_ones(tmp_path):
    for name, size in {"weights.pt": 90, "result.pt": 30, PAYLOAD_NAME: 10}.items():
        (tmp_path / name).write_bytes(b"." * size)
    message = made_next_to(tmp_path, most=100)
    assert message["files"] == {"result.pt": b"." * 30}
    assert message["left_out"] == {"weights.pt": 90}
    assert set(made_next_to(tmp_path, most=120)["files"]) == {"weights.pt", "result.pt"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "The actor died unexpectedly before finishing this task.\n\tnode_id: ab12\nThe actor is dead because its "
            "worker process has died. Worker exit type: SYSTEM_ERROR. Some common causes include: (1) the process was "
            "killed by SIGKILL by OOM killer due to high memory usage.",
            "its process was killed",
        ),
        ("The actor died because its node has died. Node Id: ab12", "its node was lost"),
        ("something new\nand more", "something new"),
    ],
)
def test_a_death_is_described_in_few_words(text, words):
    assert describe_death(text).startswith(words)
