"""Machines that are lost, cut off, slowed or added while a run goes on; each is a network namespace."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import programs
import pytest
import torch
from command import ROOT, clean_environment
from long_proofs import long_proof
from network_hosts import HostNamespace, named, network
from waiting import LIMIT_SECONDS

from phalanx.recovery import request_ranks
from tests.simulation.history import failure_of
from tests.simulation.plan import Fault, draw

SCRIPT = """
import os, sys, time
import torch, phalanx
from torch import nn

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], (self.x[i].sum() > 0).long()

class Pause(phalanx.Callback):
    def on_step_end(self, trainer, info):
        time.sleep(PAUSE)
        die = os.path.join(FOLDER, f"die-{trainer.formation.rank}-{info.step}")
        if os.path.exists(die):
            os.remove(die)
            os.kill(os.getpid(), 9)

PAUSE, FOLDER = float(os.environ["PAUSE"]), sys.argv[1]
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
least, most, nodes, node = (int(word) for word in sys.argv[2:6])
trainer = phalanx.PyTorchDDPTrainer(
    model=model, num_workers=(least, most), num_nodes=nodes, node_rank=node, rdzv_endpoint=sys.argv[6],
    strategy="ring", fixed_order="ANY_SIZE" not in os.environ, device="cpu", batch_size=4, learning_rate=0.02,
    max_steps=int(os.environ["STEPS"]), max_restarts=4, heartbeat_timeout=2.0, timeout=60.0,
    progress=False, callbacks=[Pause()],
    run_dir=os.path.join(FOLDER, f"run{node}"), checkpoint_dir=os.path.join(FOLDER, "checkpoints"),
)
trainer.fit(Rows())
torch.save(model.state_dict(), os.path.join(FOLDER, f"weights-{node}.pt"))
"""

STEPS = 120


class Cluster:
    """One launcher per host, and what they leave in a folder."""

    def __init__(
        self, hosts: list[HostNamespace], folder: Path, *, ranks: tuple[int, int], pause: float = 0.04
    ) -> None:
        self.hosts, self.folder, self.ranks, self.name = hosts, folder, ranks, ""
        (folder / "train.py").write_text(SCRIPT)
        self.env = {**clean_environment(), "PYTHONPATH": str(ROOT), "PAUSE": str(pause), "STEPS": str(STEPS)}
        self.launchers: dict[int, subprocess.Popen[str]] = {}

    def start(self, *numbers: int) -> None:
        for number in numbers:
            endpoint = f"{self.name or self.hosts[0].address}:29415"
            numbered = [*self.ranks, len(self.hosts), number]
            words = [sys.executable, "train.py", str(self.folder), *map(str, numbered), endpoint]
            output = (self.folder / f"out{number}").open("a")
            own = self.folder / f"tmp{number}"  # what a killed launcher leaves is not looked for
            own.mkdir(exist_ok=True)
            self.launchers[number] = programs.Popen(
                self.hosts[number].command(*words),
                cwd=self.folder,
                env={**self.env, "TMPDIR": str(own)},
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def wait_for_step(self, step: int) -> None:
        """Wait until rank 0 has logged this many steps."""
        deadline = time.monotonic() + 240
        while max([event["step"] for event in self.events("step")], default=0) < step:
            assert time.monotonic() < deadline, self.outputs()
            assert all(one.poll() in (None, -9) for one in self.launchers.values()), self.outputs()
            time.sleep(0.05)

    def end(self, *expected: int) -> None:
        """Wait until these launchers have succeeded."""
        for number in expected:
            assert self.launchers[number].wait(timeout=240) == 0, self.outputs()

    def kill(self, number: int) -> None:
        """End everything on a host at once, as when the machine loses its power, but with the network up."""
        listed = subprocess.run(["ip", "netns", "pids", self.hosts[number].namespace], capture_output=True, text=True)
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):  # it has ended with its parent
                os.kill(int(pid), signal.SIGKILL)

    def events(self, kind: str) -> list[dict]:
        found = []
        for path in self.folder.glob("run*/events.jsonl"):
            found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [event for event in sorted(found, key=lambda event: event["time"]) if event["event"] == kind]

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / f"weights-{number}.pt")

    def outputs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("out*")))

    def close(self) -> None:
        for number, launcher in self.launchers.items():
            if launcher.poll() is None:
                self.kill(number)
            launcher.wait(timeout=120)


@pytest.fixture
def cluster(tmp_path):
    opened = []

    def open_cluster(count: int, **options) -> Cluster:
        folder = tmp_path / f"cluster{len(opened)}"
        folder.mkdir()
        context = network(count)
        opened.append((context, Cluster(context.__enter__(), folder, **options)))
        return opened[-1][1]

    yield open_cluster
    for context, one in reversed(opened):
        one.close()
        context.__exit__(None, None, None)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory, fork_server):
    """The weights of a run on four ranks of one machine that nothing disturbs."""
    folder = tmp_path_factory.mktemp("quiet")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAUSE", "0")
        patch.setenv("STEPS", str(STEPS))
        patch.setattr(sys, "argv", [str(script), str(folder), "4", "4", "1", "0", "127.0.0.1:29400"])
        runpy.run_path(str(script), run_name="__main__")
    return torch.load(folder / "weights-0.pt")


def assert_equal(one, other) -> None:
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@long_proof
def test_a_killed_rank_is_replaced_on_its_machine(cluster, quiet):
    two = cluster(2, ranks=(4, 4))
    (two.folder / "die-3-10").write_text("")
    two.start(0, 1)
    two.end(0, 1)
    (recovered,) = two.events("recovered")
    assert (recovered["lost"], recovered["lost_steps"]) == ([3], 0)
    assert recovered["seconds"] < 5
    assert_equal(quiet, two.weights(0))


@long_proof
def test_machines_that_have_lost_all_ranks_at_once_start_again_together(cluster, quiet):
    """The launcher that decides has no rank left to wait for: its message must reach the other one all the same."""
    two = cluster(2, ranks=(4, 4))
    for rank in range(4):
        (two.folder / f"die-{rank}-10").write_text("")
    two.start(0, 1)
    two.end(0, 1)
    assert all("\nrestart " in (two.folder / f"out{number}").read_text() for number in (0, 1)), two.outputs()
    assert_equal(quiet, two.weights(0))


@long_proof
def test_a_machine_that_fails_again_and_again_is_left_out_and_ends(cluster, quiet):
    two = cluster(2, ranks=(2, 4))
    for step in (10, 20, 30, 40):
        (two.folder / f"die-3-{step}").write_text("")
    two.start(0, 1)
    assert two.launchers[1].wait(timeout=240) == 1, two.outputs()  # it does not wait to be started again
    assert "this node is left out of the run: 4 ranks of" in (two.folder / "out1").read_text()
    two.end(0)
    assert [event["world_size"] for event in two.events("recovered")] == [4, 4, 4, 2]
    assert_equal(quiet, two.weights(0))


@pytest.mark.parametrize("lost", [pytest.param(1, marks=long_proof), 0], ids=["another", "the one with the store"])
def test_the_others_go_on_when_a_machine_is_killed(cluster, quiet, lost):
    two = cluster(2, ranks=(2, 4))
    two.start(0, 1)
    two.wait_for_step(10)
    two.kill(lost)
    two.end(1 - lost)
    assert [event["world_size"] for event in two.events("recovered")] == [2], two.outputs()
    assert_equal(quiet, two.weights(1 - lost))


@long_proof
@pytest.mark.parametrize("lost", [1, 0], ids=["another", "the one with the store"])
def test_the_others_go_on_when_a_machine_loses_its_fork_server(cluster, quiet, lost):
    two = cluster(2, ranks=(2, 4))
    two.start(0, 1)
    two.wait_for_step(10)
    [server] = [each for each in programs.started_by(two.launchers[lost]) if each.name() == "phalanx-fork"]
    server.kill()
    assert two.launchers[lost].wait(timeout=240) == 1, two.outputs()
    two.end(1 - lost)
    assert "fork server" in (two.folder / f"out{lost}").read_text()
    assert_equal(quiet, two.weights(1 - lost))


@long_proof
def test_a_machine_that_is_cut_off_is_left_out_and_ends_itself(cluster, quiet):
    """Nothing answers on the cut cable, so that only heartbeats show it; the run must not go on in two parts."""
    two = cluster(2, ranks=(2, 4))
    two.start(0, 1)
    two.wait_for_step(10)
    two.hosts[1].cut()
    two.end(0)
    assert two.launchers[1].wait(timeout=240) == 1
    assert "lost contact with" in (two.folder / "out1").read_text()
    assert [event["world_size"] for event in two.events("recovered")] == [2]
    assert_equal(quiet, two.weights(0))


def test_an_address_is_that_of_a_card_though_the_name_maps_to_loopback():
    code = "from phalanx.host.addresses import own_address; print(own_address('machine0'))"
    with network(2) as hosts, named(hosts):
        for host in hosts:
            answer = programs.run(
                host.command(sys.executable, "-c", code),
                env={**clean_environment(), "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
            )
            assert answer.stdout.strip() == host.address, answer.stderr


@long_proof
def test_a_cut_network_does_not_let_both_halves_go_on_where_names_map_to_loopback(cluster, quiet):
    two = cluster(2, ranks=(2, 4))
    with named(two.hosts) as names:
        two.name = names[0]
        two.start(0, 1)
        two.wait_for_step(10)
        two.hosts[1].cut()
        two.end(0)
        assert two.launchers[1].wait(timeout=240) == 1
    assert "lost contact with" in (two.folder / "out1").read_text()
    assert not (two.folder / "weights-1.pt").exists()
    assert [event["world_size"] for event in two.events("recovered")] == [2]
    assert_equal(quiet, two.weights(0))


@long_proof
def test_a_machine_that_comes_later_is_taken_in(cluster, quiet):
    two = cluster(2, ranks=(2, 4), pause=0.3)
    two.start(0, 1)
    two.wait_for_step(10)
    two.kill(1)
    while not two.events("recovered"):
        time.sleep(0.1)
    two.start(1)
    two.end(0, 1)
    sizes = [event["world_size"] for event in two.events("recovered")]
    assert sizes == [2, 4], two.outputs()
    assert max(event["seconds"] for event in two.events("recovered")[1:]) < 3
    assert_equal(quiet, two.weights(0))


@long_proof
def test_requests_for_other_numbers_of_ranks_until_a_machine_has_none(cluster, quiet):
    """Messages to the second machine are later than what its ranks read in the store."""
    two = cluster(2, ranks=(2, 4), pause=0.05)
    two.start(0, 1)
    two.wait_for_step(10)
    wanted = (2, 4, 2)  # fixed_order takes powers of two
    for number, ranks in enumerate(wanted):
        request_ranks(two.folder / f"run{number % 2}" / "logs", ranks)  # the second machine passes it on
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(two.events("recovered")) == number:
            assert time.monotonic() < deadline, two.outputs()
            time.sleep(0.05)
    two.end(0, 1)
    assert [event["world_size"] for event in two.events("recovered")] == list(wanted)
    assert "this one had no rank left" in (two.folder / "out1").read_text()
    assert_equal(quiet, two.weights(0))


@long_proof
def test_a_slow_link_is_not_a_lost_machine(cluster, quiet):
    two = cluster(2, ranks=(2, 4), pause=0.0)
    two.hosts[1].slow("5mbit")
    two.start(0, 1)
    two.end(0, 1)
    assert not two.events("recovered")
    assert_equal(quiet, two.weights(0))


# --- as the simulation says -------------------------------------------------------------------------------------------


def simulated(nodes: int, *faults: Fault) -> list[str]:
    """Return what simulated launchers decide about lost ranks."""
    plan = dataclasses.replace(
        draw(1), nodes=nodes, ranks_per_node=1, least=1, steps=60, faults=faults, max_restarts=4, silence=2.0,
        step_seconds=0.5, delay=(50e-6, 1e-3), skew=0.0, needs_release=False, restarts=True,
    )  # fmt: skip
    result = failure_of(plan)
    assert result.violation is None
    decisions = [decision for decision in result.cluster.decisions if decision[0] in ("replace", "shrink")]
    return [
        "a new rank takes its place" if kind == "replace" else f"going on with {size} rank" for kind, size in decisions
    ]


def real(one: Cluster, disturb: Callable[[Cluster], None], *ends: int) -> list[str]:
    """Return what real launchers say that they have decided."""
    one.env["ANY_SIZE"] = "1"
    one.start(*range(len(one.hosts)))
    one.wait_for_step(10)
    disturb(one)
    one.end(*ends)
    return decisions_of(one)


def decisions_of(one: Cluster) -> list[str]:
    """Return the decisions in the output of all launchers, in the order of time."""
    said = r"^(\d\d:\d\d:\d\d) rank \d+ .*; (a new rank takes its place|going on with \d+ rank)"
    return [what for _, what in sorted(re.findall(said, one.outputs(), re.MULTILINE))]


CASES: dict[str, tuple[int, tuple[Fault, ...], Callable[[Cluster], None], tuple[int, ...]]] = {
    "a lost node": (3, (Fault(12.0, "kill_machine", 1),), lambda one: one.kill(1), (0, 2)),
    "the lost leader": (3, (Fault(12.0, "kill_machine", 0),), lambda one: one.kill(0), (1, 2)),
    "a node and then the leader": (
        4,
        (Fault(12.0, "kill_machine", 3), Fault(18.0, "kill_machine", 0)),
        lambda one: (one.kill(3), wait_for_losses(one, 1), one.kill(0)),
        (1, 2),
    ),
    "a killed rank": (3, (Fault(12.0, "kill_rank", 2),), lambda one: (one.folder / "die-2-20").touch(), (0, 1, 2)),
}


def wait_for_losses(one: Cluster, count: int) -> None:
    """Wait until this many losses were decided, and ten steps longer."""
    deadline = time.monotonic() + 120
    while len(decisions_of(one)) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    one.wait_for_step(max(event["step"] for event in one.events("step")) + 10)


@long_proof
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_real_and_simulated_launchers_decide_the_same(cluster, case):
    nodes, faults, disturb, ends = case
    expected = simulated(nodes, *faults)
    assert expected
    assert real(cluster(nodes, ranks=(1, nodes), pause=0.15), disturb, *ends) == expected
