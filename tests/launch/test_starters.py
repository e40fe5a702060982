"""Ranks that others started: torchrun, mpirun, srun's variables; and one command per node on two separate hosts."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import programs
import pytest
from command import COMMAND, clean_environment, end, finish, write_script

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import json, os, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from phalanx import PyTorchDDPTrainer

torch.manual_seed(0)
x = torch.randn(18, 4)
data = TensorDataset(x, (x.sum(1) > 0).long())
trainer = PyTorchDDPTrainer(nn.Linear(4, 2), device="cpu", batch_size=3, epochs=2, progress=False, run_dir="run")
steps = trainer.fit(data).steps[-1]["step"]
samples = len(trainer.predict(data)) if os.environ["RANK"] == "0" else trainer.predict(data) or 18
print(json.dumps({"rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"]), "steps": steps,
                  "samples": samples}), flush=True)

from phalanx.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""The trainer joins, trains and predicts; then the same ranks are handed to the command line with a recipe."""

RECIPE = ("train", "digits", "--max-steps", "3", "--device", "cpu", "--run-dir", "recipe", "--no-progress")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def run_together(commands: list[list[str]], folder: Path, environments: list[dict[str, str]]) -> list[str]:
    """Start several programs at once; all must end well. Returns what each printed."""
    processes = [
        programs.Popen(
            command,
            cwd=folder,
            env=clean_environment(OMP_NUM_THREADS="1", TMPDIR=str(folder), **environment),  # torchrun leaves its own
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        answers = [finish(process) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                end(process)
                process.wait()
    for answer in answers:
        assert answer.code == 0, answer.text
    return [answer.out for answer in answers]


def results(*outputs: str) -> list[dict]:
    """What the ranks printed, by rank; starters put tags in front of lines, and may put two ranks' on one line."""
    found = [text for output in outputs for text in re.findall(r'\{"rank".*?\}', output)]
    return sorted((json.loads(text) for text in found), key=lambda told: told["rank"])


EXPECTED = [{"rank": rank, "world": 2, "steps": 6, "samples": 18} for rank in range(2)]


def assert_recipe_ran(folder: Path) -> None:
    events = [json.loads(line) for line in (folder / "recipe/events.jsonl").read_text().splitlines()]
    assert [(event["world_size"]) for event in events if event["event"] == "run_started"] == [2]
    assert [event["step"] for event in events if event["event"] == "run_ended"] == [3]


# --- torchrun ---------------------------------------------------------------------------------------------------


def torchrun(*target: str) -> list[str]:
    starter = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return [*starter, "--master-addr", "127.0.0.1", "--master-port", str(free_port()), *target]


def test_torchrun_starts_a_script(tmp_path):
    script = write_script(tmp_path / "train.py", SCRIPT)
    assert results(*run_together([torchrun(str(script), *RECIPE)], tmp_path, [{}])) == EXPECTED
    assert_recipe_ran(tmp_path)


def test_torchrun_starts_the_command_line(tmp_path):
    run_together([torchrun("-m", "phalanx.cli", *RECIPE)], tmp_path, [{}])
    assert_recipe_ran(tmp_path)


# --- mpirun and srun --------------------------------------------------------------------------------------------


def test_mpirun_starts_a_script(tmp_path):
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", "2"]
    script = write_script(tmp_path / "train.py", SCRIPT)
    assert results(*run_together([[*mpirun, sys.executable, str(script), *RECIPE]], tmp_path, [{}])) == EXPECTED
    assert_recipe_ran(tmp_path)


def srun_environments() -> list[dict[str, str]]:
    """What srun sets for two tasks of one step on one node."""
    shared = {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_SRUN_COMM_PORT": "1",
        "SLURM_JOB_ID": str(uuid.uuid4().int % 10**6),
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
    }
    return [{**shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]


def test_sruns_variables_start_a_script(tmp_path):
    command = [sys.executable, str(write_script(tmp_path / "train.py", SCRIPT)), *RECIPE]
    assert results(*run_together([command, command], tmp_path, srun_environments())) == EXPECTED
    assert_recipe_ran(tmp_path)


# --- two hosts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """A network namespace: a separate machine as far as addresses and ports go."""

    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Two hosts joined by one cable, removed afterwards."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making network namespaces needs root and ip")
    mark = uuid.uuid4().hex[:6]
    pair = [Host(f"phx{mark}{number}", f"10.213.77.{number + 1}") for number in range(2)]
    made = []
    try:
        for host in pair:
            try:
                ip("netns", "add", host.namespace)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
            made.append(host)
        first, second = pair
        ip(
            "link",
            "add",
            f"v{mark}0",
            "netns",
            first.namespace,
            "type",
            "veth",
            "peer",
            f"v{mark}1",
            "netns",
            second.namespace,
        )
        for number, host in enumerate(pair):
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", f"v{mark}{number}")
            for device in (f"v{mark}{number}", "lo"):
                ip("-n", host.namespace, "link", "set", device, "up")
        yield pair
    finally:
        for host in made:
            ip("netns", "delete", host.namespace)


def node(hosts: list[Host], number: int, *words: str) -> list[str]:
    meeting = ["--num-nodes", "2", "--node-rank", str(number), "--rdzv-endpoint", f"{hosts[0].address}:29411"]
    return hosts[number].command(*COMMAND, "train", *words, *meeting, "--device", "cpu", "--run-dir", f"node{number}")


def test_two_hosts_train_with_one_command_each(hosts, tmp_path):
    words = ("digits", "--num-workers", "2", "--max-steps", "3", "--checkpoint-dir", "shared")
    first, second = run_together([node(hosts, number, *words) for number in range(2)], tmp_path, [{}, {}])
    assert "2 ranks on cpu" in first
    assert "step 3/3" in first
    assert "step 3/3" not in second
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["step-00000003"]


def test_a_crash_on_one_host_is_named_on_the_other(hosts, tmp_path):
    script = write_script(
        tmp_path / "train.py",
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("only on the second host")
        dist.barrier()
        """,
    )
    processes = [
        programs.Popen(
            node(hosts, number, "--script", str(script), "--num-workers", "2"),
            cwd=tmp_path,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for number in range(2)
    ]
    for answer in [finish(process) for process in processes]:
        assert answer.code == 1, answer.text
        report = next(line for line in answer.err.splitlines() if line.startswith("phalanx: "))
        assert "rank 1 " in report
        assert "ValueError: only on the second host" in report


ACROSS = """
import json, torch
import torch.distributed as dist
from torch import nn
from phalanx import Formation

torch.manual_seed(0)
weights = {}
for strategy in ("ddp", "ring"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    formation = Formation(strategy=strategy, device="cpu", bucket_cap_mb=0.001)
    wrapped, optimizer = formation.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(3):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + formation.rank)).double()
        formation.backward(wrapped(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if strategy == "ring":
        lane = formation.strategy.lanes[0]
        exchange = lane.exchange
        found = {"kind": type(exchange).__name__, "hosts": exchange._hosts, "sent": exchange.sent_bytes}
    weights[strategy] = [parameter.detach().clone() for parameter in model.parameters()]
    del wrapped
    formation.close()
for ours, theirs in zip(weights["ring"], weights["ddp"]):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
dist.init_process_group("phalanx")
total = torch.ones(5000)
dist.all_reduce(total)
assert float(total[0]) == dist.get_world_size()
group = dist.distributed_c10d._get_default_group()
print(json.dumps({"rank": dist.get_rank(), "shared": group._shared is not None, **found}), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_across_hosts_nothing_is_shared_and_leaders_talk(hosts, tmp_path):
    """Two hosts with two ranks each: ring goes by leaders and gives ddp's weights; the backend takes gloo."""
    script = write_script(tmp_path / "across.py", ACROSS)
    commands = [
        node(hosts, number, "--script", str(script), "--num-workers", "4", "--console-ranks", "all")
        for number in range(2)
    ]
    printed = run_together(commands, tmp_path, [{}, {}])
    told = [json.loads(found) for text in printed for found in re.findall(r"\{.*\}", text)]
    assert sorted(each["rank"] for each in told) == [0, 1, 2, 3]
    for each in told:
        assert each["kind"] == "ChannelExchange"
        assert each["hosts"] == [[0, 1], [2, 3]]
        assert not each["shared"]
        assert each["sent"] > 0
