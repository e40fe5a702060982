"""Rendezvous of several nodes, one supervisor each: gather at the endpoint, share the first failure, leave together.

The nodes share a TCPStore. Values there are JSON, signed where the job has a secret (`signed_store`): torch's own
rendezvous would unpickle what any process that reaches the port has written.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from phalanx.errors import PhalanxError, UsageError
from phalanx.host.messages import Message
from phalanx.host.signed_store import VARIABLE, sign_store
from phalanx.launch.blame import ranks_text
from phalanx.launch.spec import split_endpoint

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore


_CONNECT_SECONDS = 60.0
_LEAVE_SECONDS = 3.0
_ARRIVAL_POLL_SECONDS = 0.05
_ENDS, _LEFT, _FAILURE = "ends", "left", "failure"
_ARRIVED, _NODE, _BEAT, _MEMBERS = "arrived", "node", "beat", "members"
_ALIVE, _PRESENT = "alive", "present"
_QUESTIONS, _CALLS = "questions", "calls"
_BEAT_SECONDS = 1.0
"""A node that waits for the others sends a heartbeat and looks how many there are so often."""
_LOST_SECONDS = 2.0
"""A node without a heartbeat for so long is named when ranks elsewhere fail."""
_SILENT_SECONDS = 5.0
"""A waiting node without a heartbeat for so long counts as lost."""


class NodeGroup:
    """This node among the others, over the store at the endpoint."""

    def __init__(self, request: Message) -> None:
        self._request = request
        self._num_nodes: int = request["num_nodes"]
        self._host, self._port = split_endpoint(request["endpoint"])
        self._seconds: float = request["seconds"]
        self._hosts_store = False
        self._store = self._connect()
        self._board: Store | None = None
        self._rank_store: TCPStore | None = None
        self._attempt = 0
        self._node_rank = 0
        self._hosts: list[tuple[str, range]] = []
        self._census, self._silent = Census(), []  # type: tuple[Census, list[str]]
        self._knows_failure = self._published_end = False
        self._forget_questions()

    def _forget_questions(self) -> None:
        self._asked: list[int] = []
        self._answered: dict[int, set[int]] = {}
        self._questions = 0

    def _connect(self) -> TCPStore:
        """Host the store at the endpoint if this node has to, else connect to it."""
        from torch.distributed import DistNetworkError

        from phalanx.torch_compat import is_own_host

        # Node 0 hosts when the nodes are numbered (a host's name may map to loopback); else torch's rule decides.
        node_rank = self._request["node_rank"]
        if is_own_host(self._host) if node_rank is None else node_rank == 0:
            # Fails where another supervisor on this machine hosts it already: then connect to that.
            with contextlib.suppress(DistNetworkError, RuntimeError, ValueError):
                store = self._open_store(self._port, is_master=True)
                self._hosts_store = True
                return store
        began = time.monotonic()
        try:
            return self._open_store(self._port, is_master=False)
        except (DistNetworkError, RuntimeError, ValueError, TimeoutError) as error:
            waited = time.monotonic() - began
            raise PhalanxError(
                f"no answer from the rendezvous endpoint {self._host}:{self._port} (waited {waited:.0f} s).",
                hint="Start node 0 there, and check that this node can reach that host and port.",
            ) from error

    def _open_store(self, port: int, *, is_master: bool) -> TCPStore:
        from torch.distributed import TCPStore

        timeout = timedelta(seconds=min(self._seconds, _CONNECT_SECONDS))
        return TCPStore(self._host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)

    def gather(self, attempt: int, send: Callable[[Message], None]) -> dict[str, Any]:
        """Wait for all nodes, agree on their order, and return the fields of this node's `NodeInfo`."""
        from torch.distributed import DistNetworkError, PrefixStore

        self._check_same()
        self._attempt = attempt
        prefix = f"phalanx/{attempt}"
        self._board = self._sign(PrefixStore(prefix, self._store))
        self._knows_failure = self._published_end = False
        self._forget_questions()
        try:
            nodes, own = self._await_all(self._board, send, time.monotonic() + self._seconds)
            order = order_nodes([node["node_rank"] for node in nodes], [node["host"] for node in nodes])
            # The ranks' store is on the endpoint's host, which all nodes can reach.
            if self._hosts_store:
                self._rank_store = self._open_store(0, is_master=True)
                self._board.set("rank-store", str(self._rank_store.port))
            port = int(self._board.get("rank-store"))
        except (DistNetworkError, RuntimeError) as error:
            raise self._host_is_lost() from error
        node_rank = self._node_rank = order.index(own)
        sizes = [nodes[index]["ranks"] for index in order]
        ranks = [range(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
        self._hosts = [(nodes[index]["host"], own) for index, own in zip(order, ranks, strict=True)]
        self._census, self._silent = Census(seconds=_LOST_SECONDS), []
        return {
            "node_rank": node_rank,
            "num_nodes": self._num_nodes,
            "first_rank": ranks[node_rank].start,
            "world_size": sum(sizes),
            "master_addr": self._host,
            "master_port": port,
            # Node 0, and with it rank 0, may be another machine after a restart.
            "run_id": self._sign(self._store).compare_set("phalanx/launch_id", "", self._request["launch_id"]).decode(),
        }

    def _name(self, node: int) -> str:
        host, ranks = self._hosts[node]
        return f"{node} ({host}, {ranks_text(ranks)})"

    def _check_same(self) -> None:
        """Refuse to take part with another version or other settings than the machine that came first."""
        from torch.distributed import PrefixStore

        store = self._sign(PrefixStore("phalanx", self._store))
        own: dict[str, str] = self._request.get("identity") or {}
        mine = {"host": socket.gethostname(), "identity": own}
        first = json.loads(store.compare_set("identity", "", json.dumps(mine)))
        names = [name for name in {**first["identity"], **own} if first["identity"].get(name) != own.get(name)]
        if names:
            each = [f"{name} is {own.get(name)} here and {first['identity'].get(name)} there" for name in names]
            more = f" (and {len(each) - 5} more)" if len(each) > 5 else ""
            raise UsageError(
                f"{mine['host']} differs from {first['host']}, which came first: {'; '.join(each[:5])}{more}.",
                hint="Start the same command, with the same versions and settings, on every machine.",
            )

    def _sign(self, store: Store) -> Store:
        return sign_store(store, {VARIABLE: self._request.get("secret") or ""})

    def _await_all(
        self, board: Store, send: Callable[[Message], None], deadline: float
    ) -> tuple[list[dict[str, Any]], int]:
        """Return the descriptions of all nodes in the order of their arrival, and the index of this one.

        The node that hosts the store decides which nodes take part: the first ones, as many as needed, that still send
        heartbeats. So a node that came, ended and was started again counts once. It alone reads what all have written;
        the others send a fixed number of messages, however many nodes there are.
        """
        own = board.add(_ARRIVED, 1)
        mine = {"node_rank": self._request["node_rank"], "host": socket.gethostname()}
        board.set(f"{_NODE}/{own}", json.dumps({**mine, "ranks": self._request["ranks_per_node"]}))
        census, reported = Census(), 0
        while True:
            if time.monotonic() > deadline:
                where = f"{self._host}:{self._port}"
                raise PhalanxError(
                    f"not all {self._num_nodes} nodes joined at {where} within {self._seconds:.0f} s.",
                    hint="Start the same command on every node, each with its own node rank.",
                )
            board.add(f"{_BEAT}/{own}", 1)
            arrived = self._count(board, census) if self._hosts_store else board.add(_PRESENT, 0)
            if arrived != reported:
                reported = arrived
                send({"arrived": reported, "attempt": self._attempt})
            if self._await_members(board):
                break
        members = {int(number): node for number, node in json.loads(board.get(_MEMBERS)).items()}
        if own not in members:
            raise UsageError(
                f"{self._num_nodes} nodes have joined at {self._host}:{self._port} without this one.",
                hint="Start one supervisor per node, and give every job its own port (--rdzv-endpoint).",
            )
        return list(members.values()), list(members).index(own)

    def _count(self, board: Store, census: Census) -> int:
        """Count the nodes that are present, for all to read; with enough of them, fix which take part."""
        present = census.take({n: board.add(f"{_BEAT}/{n}", 0) for n in range(1, board.add(_ARRIVED, 0) + 1)})
        board.add(_PRESENT, len(present) - board.add(_PRESENT, 0))
        if len(present) >= self._num_nodes:
            chosen = present[: self._num_nodes]
            board.set(_MEMBERS, json.dumps({n: json.loads(board.get(f"{_NODE}/{n}")) for n in chosen}))
        return len(present)

    def _await_members(self, board: Store) -> bool:
        """Wait a moment for the decision; return whether it is there."""
        from torch.distributed import DistStoreError

        seconds = _ARRIVAL_POLL_SECONDS if self._hosts_store else _BEAT_SECONDS
        try:
            board.wait([_MEMBERS], timedelta(seconds=seconds))
        except DistStoreError:  # not yet; a lost connection is another error
            return False
        return True

    def _host_is_lost(self) -> PhalanxError:
        return PhalanxError(
            f"lost the node that hosts the rendezvous at {self._host}:{self._port}.",
            hint="Look at that node's own output: its supervisor has ended.",
        )

    def post(self, to: str, message: Message) -> None:
        """Do nothing: only machines whose number may change send each other messages."""

    def publish_failure(self, failure: dict[str, Any]) -> None:
        """Publish this node's failure, unless another node was first."""
        if self._board is not None:
            self._knows_failure = True
            self._board.compare_set(_FAILURE, "", json.dumps(failure))

    def ask_calls(self) -> None:
        """Ask all launchers for the collectives of their ranks."""
        if self._board is not None:
            self._asked.append(self._board.add(_QUESTIONS, 1))

    def publish_calls(self, number: int, calls: list[Message]) -> None:
        """Publish what this node's ranks have answered to a question."""
        if self._board is not None:
            self._board.set(f"{_CALLS}/{number}/{self._node_rank}", json.dumps(calls))

    def _read_calls(self) -> list[Message]:
        """Return new questions of any launcher, and the other nodes' answers to this one's."""
        assert self._board is not None
        count = self._board.add(_QUESTIONS, 0)
        new = range(self._questions + 1, count + 1)
        found: list[Message] = [{"question": n, "own": n in self._asked, "attempt": self._attempt} for n in new]
        self._questions = count
        for number in self._asked:
            for node in set(range(self._num_nodes)) - {self._node_rank} - self._answered.setdefault(number, set()):
                if self._board.check([key := f"{_CALLS}/{number}/{node}"]):
                    self._answered[number].add(node)
                    answer = {"number": number, "from": node, "calls": json.loads(self._board.get(key))}
                    found.append({"answer": answer, "attempt": self._attempt})
        return found

    def publish_end(self) -> None:
        """Publish that all ranks of this node have succeeded."""
        if self._board is not None:
            self._board.add(_ENDS, 1)
            self._published_end = True

    def news(self) -> list[Message]:
        """Return messages for the supervisor: another node's failure, silent nodes, or that all have ended."""
        from torch.distributed import DistNetworkError

        if self._board is None:
            return []
        try:
            return [*self._read_ends(), *self._read_calls(), *self._check_heartbeats()]
        except (DistNetworkError, RuntimeError) as error:
            self._board = None
            raise self._host_is_lost() from error

    def _read_ends(self) -> list[Message]:
        assert self._board is not None
        if not self._knows_failure and self._board.check([_FAILURE]):
            self._knows_failure = True
            failure = json.loads(self._board.get(_FAILURE))
            return [{"remote_failure": failure, "attempt": self._attempt}]
        if self._published_end and self._board.add(_ENDS, 0) >= self._num_nodes:
            self._published_end = False
            return [{"all_ended": True, "attempt": self._attempt}]
        return []

    def _check_heartbeats(self) -> list[Message]:
        """Send a heartbeat; the node that hosts the store checks those of the others, and reports nodes without one."""
        assert self._board is not None
        self._board.add(f"{_ALIVE}/{self._node_rank}", 1)
        if not self._hosts_store:
            return []
        beats = {node: self._board.add(f"{_ALIVE}/{node}", 0) for node in range(self._num_nodes)}
        living = self._census.take(beats)
        silent = [self._name(node) for node in beats if node not in living]
        if silent == self._silent:
            return []
        self._silent = silent
        return [{"silent_nodes": silent, "attempt": self._attempt}]

    def leave(self) -> None:
        """Leave; the store's host leaves last, so that the others can still read."""
        from torch.distributed import DistNetworkError

        if self._board is None:
            return
        try:
            left = self._board.add(_LEFT, 1)
        except (DistNetworkError, RuntimeError):
            # Its host has already ended.
            return
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._hosts_store and left < self._num_nodes and time.monotonic() < deadline:
            time.sleep(0.05)
            left = self._board.add(_LEFT, 0)


class Census:
    """Which nodes are present, by the heartbeat counters that each increases."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, seconds: float = _SILENT_SECONDS) -> None:
        self._clock = clock
        self._seconds = seconds
        self._seen: dict[int, tuple[int, float]] = {}

    def take(self, beats: dict[int, int]) -> list[int]:
        """Return the numbers of the nodes whose counters have changed recently, in the order of their arrival."""
        now = self._clock()
        for number, beat in beats.items():
            if self._seen.get(number, (0, 0.0))[0] != beat:
                self._seen[number] = (beat, now)
        return [number for number, (_, moved) in sorted(self._seen.items()) if now - moved < self._seconds]


def order_nodes(node_ranks: list[int | None], hosts: list[str]) -> list[int]:
    """Return the arrival numbers in node order: nodes with a given rank get it, the rest fill the gaps in turn."""
    given: dict[int, int] = {}
    for arrival, node_rank in enumerate(node_ranks):
        if node_rank is None:
            continue
        if node_rank in given:
            pair = f"'{hosts[given[node_rank]]}' and '{hosts[arrival]}'"
            raise UsageError(
                f"two nodes say they are node {node_rank}: {pair}.",
                hint=f"Give each node its own number from 0 to {len(node_ranks) - 1}.",
            )
        given[node_rank] = arrival
    unnamed = iter(arrival for arrival, node_rank in enumerate(node_ranks) if node_rank is None)
    return [given[rank] if rank in given else next(unnamed) for rank in range(len(node_ranks))]
