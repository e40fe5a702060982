"""An abort wakes what waits for other ranks, and nothing else."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from waiting import LIMIT_SECONDS

from phalanx.errors import CommunicationError
from phalanx.world import abort, world
from phalanx.world.env import read_rank_env


class Pool:
    """Connections that a thread of the user's opens all the time, to a server of this process."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.held: list[socket.socket] = []
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self._open, daemon=True)
        self.thread.start()

    def _open(self) -> None:
        while not self.ends.wait(0.0005):
            self.held.append(socket.create_connection(self.server.getsockname()))
            self.held.append(self.server.accept()[0])

    def broken(self) -> int:
        """Stop, and return how many connections carry nothing any more."""
        self.ends.set()
        self.thread.join()
        count = 0
        for one in self.held:
            try:
                one.send(b"x")
            except OSError:
                count += 1
            one.close()
        self.server.close()
        return count


def abort_while_sockets_open() -> tuple[int, int, str]:
    """Rank 0 waits in an all-reduce in which rank 1 takes no part, until a thread aborts it."""
    abort.watch_groups()
    pool = Pool()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT_SECONDS))
    found = len(abort._connections)
    error = ""
    if dist.get_rank() == 0:
        threading.Timer(0.3, abort.abort_collectives, ["a test"]).start()
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as raised:
            error = str(raised)
        assert time.monotonic() - began < 200, "not at the timeout"
        with pytest.raises(CommunicationError, match="a test"):
            abort.raise_if_aborted()
    else:
        time.sleep(1.0)
    result = found, pool.broken(), error
    abort.begin_group()
    return result


def test_an_abort_shuts_the_connections_between_ranks_and_no_others(ranks):
    (found, broken, error), (_, other, _) = ranks(abort_while_sockets_open, world_size=2)
    assert found == 1, "one connection to one other rank"
    assert error
    assert (broken, other) == (0, 0)


def test_a_rank_that_gets_another_position_keeps_its_connection_to_the_store(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    variables |= {
        "GROUP_RANK": 0,
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    env = read_rank_env()
    first = world._connect(env, 20.0, signed=False)
    again = world._connect(dataclasses.replace(env, rank=1, generation=3), 20.0, signed=False)
    assert again is first
    restarted = dataclasses.replace(env, attempt=1)
    assert world._connect(restarted, 20.0, signed=False) is not first, "values of an attempt are its own"
    world._CONNECTED.clear()
