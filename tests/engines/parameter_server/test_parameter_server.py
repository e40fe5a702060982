"""Parameter servers with real shards: equal to ddp, bounded staleness, sparse messages, checkpoints both ways."""

from __future__ import annotations

import json
import time

import pytest
import torch
from layouts import assert_same, train
from torch import nn
from torch.utils.data import TensorDataset

from phalanx.config import DistributedConfig
from phalanx.engines.parameter_server.client import ParameterClient, move
from phalanx.engines.parameter_server.membership import Rules, ShardSpec
from phalanx.engines.parameter_server.placement import plan_placement
from phalanx.engines.parameter_server.process import ShardProcess
from phalanx.loop.formation import Formation
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job

COMMON = {"name": "gpt", "epochs": 1, "batch_size": 5, "log_every_n_steps": 2}
SERVERS = {"strategy": "parameter-server", "num_servers": 2}
CASES = {
    "sgd, clipped": {"optimizer": "sgd", "gradient_clipping": 0.5},
    "adamw, accumulated, by tokens": {
        "optimizer": "adamw",
        "weight_decay": 0.1,
        "gradient_accumulation_steps": 2,
        "loss_weighting": "tokens",
        "lr_schedule": "cosine",
    },
}


@pytest.mark.parametrize("case", CASES)
def test_sync_equals_ddp(ranks, tmp_path, case):
    """Tied weights, a ragged last batch, two shards with parameters cut between them."""
    settings = {**COMMON, **CASES[case]}
    expected = ranks(lambda: train(str(tmp_path / "a"), **settings), world_size=2)
    found = ranks(lambda: train(str(tmp_path / "b"), **settings, **SERVERS), world_size=2)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours[0], theirs[0], 1e-12)
        assert ours[1]["loss"] == pytest.approx(theirs[1]["loss"], abs=1e-10)
        assert ours[2] == pytest.approx(theirs[2], abs=1e-9)


@pytest.mark.parametrize("order", ["from servers to ddp", "from ddp to servers"])
def test_checkpoints_move_between_servers_and_ddp(ranks, tmp_path, order):
    first, second = ({}, SERVERS) if order.startswith("from ddp") else (SERVERS, {})
    common = {**COMMON, "optimizer": "adamw", "epochs": None}
    place = {"checkpoint_dir": str(tmp_path / "ckpt")}
    expected = ranks(lambda: train(str(tmp_path / "a"), max_steps=6, **common), world_size=2)
    ranks(lambda: train(str(tmp_path / "b"), max_steps=3, **common, **place, **first), world_size=2)
    rest = ranks(
        lambda: train(str(tmp_path / "c"), max_steps=6, resume_from_checkpoint=True, **common, **place, **second),
        world_size=2,
    )
    for ours, theirs in zip(rest, expected, strict=True):
        assert_same(ours[0], theirs[0], 1e-12)


@pytest.mark.parametrize("pace", [{"server_mode": "async"}, {"staleness": 1}])
def test_asynchronous_workers_learn_and_end_equal(ranks, tmp_path, pace):
    """A line through points: however stale the gradients are, they lead there."""

    def run() -> tuple[float, float, torch.Tensor]:
        torch.manual_seed(0)
        inputs = torch.randn(64, 4)
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        model = nn.Linear(4, 1)
        before = nn.functional.mse_loss(model(inputs), data.tensors[1]).item()
        settings = {
            "optimizer": "sgd",
            "learning_rate": 0.02,
            "epochs": 6,
            "gradient_clipping": 10.0,
            **SERVERS,
            **pace,
        }
        config = DistributedConfig(device="cpu", progress=False, batch_size=4, **settings)
        task = TrainTask(model, data, loss_fn=nn.functional.mse_loss)
        Job("fit", task, config, tmp_path / "run").run()
        after = nn.functional.mse_loss(model(inputs), data.tensors[1]).item()
        return before, after, model.weight.detach()

    (before, after, first), (_, _, second) = ranks(run, world_size=2)
    assert after < 0.2 * before
    assert torch.equal(first, second)


def test_one_rank_needs_no_group(ranks, tmp_path):
    settings = {**COMMON, "optimizer": "sgd", "batch_size": 8}
    expected = ranks(lambda: train(str(tmp_path / "a"), **settings), world_size=1)[0]
    found = ranks(lambda: train(str(tmp_path / "b"), **settings, strategy="parameter-server"), world_size=1)[0]
    assert_same(found[0], expected[0], 1e-12)


def test_a_skipped_step_does_not_change_the_servers(ranks):
    def run() -> list[float]:
        torch.manual_seed(0)
        config = DistributedConfig(
            device="cpu", strategy="parameter-server", on_nonfinite="skip", optimizer="sgd", batch_size=2
        )
        with Formation(config) as formation:
            model = nn.Linear(2, 1, bias=False)
            model, optimizer = formation.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
            seen = []
            for factor in (float("nan"), 1.0, 1.0):
                loss = (model(torch.ones(2, 2)) * factor).mean()
                formation.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                formation.strategy.consolidate(model)
                seen.append(model.weight.detach().flatten().tolist()[0])
            return [seen[1] - seen[0], seen[2] - seen[1], formation.gradients.skipped_steps]

    for first, second, skipped in ranks(run, world_size=2):
        assert skipped == 1
        assert first == pytest.approx(-0.5)
        assert second == pytest.approx(-0.5)


def test_parameters_without_gradient_are_named(ranks):
    from phalanx.errors import ModelError

    def run() -> None:
        with Formation(DistributedConfig(device="cpu", strategy="parameter-server")) as formation:
            model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
            model, optimizer = formation.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            formation.backward(model["used"](torch.ones(1, 2)).sum())
            optimizer.step()

    with pytest.raises(ModelError, match=r"2 parameters got no gradient.*idle\.weight, idle\.bias"):
        ranks(run, world_size=1)


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_worker_is_ahead_by_more_than_the_staleness(ranks, staleness):
    """Each worker announces the step it begins; a quick one must never see a slow one more than s steps behind."""

    def run() -> tuple[int, int]:
        import torch.distributed as dist

        config = DistributedConfig(device="cpu", strategy="parameter-server", staleness=staleness, num_servers=2)
        with Formation(config) as formation:
            model = nn.Linear(3, 3)
            model, optimizer = formation.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            rank, store, furthest = formation.rank, formation.world.store, 0
            store.add("done/0", 0)
            store.add("done/1", 0)
            dist.barrier()
            for _ in range(12):
                loss = model(torch.ones(1, 3)).sum()  # waits here while it is too far ahead
                ahead = store.add(f"done/{rank}", 0) - store.add(f"done/{1 - rank}", 0)
                furthest = max(furthest, ahead)
                if rank == 1:
                    time.sleep(0.005)
                formation.backward(loss)
                store.add(f"done/{rank}", 1)
                optimizer.step()
                optimizer.zero_grad()
            formation.strategy.consolidate(model)
            reported = formation.strategy.closing_event().ahead_max
            dist.barrier()
            return furthest, reported

    (furthest, reported), _ = ranks(run, world_size=2)
    # The slow worker counts a step as done just before it commits: seen from outside it can only be nearer.
    assert furthest <= staleness
    assert reported <= staleness
    assert reported >= min(1, staleness)


class Table(nn.Module):
    """A large embedding of which a batch touches a few rows."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(400, 8, sparse=sparse)
        self.head = nn.Linear(8, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens)).mean(dim=1)


def _train_table(*, sparse: bool, by_rows: bool, shards: int = 2) -> tuple[dict[str, torch.Tensor], int, int]:
    torch.manual_seed(0)
    model = Table(sparse=sparse).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    placement = plan_placement(model, optimizer, shards)
    processes = [ShardProcess(ShardSpec(n, placement, optimizer, Rules(1), "token")) for n in range(shards)]
    client = ParameterClient([process.address for process in processes], "token", placement, 0)
    try:
        named = dict(model.named_parameters())
        client.bind(named)
        client.load({name: {"=": parameter.detach()} for name, parameter in named.items()})
        client.pull()
        sent, received = client.traffic
        tokens = torch.randint(400, (6, 4, 3), generator=torch.Generator().manual_seed(1))
        for batch in tokens:
            model.zero_grad()
            model(batch).square().sum().backward()
            for name, parameter in named.items():
                client.push(name, parameter.grad, find_rows=by_rows and "embed" in name)
            client.commit()
            client.wait()
        after = client.traffic
        return {n: p.detach().clone() for n, p in named.items()}, after[0] - sent, after[1] - received
    finally:
        client.close()
        for process in processes:
            process.stop()


def test_embeddings_are_sent_by_rows():
    whole, sent, received = _train_table(sparse=False, by_rows=False)
    rows, sent_rows, _ = _train_table(sparse=False, by_rows=True)
    lazy, sent_lazy, received_lazy = _train_table(sparse=True, by_rows=False)
    assert_same(rows, whole, 0.0)
    assert_same(lazy, whole, 1e-14)
    assert sent_rows < 0.15 * sent
    assert sent_lazy < 0.15 * sent
    assert received_lazy < 0.15 * received


def test_shards_are_added_during_training():
    """Two shards become three in the middle of AdamW: values and states move, and the next steps are the same."""

    def run(*, change: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        named = dict(model.named_parameters())
        inputs = torch.randn(8, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        processes: list[ShardProcess] = []

        def connect(shards: int) -> ParameterClient:
            placement = plan_placement(model, optimizer, shards)
            fresh = [ShardProcess(ShardSpec(n, placement, optimizer, Rules(1), "token")) for n in range(shards)]
            processes.extend(fresh)
            client = ParameterClient([process.address for process in fresh], "token", placement, 0)
            client.bind(named)
            return client

        clients = [connect(2)]
        try:
            clients[0].load({name: {"=": parameter.detach()} for name, parameter in named.items()})
            for step, batch in enumerate(inputs):
                if change and step == 4:
                    clients.append(connect(3))
                    move(clients[0], clients[1])
                model.zero_grad()
                model(batch).square().mean().backward()
                for name, parameter in named.items():
                    clients[-1].push(name, parameter.grad)
                clients[-1].commit()
                clients[-1].wait()
            return [parameter.detach().clone() for parameter in model.parameters()]
        finally:
            for client in clients:
                client.close()
            for process in processes:
                process.stop()

    for ours, theirs in zip(run(change=True), run(change=False), strict=True):
        assert torch.equal(ours, theirs)


def test_the_trainer_reports_staleness_load_and_throughput(ranks, tmp_path):
    def run() -> None:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
        config = DistributedConfig(device="cpu", progress=False, batch_size=4, **SERVERS, server_mode="async")
        Job("fit", TrainTask(nn.Linear(4, 2), data), config, tmp_path / "run").run()

    ranks(run, world_size=2)
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    (event,) = [event for event in map(json.loads, lines) if event["event"] == "servers"]
    assert event["mode"] == "async"
    assert event["updates"] == 8
    assert event["updates_per_second"] > 0
    assert len(event["shards"]) == 2
    assert all(shard["bytes_in"] > 0 and shard["requests"] >= 16 for shard in event["shards"])


def test_uneven_shards_exchange_pieces_and_training_continues(ranks):
    """All rows in use are on shard 0 at first; where ranks synchronise, some are moved, also if a shard fails later."""

    def run() -> tuple[int, list[list[float]], list[torch.Tensor], list[torch.Tensor]]:
        import os
        import signal

        torch.manual_seed(0)
        model, alone = Table(sparse=True).double(), Table(sparse=True).double()
        alone.load_state_dict(model.state_dict())
        with Formation(DistributedConfig(device="cpu", strategy="parameter-server", num_servers=2)) as formation:
            wrapped, optimizer = formation.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            same = torch.optim.SGD(alone.parameters(), lr=0.1)
            client = formation.strategy._group.client
            hot = [row for p in client.placement.shards[0] if p.lazy for row in range(p.start, p.stop)]
            loads = []
            for step in range(6):
                if step == 3:
                    loads.append(_loads(client))
                    formation.strategy.consolidate(wrapped)
                    for shard in formation.strategy._group.shards.values():
                        os.kill(shard.pid, signal.SIGKILL)
                for m, o in ((wrapped, optimizer), (alone, same)):
                    loss = m(torch.tensor(hot).view(1, -1)).square().sum()
                    formation.backward(loss) if m is wrapped else loss.backward()
                    o.step()
                    o.zero_grad()
            client.wait()
            loads.append(_loads(client))
            relocations = formation.strategy._group.relocations
        return relocations, loads, [p.detach() for p in model.parameters()], [p.detach() for p in alone.parameters()]

    for relocations, (before, after), ours, theirs in ranks(run, world_size=2):
        assert relocations == 1
        assert max(before) > 1.5 * sum(before) / 2
        assert max(after) < 1.25 * sum(after) / 2
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine - other).abs().max().item() < 1e-12


def _loads(client: ParameterClient) -> list[float]:
    costs = client.costs()
    return [sum(costs[piece.key] for piece in shard) for shard in client.placement.shards]


def test_a_signal_stops_all_ranks_at_one_step_and_the_run_can_continue(ranks, tmp_path):
    """Asynchronous workers synchronise only where losses are gathered: there all stop, with one checkpoint."""
    from phalanx.errors import PreemptedError

    settings = {**COMMON, **SERVERS, "server_mode": "async", "epochs": None, "checkpoint_dir": str(tmp_path / "ckpt")}

    def run() -> str:
        import os
        import signal
        import threading

        from waiting import until

        def stop_after_a_step() -> None:
            events = tmp_path / "run" / "events.jsonl"
            until(lambda: events.exists() and '"event":"step"' in events.read_text())
            os.kill(os.getpid(), signal.SIGTERM)

        if os.environ["RANK"] == "1":
            threading.Thread(target=stop_after_a_step).start()
        try:
            train(str(tmp_path / "run"), max_steps=100_000, **settings)
        except PreemptedError as error:
            return str(error).split(":")[0]
        return "not stopped"

    first, second = ranks(run, world_size=2)
    assert first == second
    assert first.startswith("stopped by SIGTERM after step")
    step = int(first.split()[-1])
    assert step % COMMON["log_every_n_steps"] == 0
    resumed = {**settings, "max_steps": step + 2, "resume_from_checkpoint": True}
    ranks(lambda: train(str(tmp_path / "again"), **resumed), world_size=2)
    assert (tmp_path / "ckpt" / f"step-{step + 2:08d}").exists()


def test_the_users_optimizer_gets_its_state_back(ranks):
    """After a run the user holds what ddp would leave: so a second run goes on where the first ended."""

    def run(strategy: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            with Formation(DistributedConfig(device="cpu", strategy=strategy)) as formation:
                wrapped, bound = formation.prepare(model, optimizer)
                for step in range(2):
                    formation.backward(wrapped(torch.full((1, 3), 1.0 + formation.rank + step).double()).sum())
                    bound.step()
                    bound.zero_grad()
        states = [optimizer.state[parameter][key] for parameter in model.parameters() for key in ("exp_avg", "step")]
        return [*(parameter.detach() for parameter in model.parameters()), *states]

    for ours, theirs in zip(
        ranks(lambda: run("parameter-server"), world_size=2), ranks(lambda: run("ddp"), world_size=2), strict=True
    ):
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine - other).abs().max().item() < 1e-12
