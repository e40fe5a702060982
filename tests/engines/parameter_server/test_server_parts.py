"""Parts of the parameter server: its state file, its table of workers, rows of gradients, and contradictions."""

from __future__ import annotations

import time

import pytest
import torch

from phalanx import DistributedConfig
from phalanx.engines.parameter_server.gradients import Bundle, Contribution, Rows, cut_gradient, merge
from phalanx.engines.parameter_server.membership import WorkerTable
from phalanx.engines.parameter_server.placement import Piece
from phalanx.engines.parameter_server.state import StateFile, StateSlots, pattern_of, rebuild
from phalanx.errors import ConfigError, ServerError
from phalanx.observe.events import ServersReported
from phalanx.observe.format import servers_lines

TABLE = Piece("table", (6, 2), "float32", 4)


def test_a_saved_shard_is_restored_and_damage_is_reported(tmp_path):
    path = tmp_path / "shard-0"
    saved = StateFile(path)
    assert saved.load() is None
    bundle = Bundle({(0, "="): torch.arange(6.0), (0, "step"): torch.tensor(3.0)}, {(0, "flag"): True})
    saved.save({"clock": 7}, bundle)
    meta, found = saved.load()
    assert meta["clock"] == 7
    assert torch.equal(found.tensors[0, "="], torch.arange(6.0))
    assert found.tensors[0, "step"].item() == 3.0
    assert found.plain == {(0, "flag"): True}
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(ServerError, match="damaged"):
        saved.load()
    path.write_bytes(data[:-1])
    with pytest.raises(ServerError, match="length in its header"):
        saved.load()


def test_an_interrupted_save_leaves_the_old_state(tmp_path, monkeypatch):
    saved = StateFile(tmp_path / "shard-0")
    saved.save({"clock": 1}, Bundle())

    def fail(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("phalanx.engines.parameter_server.state.os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        saved.save({"clock": 2}, Bundle())
    assert saved.load()[0]["clock"] == 1


def test_slots_return_the_newest_complete_state():
    slots = StateSlots()
    assert slots.load() is None
    for clock in (1, 2, 3):
        slots.save({"clock": clock}, Bundle({(0, "="): torch.full((4,), float(clock))}))
    assert slots.load()[0]["clock"] == 3
    newest = slots._slots[1]
    newest.truncate(newest.seek(0, 2) - 1)  # as if the shard had died while it wrote
    meta, bundle = slots.load()
    assert meta["clock"] == 2
    assert bundle.tensors[0, "="].tolist() == [2.0] * 4
    slots.save({"clock": 4}, Bundle())
    assert slots.load()[0]["clock"] == 4
    slots.close()


def test_the_worker_table_waits_for_expected_workers_and_removes_lost_ones():
    roster = WorkerTable({0, 1})
    roster.come(0, 10, 0)
    roster.committed[0] = 3
    assert not roster.all_have(roster.committed, 1)
    assert roster.ahead(0) == 3  # worker 1 has not come: it counts as not having begun
    roster.come(1, 11, 0)
    assert not roster.all_have(roster.committed, 1)
    assert roster.go(1, 99) is False  # an old connection of a worker that is here again
    assert roster.go(1, 11)
    assert roster.all_have(roster.committed, 3)
    assert roster.ahead(0) == 0


def test_a_restored_worker_table_waits_for_some_seconds_only():
    roster = WorkerTable.restored({"live": [0, 1], "applied": [[0, 5]]}, 300.0)
    roster.come(0, 1, 5)
    assert not roster.gathered
    assert 0 < roster.patience <= 300
    roster.absent_until = time.monotonic()
    assert roster.gathered
    assert roster.applied == {0: 5}


def test_a_mostly_zero_gradient_is_sent_as_rows():
    gradient = torch.zeros(6, 2)
    gradient[4] = 1.0
    part = cut_gradient(gradient, 0, TABLE, find_rows=True)
    assert part.rows.tolist() == [4]
    assert cut_gradient(gradient, 0, TABLE, find_rows=False).rows is None
    assert cut_gradient(torch.ones(6, 2), 0, TABLE, find_rows=True).rows is None  # it would be more bytes
    upper = Piece("table", (3, 2), "float32", 4, start=3)
    assert cut_gradient(gradient.to_sparse(1), 0, upper, find_rows=False).rows.tolist() == [1]


def test_whole_and_partial_gradients_add_up():
    first, second = Contribution([TABLE]), Contribution([TABLE])
    first.memory.views[0].fill_(7.0)  # what a step before left there must not count
    first.rows[0] = Rows(torch.tensor([1, 4]), torch.ones(2, 2), sparse=False)
    second.memory.views[0].fill_(2.0)
    second.dense.add(0)
    merged = merge([first, second], [TABLE])
    assert merged.gradients[0][:, 0].tolist() == [2, 3, 2, 2, 3, 2]
    assert merged.square() == pytest.approx(2 * (4 * 2**2 + 2 * 3**2) / 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_servers": 2}, "num_servers = 2 without parameter servers"),
        ({"server_mode": "async", "strategy": "ddp"}, "server_mode = 'async' without parameter servers"),
        ({"staleness": 2, "strategy": "fsdp"}, "staleness = 2 without parameter servers"),
        ({"strategy": "parameter-server", "staleness": 2, "server_mode": "sync"}, "staleness = 2 with server_mode"),
        ({"strategy": "parameter-server", "staleness": 2, "server_mode": "async"}, "workers do not wait"),
        ({"strategy": "parameter-server", "server_mode": "bounded"}, "needs a bound"),
        ({"strategy": "parameter-server", "tensor_parallel": 2}, "tensor_parallel = 2 does not go with"),
        ({"strategy": "parameter-server", "zero_stage": 2}, "zero_stage = 2 does not go with"),
        ({"strategy": "parameter-server", "mixed_precision": "fp16"}, "needs loss scaling"),
        ({"strategy": "parameter-server", "staleness": 1, "loss_weighting": "tokens"}, "synchronizes all ranks"),
        ({"strategy": "parameter-server", "sharding": "full"}, "strategy = 'parameter-server' replicates"),
        ({"strategy": "parameter-server", "num_servers": 0}, "num_servers = 0"),
    ],
)
def test_settings_that_contradict_are_refused_once(settings, words):
    with pytest.raises(ConfigError) as caught:
        DistributedConfig(**settings)
    assert len(caught.value.problems) == 1
    assert words in str(caught.value)


def test_the_mode_follows_from_staleness():
    config = DistributedConfig(strategy="parameter-server")
    assert config.resolved_server_mode == "sync"
    assert config.replace(staleness=0).resolved_server_mode == "bounded"
    assert config.replace(server_mode="async").resolved_server_mode == "async"


def test_the_report_contains_staleness_load_and_throughput():
    shard = {"bytes_in": 2_000_000, "bytes_out": 1_000, "requests": 1234, "busy": 0.05}
    event = ServersReported("bounded", 92, 156.0, 0.9, 3, 2, 5, 2.0, 0.5, [shard])
    assert servers_lines(event) == [
        "parameter server: bounded · 92 updates, 156/s · staleness 0.9 updates, at most 3 · at most 2 steps ahead · "
        "5 updates lost when a shard came back",
        "  shard 0: 2.0 MB in, 1.0 kB out, 1,234 requests, 5% busy",
        "  messages of the main rank: 2.0 s, of which it waited 0.5 s",
    ]


def test_an_optimizer_is_rebuilt_whatever_its_constructor_takes():
    class Own(torch.optim.SGD):
        def __init__(self, parameters, *, secret):
            super().__init__(parameters, lr=torch.tensor(0.5), momentum=0.9)
            self.secret = secret

    weight = torch.nn.Parameter(torch.zeros(6, 2))
    optimizer = Own([weight], secret=3)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # it sets `step` on the instance
    made = rebuild(pattern_of(optimizer), [TABLE], [torch.nn.Parameter(torch.ones(6, 2))])
    assert made.secret == 3
    (group,) = made.param_groups
    assert group["lr"] == pytest.approx(0.5 / 3)
    group["params"][0].grad = torch.ones(6, 2)
    made.step()
    assert torch.allclose(group["params"][0], torch.full((6, 2), 1 - 0.5 / 3))
    assert torch.equal(weight, torch.zeros(6, 2))
