"""Several nodes, one supervisor each: gather at torch's c10d rendezvous, share the first failure, leave together."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from phalanx.errors import PhalanxError, UsageError
from phalanx.launch.spec import split_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import PrefixStore, TCPStore

    from phalanx.launch.wire import Message

_CONNECT_SECONDS = 60.0
_LEAVE_SECONDS = 3.0
_ARRIVAL_POLL_SECONDS = 0.05
_ENDS, _LEFT, _FAILURE = "ends", "left", "failure"


class NodeGroup:
    """This node among the others, over the store at the endpoint."""

    def __init__(self, request: Message) -> None:
        self._request = request
        self._num_nodes: int = request["num_nodes"]
        self._host, self._port = split_endpoint(request["endpoint"])
        self._seconds: float = request["seconds"]
        self._hosts_store = False
        self._store = self._meet()
        self._board: PrefixStore | None = None
        self._rank_store: TCPStore | None = None
        self._attempt = 0
        self._said_failure = self._said_end = False

    def _meet(self) -> TCPStore:
        """Host the store at the endpoint where that is this node's part, else connect to it."""
        from torch.distributed import DistNetworkError

        wants_to_host = self._is_host()
        if wants_to_host:
            try:
                store = self._open_store(self._port, is_master=True)
            except (DistNetworkError, RuntimeError, ValueError):
                # Another supervisor on this machine was quicker: meet it there.
                wants_to_host = False
            else:
                self._hosts_store = True
                return store
        began = time.monotonic()
        try:
            return self._open_store(self._port, is_master=False)
        except (DistNetworkError, RuntimeError, ValueError, TimeoutError) as error:
            waited = time.monotonic() - began
            raise PhalanxError(
                f"nobody answers at the rendezvous endpoint {self._host}:{self._port} (waited {waited:.0f} s).",
                hint="Start node 0 there, and check that this node can reach that host and port.",
            ) from error

    def _open_store(self, port: int, *, is_master: bool) -> TCPStore:
        from torch.distributed import TCPStore

        timeout = timedelta(seconds=min(self._seconds, _CONNECT_SECONDS))
        return TCPStore(self._host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)

    def _is_host(self) -> bool:
        """Node 0 hosts when the nodes are numbered (a host's name may map to loopback); else torch's rule."""
        from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

        node_rank = self._request["node_rank"]
        return bool(_matches_machine_hostname(self._host)) if node_rank is None else node_rank == 0

    def gather(self, attempt: int, tell: Callable[[Message], None]) -> dict[str, Any]:
        """Wait for all nodes, agree on their order, and return this node's place with the ranks' fresh store."""
        from torch.distributed import PrefixStore

        self._attempt = attempt
        self._await_all(tell, time.monotonic() + self._seconds)
        arrival = self._rendezvous(f"{self._request['run_id']}.{attempt}")
        self._board = PrefixStore(f"phalanx/{self._request['run_id']}/{attempt}", self._store)
        self._said_failure = self._said_end = False
        nodes = self._exchange(arrival)
        order = order_nodes([node["node_rank"] for node in nodes], [node["host"] for node in nodes])
        node_rank = order.index(arrival)
        sizes = [nodes[index]["ranks"] for index in order]
        return {
            "node_rank": node_rank,
            "num_nodes": self._num_nodes,
            "first_rank": sum(sizes[:node_rank]),
            "world_size": sum(sizes),
            "master_addr": self._host,
            "master_port": self._share_rank_store(),
            # Node 0, and with it rank 0, may be another machine after a restart.
            "run_id": self._store.compare_set("phalanx/launch_id", "", self._request["launch_id"]).decode(),
        }

    def _await_all(self, tell: Callable[[Message], None], deadline: float) -> None:
        """Count who comes, and tell it: torch's rendezvous, which decides, says nothing while it waits."""
        from torch.distributed import DistNetworkError

        key = f"phalanx/{self._request['run_id']}/{self._attempt}/arrived"
        told, arrived = 0, 1
        try:
            arrived = self._store.add(key, 1)
            while arrived < self._num_nodes and time.monotonic() < deadline:
                if arrived != told:
                    tell({"arrived": arrived, "attempt": self._attempt})
                told = arrived
                time.sleep(_ARRIVAL_POLL_SECONDS)
                arrived = self._store.add(key, 0)
        except (DistNetworkError, RuntimeError) as error:
            raise self._host_is_lost() from error
        if arrived < self._num_nodes:
            raise self._not_all_came()

    def _rendezvous(self, run_id: str) -> int:
        """Return this node's place in the order of arrival, from torch's rendezvous."""
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

        # The ranks get a store of ours at an address known to be reachable: torch need not make one by host name.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        handler = DynamicRendezvousHandler.from_backend(
            run_id,
            self._store,
            C10dRendezvousBackend(self._store, run_id),
            min_nodes=self._num_nodes,
            max_nodes=self._num_nodes,
            timeout=RendezvousTimeout(join=timedelta(seconds=self._seconds)),
        )
        try:
            return int(handler.next_rendezvous().rank)
        except RendezvousConnectionError as error:
            raise self._host_is_lost() from error
        except RendezvousError as error:
            raise self._not_all_came() from error

    def _not_all_came(self) -> PhalanxError:
        return PhalanxError(
            f"not all {self._num_nodes} nodes came to {self._host}:{self._port} within {self._seconds:.0f} s.",
            hint="Start the same command on every node, each with its own node rank.",
        )

    def _host_is_lost(self) -> PhalanxError:
        return PhalanxError(
            f"lost the node that hosts the rendezvous at {self._host}:{self._port}.",
            hint="Look at that node's own output: its supervisor is gone.",
        )

    def _exchange(self, arrival: int) -> list[dict[str, Any]]:
        assert self._board is not None
        mine = {
            "node_rank": self._request["node_rank"],
            "host": socket.gethostname(),
            "ranks": self._request["ranks_per_node"],
        }
        self._board.set(f"node/{arrival}", json.dumps(mine))
        return [json.loads(self._board.get(f"node/{index}")) for index in range(self._num_nodes)]

    def _share_rank_store(self) -> int:
        """Whoever hosts the endpoint hosts the ranks' store too: its address is the one all nodes can reach."""
        assert self._board is not None
        if self._hosts_store:
            self._rank_store = self._open_store(0, is_master=True)
            self._board.set("rank-store", str(self._rank_store.port))
        return int(self._board.get("rank-store"))

    def publish_failure(self, failure: dict[str, Any]) -> None:
        """Tell the other nodes, unless one of them was first."""
        if self._board is not None:
            self._said_failure = True
            self._board.compare_set(_FAILURE, "", json.dumps(failure))

    def publish_end(self) -> None:
        """Say that this node's ranks have all ended well."""
        if self._board is not None:
            self._board.add(_ENDS, 1)
            self._said_end = True

    def news(self) -> list[Message]:
        """Return what the supervisor does not know yet: another node's failure, or that all have ended."""
        from torch.distributed import DistNetworkError

        if self._board is None:
            return []
        try:
            return self._read_news()
        except (DistNetworkError, RuntimeError) as error:
            self._board = None
            raise self._host_is_lost() from error

    def _read_news(self) -> list[Message]:
        assert self._board is not None
        if not self._said_failure and self._board.check([_FAILURE]):
            self._said_failure = True
            failure = json.loads(self._board.get(_FAILURE))
            return [{"remote_failure": failure, "attempt": self._attempt}]
        if self._said_end and self._board.add(_ENDS, 0) >= self._num_nodes:
            self._said_end = False
            return [{"all_ended": True, "attempt": self._attempt}]
        return []

    def leave(self) -> None:
        """Leave the store's host last, so that the others still read what they need."""
        from torch.distributed import DistNetworkError

        if self._board is None:
            return
        try:
            left = self._board.add(_LEFT, 1)
        except (DistNetworkError, RuntimeError):
            # Its host did not wait for us.
            return
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._hosts_store and left < self._num_nodes and time.monotonic() < deadline:
            time.sleep(0.05)
            left = self._board.add(_LEFT, 0)


def order_nodes(node_ranks: list[int | None], hosts: list[str]) -> list[int]:
    """Return the arrival numbers in node order: those that named a rank get it, the rest fill the gaps as they came."""
    places: dict[int, int] = {}
    for arrival, node_rank in enumerate(node_ranks):
        if node_rank is None:
            continue
        if node_rank in places:
            pair = f"'{hosts[places[node_rank]]}' and '{hosts[arrival]}'"
            raise UsageError(
                f"two nodes say they are node {node_rank}: {pair}.",
                hint=f"Give each node its own number from 0 to {len(node_ranks) - 1}.",
            )
        places[node_rank] = arrival
    unnamed = iter(arrival for arrival, node_rank in enumerate(node_ranks) if node_rank is None)
    return [places[place] if place in places else next(unnamed) for place in range(len(node_ranks))]
