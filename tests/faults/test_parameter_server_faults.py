"""Parameter servers under faults: workers that leave and join, a killed shard, wrong tokens, invalid messages."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from waiting import LIMIT_SECONDS

from phalanx.engines.parameter_server import protocol
from phalanx.engines.parameter_server.client import ParameterClient
from phalanx.engines.parameter_server.core import ShardCore
from phalanx.engines.parameter_server.membership import Rules, ShardSpec
from phalanx.engines.parameter_server.placement import Placement, plan_placement
from phalanx.engines.parameter_server.process import ShardProcess
from phalanx.engines.parameter_server.protocol import FrameKind, introduce, receive, send
from phalanx.engines.parameter_server.shard import _MAX_UNPROVEN
from phalanx.errors import ServerError
from phalanx.loop.formation import Formation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STEPS = 6
TOKEN = "token of this job"


class Job:
    """A tiny model on real shards; workers are threads of the test, or processes where they are to be killed."""

    def __init__(self, rules: Rules, shards: int = 2) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.placement: Placement = plan_placement(self.model, self.optimizer, shards)
        self.shards = [
            ShardProcess(ShardSpec(number, self.placement, self.optimizer, rules, TOKEN)) for number in range(shards)
        ]
        self.clients: list[ParameterClient] = []

    def client(self, worker: int, **options: Any) -> tuple[ParameterClient, dict[str, nn.Parameter]]:
        addresses = [shard.address for shard in self.shards]
        client = ParameterClient(addresses, TOKEN, self.placement, worker, **options)
        self.clients.append(client)
        named = dict(make_model().named_parameters())
        client.bind(named)
        return client, named

    def fill(self) -> None:
        """Load the initial values into the shards, as worker 0 does."""
        client, named = self.client(0)
        client.load({name: {"=": parameter.detach()} for name, parameter in named.items()})
        client.close()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 2)).double()


@contextmanager
def job(rules: Rules, shards: int = 2) -> Iterator[Job]:
    running = Job(rules, shards)
    try:
        yield running
    finally:
        for client in running.clients:
            client.close()
        for shard in running.shards:
            shard.stop()


def gradients(worker: int, step: int, named: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * worker + step)
    return {name: torch.randn(p.shape, dtype=p.dtype, generator=draw) for name, p in named.items()}


def take_step(client: ParameterClient, named: dict[str, nn.Parameter], worker: int, step: int) -> None:
    for name, gradient in gradients(worker, step, named).items():
        client.push(name, gradient)
    client.commit()
    client.wait()


def expected_weights(parts: list[list[int]]) -> list[torch.Tensor]:
    """Train in one process; `parts` names, for each step, the workers whose gradients its mean is made of."""
    model = make_model()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step, workers in enumerate(parts):
        for name, parameter in named.items():
            parameter.grad = sum(gradients(w, step, named)[name] for w in workers) / len(workers)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_weights(named: dict[str, nn.Parameter], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(named.values(), expected, strict=True):
        assert (ours - theirs).abs().max().item() < 1e-12


def _work_until_killed(running: Job, worker: int, steps: int) -> None:
    torch.set_num_threads(1)
    client, named = running.client(worker)
    for step in range(steps):
        take_step(client, named, worker, step)
    client.push("0.weight", gradients(worker, steps, named)["0.weight"])  # half a step, then death
    client.comm_thread.drain()
    os.kill(os.getpid(), signal.SIGKILL)


def test_sync_continues_without_a_killed_worker():
    with job(Rules(workers=2)) as running:
        running.fill()
        other = multiprocessing.get_context("fork").Process(target=_work_until_killed, args=(running, 1, 2))
        other.start()
        client, named = running.client(0)
        client.pull()
        for step in range(STEPS):
            take_step(client, named, 0, step)
        other.join()
        assert other.exitcode == -signal.SIGKILL
        assert_weights(named, expected_weights([[0, 1]] * 2 + [[0]] * (STEPS - 2)))


def test_bounded_waits_for_connected_workers_only():
    with job(Rules(workers=2, mode="bounded", staleness=1)) as running:
        running.fill()
        slow, _ = running.client(1)
        client, named = running.client(0)
        client.pull()
        take_step(client, named, 0, 0)
        closed: list[float] = []
        threading.Timer(0.2, lambda: (closed.append(time.monotonic()), slow.close())).start()
        take_step(client, named, 0, 1)  # two steps ahead: it waits until the other has disconnected
        assert closed
        for step in range(2, STEPS):
            take_step(client, named, 0, step)
        assert_weights(named, expected_weights([[0]] * STEPS))


def test_a_worker_joins_with_the_current_parameters_and_step():
    with job(Rules(workers=1)) as running:
        running.fill()
        client, named = running.client(0)
        client.pull()
        for step in range(2):
            take_step(client, named, 0, step)
        late, late_named = running.client(7)
        late.pull()
        assert late.seq == client.seq == 3
        assert_weights(late_named, [parameter.detach() for parameter in named.values()])

        def join() -> None:
            for step in range(2, 4):
                take_step(late, late_named, 7, step)
            late.close()

        thread = threading.Thread(target=join)
        thread.start()
        for step in range(2, STEPS):
            take_step(client, named, 0, step)
        thread.join()
        assert_weights(named, expected_weights([[0], [0], [0, 7], [0, 7], [0], [0]]))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_shard_is_restarted_and_nothing_is_applied_twice(tmp_path: Path, mode: Any):
    """Every update is saved before it is acknowledged, so a kill at any moment costs nothing at all."""
    with job(Rules(workers=1, mode=mode, folder=tmp_path, save_every=1)) as running:
        running.fill()
        client, named = running.client(0)
        client.pull()
        for step in range(STEPS):
            if step in (1, 3):
                os.kill(running.shards[1].pid, signal.SIGKILL)
            take_step(client, named, 0, step)
        assert running.shards[1].deaths == 2
        assert running.shards[0].deaths == 0
        assert client.stats()[1]["lost"] == 0
        assert_weights(named, expected_weights([[0]] * STEPS))


def test_a_commit_that_is_sent_again_is_applied_once():
    with job(Rules(workers=1, mode="async"), shards=1) as running:
        running.fill()
        client, named = running.client(0)
        client.pull()
        take_step(client, named, 0, 0)
        client.seq -= 1  # as if the answer had been lost
        take_step(client, named, 0, 0)
        assert client.stats()[0]["updates"] == 1
        assert_weights(named, expected_weights([[0]]))


def test_updates_since_the_last_save_are_reported_as_lost(tmp_path: Path):
    with job(Rules(workers=1, folder=tmp_path, save_every=100), shards=1) as running:
        running.fill()
        client, named = running.client(0)
        client.pull()
        for step in range(2):
            take_step(client, named, 0, step)
        os.kill(running.shards[0].pid, signal.SIGKILL)
        take_step(client, named, 0, 2)
        assert client.stats()[0]["lost"] == 2


def test_a_shard_that_cannot_be_restarted_is_reported_soon():
    with job(Rules(workers=1), shards=1) as running:
        running.fill()
        client, named = running.client(0, patience=0.3)
        os.kill(running.shards[0].pid, signal.SIGKILL)
        with pytest.raises(ServerError, match=r"out of reach for 0 s"):
            take_step(client, named, 0, 0)


def test_clients_without_the_token_are_refused_and_do_not_disturb_workers():
    with job(Rules(workers=1), shards=1) as running:
        address = running.shards[0].address
        with pytest.raises(ServerError, match="refused this worker's token"):
            ParameterClient([address], "another token", running.placement, 0)
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n" * 8)
        silent = socket.create_connection(address)
        running.fill()
        client, named = running.client(0)
        client.pull()
        take_step(client, named, 0, 0)
        silent.close()
        assert_weights(named, expected_weights([[0]]))


def test_many_silent_clients_do_not_block_workers():
    with job(Rules(workers=1), shards=1) as running:
        address = running.shards[0].address
        silent = [socket.create_connection(address) for _ in range(_MAX_UNPROVEN + 20)]
        running.fill()
        client, named = running.client(0)
        client.pull()
        take_step(client, named, 0, 0)
        silent[0].settimeout(3)
        while silent[0].recv(64):  # the challenge, then the end: the longest silent was dropped
            pass
        for connection in silent:
            connection.close()
        assert_weights(named, expected_weights([[0]]))


def test_a_client_that_sends_byte_by_byte_is_dropped_in_time(monkeypatch):
    monkeypatch.setattr(protocol, "SECONDS", 0.4)
    shard, caller = socket.socketpair()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while True:
                caller.send(b"x")
                time.sleep(0.1)

    thread = threading.Thread(target=trickle)
    thread.start()
    with shard, pytest.raises(TimeoutError):
        protocol.greet(shard, TOKEN)
    thread.join()
    caller.close()


def test_a_shard_ends_at_once_while_later_children_of_its_parent_run():
    """Workers of a DataLoader are such children: they hold copies of everything that was open when they were forked."""
    running = Job(Rules(workers=1), shards=1)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(LIMIT_SECONDS,))
    child.start()
    try:
        running.shards[0].stop()
        assert child.is_alive(), "the shard did not wait for it"
    finally:
        child.kill()
        child.join()


def test_a_connection_lost_between_norm_and_commit_does_not_change_the_step():
    rules = Rules(workers=2)
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    core = ShardCore(ShardSpec(0, plan_placement(model, optimizer, 1), optimizer, rules, TOKEN))

    def push(worker: int) -> None:
        part = core.contribution(worker, 1)
        part.memory.views[0].fill_(1.0 + 2.0 * worker)
        part.dense.add(0)

    def together(call: Callable[[int], object]) -> None:
        threads = [threading.Thread(target=call, args=(worker,)) for worker in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_SECONDS)

    for worker in range(2):
        core.hello(worker, 1 + worker, None)
        push(worker)
    together(lambda worker: core.norm(worker, 1))
    for worker in (1, 0):  # both lose their links: one holds the sums in its memory, the other only was read
        core.hello(worker, 3 + worker, 0)
        push(worker)
    together(lambda worker: core.commit(worker, 1, {"factor": 1.0}))
    assert core.fetch().tensors[0, "="].flatten().tolist() == [-2.0, -2.0]


def test_a_worker_with_another_model_is_refused():
    with job(Rules(workers=1), shards=1) as running:
        model = nn.Linear(3, 3)
        other = plan_placement(model, torch.optim.SGD(model.parameters()), 1)
        with pytest.raises(ServerError, match="another model, optimizer or number of shards"):
            ParameterClient([running.shards[0].address], TOKEN, other, 0)


@pytest.mark.parametrize(
    ("parts", "payload", "words"),
    [
        ([[0, 99, False]], b"", "99 rows of 0.bias"),
        ([[0, -1, False]], b"12345678", "shorter than its parts"),
        ([[77, -1, False]], b"", "IndexError"),
        ([[0, 1, False]], (50).to_bytes(8, "little") + bytes(8), "does not have here"),
    ],
)
def test_invalid_pushes_are_refused_with_a_reason(parts: Any, payload: bytes, words: str):
    with job(Rules(workers=1), shards=1) as running, socket.create_connection(running.shards[0].address) as worker:
        introduce(worker, TOKEN)
        send(worker, FrameKind.HELLO, 0, {"worker": 0, "placement": running.placement.digest(0)})
        assert receive(worker).kind is FrameKind.REPLY
        send(worker, FrameKind.PUSH, 1, {"parts": parts}, [memoryview(payload)])
        answer = receive(worker)
        assert answer.kind is FrameKind.ERROR
        assert words in answer.meta["message"]


def test_shards_of_a_run_end_with_a_killed_rank(launch_script):
    """The launcher sees the killed rank; the shard that it started has ended too, without a signal."""
    run = launch_script(
        """
        import os, signal, torch
        from torch import nn
        import phalanx
        f = phalanx.Formation(strategy="parameter-server", device="cpu", num_servers=2)
        model = nn.Linear(2, 2)
        model, optimizer = f.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        print("shard", *[shard.pid for shard in f.strategy._group.shards.values()])
        torch.distributed.barrier()
        if f.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(3):
            f.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
        """,
    )
    assert run.result.exit_code != 0
    pids = [int(line.split()[1]) for rank in (0, 1) for line in run.log(rank).splitlines() if line.startswith("shard")]
    assert len(pids) == 2
    deadline = time.monotonic() + LIMIT_SECONDS
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_a_run_survives_a_killed_shard(ranks):
    """In the loop: the rank that started a shard starts it again, and training ends with finite, equal weights."""

    def run() -> tuple[list[float], int]:
        with Formation(strategy="parameter-server", device="cpu") as formation:
            torch.manual_seed(0)
            model = nn.Linear(3, 1)
            model, optimizer = formation.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
            for step in range(8):
                shards = formation.strategy._group.shards
                if step == 4 and shards:
                    os.kill(shards[0].pid, signal.SIGKILL)
                formation.backward(model(torch.ones(1, 3)).sum())
                optimizer.step()
                optimizer.zero_grad()
            formation.strategy.consolidate(model)
            deaths = sum(shard.deaths for shard in shards.values())
        return model.weight.detach().flatten().tolist(), deaths

    (first, deaths), (second, _) = ranks(run, world_size=2)
    assert deaths == 1
    assert first == second
