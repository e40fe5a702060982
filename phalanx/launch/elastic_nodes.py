"""Several machines whose number may change: they gather, exchange messages, come later, and outlive each other.

One launcher, at first that of the machine with the store, decides for all (`roles.Leading`). When its machine is lost,
the first of the others takes over with its standby store. A part of the machines that may be cut off from the rest goes
on only where the rest cannot (`board.may_continue`).
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from phalanx.errors import PhalanxError
from phalanx.host.addresses import own_address
from phalanx.host.messages import Message
from phalanx.launch.board import Board, answers, is_refused, may_continue
from phalanx.launch.nodes import NodeGroup

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

_SUSPECT_SECONDS = 1.0
_POLL_SECONDS = 0.05
_FLUSH_SECONDS = 2.0
_DECIDED = "decided"


class ElasticNodes(NodeGroup):
    """This machine among others that may be lost or come later."""

    def __init__(self, request: Message) -> None:
        super().__init__(request)
        self._least: int = request["min_ranks"]
        self._silence: float = request["silence_seconds"]
        self._address = own_address(self._host)
        self._standby = self._open_at(self._address)
        self._own, self._leader = "", ""
        self._expected = self._num_nodes
        self._nodes: dict[str, dict[str, Any]] = {}
        self._mailbox: Board | None = None
        self._ended: list[str] = []

    def _open_at(self, address: str) -> TCPStore:
        from torch.distributed import TCPStore

        seconds = timedelta(seconds=self._silence)
        return TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=seconds)

    @property
    def _leads(self) -> bool:
        return self._own == self._leader

    # --- gathering ----------------------------------------------------------------------------------------------

    def gather(self, attempt: int, send: Callable[[Message], None]) -> dict[str, Any]:
        """Wait for the machines, or be taken in by those that train; return the fields of this one's `NodeInfo`."""
        from torch.distributed import PrefixStore

        self._close_mailbox()
        self._check_same()
        self._expected = len(self._nodes) or self._num_nodes  # after a restart: those that were there
        base = self._sign(PrefixStore("phalanx", self._store))
        attempt = max(attempt, base.add("attempt", 0))
        if base.add("attempt", 0) < attempt:
            base.add("attempt", attempt - base.add("attempt", 0))
        self._attempt = attempt
        board = self._board = self._sign(PrefixStore(f"phalanx/{attempt}", self._store))
        self._knows_failure = self._published_end = False
        number = board.add("arrivals", 1)
        self._own = f"{number:05d}"
        mine = {
            "node_rank": self._request["node_rank"],
            "host": socket.gethostname(),
            "ranks": self._request["ranks_per_node"],
            "standby": [self._address, self._standby.port],
        }
        board.set(f"arrival/{number}", json.dumps(mine))
        if board.check([_DECIDED]):
            return self._join_late(board, mine, send)
        return self._gather_first(board, send)

    def _gather_first(self, board: Store, send: Callable[[Message], None]) -> dict[str, Any]:
        deadline = time.monotonic() + self._seconds
        reported = 0
        while not board.check([_DECIDED]):
            count = board.add("arrivals", 0)
            if count != reported:
                reported = count
                send({"arrived": count, "attempt": self._attempt})
            late = time.monotonic() > deadline
            if self._hosts_store and (count >= self._expected or late):
                self._decide(board, count)
            elif late and time.monotonic() > deadline + self._silence:
                raise self._too_few(board, count)
            time.sleep(_POLL_SECONDS)
        decided = json.loads(board.get(_DECIDED))
        if self._own not in decided["order"]:
            return self._join_late(board, json.loads(board.get(f"arrival/{int(self._own)}")), send)
        self._nodes, self._leader = decided["nodes"], decided["leader"]
        self._open_mailbox(board)
        return self._node_info(decided)

    def _decide(self, board: Store, count: int) -> None:
        """Fix the machines that begin: all that came, where they have enough ranks."""
        arrivals = {f"{n:05d}": json.loads(board.get(f"arrival/{n}")) for n in range(1, count + 1)}
        if sum(node["ranks"] for node in arrivals.values()) < self._least:
            raise self._too_few(board, count)
        # Machines with a number come first, in its order; the others in the order of their arrival.
        order = sorted(
            arrivals, key=lambda name: (arrivals[name]["node_rank"] is None, arrivals[name]["node_rank"], name)
        )
        self._rank_store = self._open_store(0, is_master=True)
        launch_id = self._request["launch_id"]
        board.set(
            _DECIDED,
            json.dumps(
                {
                    "order": order,
                    "nodes": arrivals,
                    "leader": self._own,
                    "port": self._rank_store.port,
                    "run_id": launch_id,
                }
            ),
        )

    def _too_few(self, board: Store, count: int) -> PhalanxError:
        came = [json.loads(board.get(f"arrival/{n}")) for n in range(1, count + 1)]
        who = ", ".join(f"{node['host']} ({node['ranks']} ranks)" for node in came)
        return PhalanxError(
            f"too few ranks joined at {self._host}:{self._port} within {self._seconds:.0f} s: {who} came, and "
            f"{self._least} ranks are needed.",
            hint="Start the same command on every machine, or lower the minimum: --num-workers 2:8.",
        )

    def _node_info(self, decided: dict[str, Any]) -> dict[str, Any]:
        order = decided["order"]
        sizes = [decided["nodes"][node]["ranks"] for node in order]
        place = order.index(self._own)
        return {
            "node_rank": place,
            "num_nodes": len(order),
            "first_rank": sum(sizes[:place]),
            "world_size": sum(sizes),
            "master_addr": self._host,
            "master_port": decided["port"],
            "run_id": decided["run_id"],
            "own": self._own,
            "leader": self._leader,
            "machines": [[node, decided["nodes"][node]["host"], decided["nodes"][node]["ranks"]] for node in order],
        }

    def _join_late(self, board: Store, mine: dict[str, Any], send: Callable[[Message], None]) -> dict[str, Any]:
        """Ask the machine that decides to take this one in."""
        decided = json.loads(board.get(_DECIDED))
        self._leader = decided["leader"]
        self._nodes = {**decided["nodes"], self._own: mine}
        self._open_mailbox(board)
        assert self._mailbox is not None, "just opened"
        self._mailbox.post(self._leader, {"arrival": self._own, "node": mine})
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline and not self._mailbox.failed:
            for mail in self._mailbox.receive():
                if "accept" in mail:
                    self._nodes = mail["nodes"]
                    return {**mail["accept"], "own": self._own, "leader": self._leader, "run_id": decided["run_id"]}
            time.sleep(_POLL_SECONDS)
        raise PhalanxError(
            f"the run at {self._host}:{self._port} did not take this machine in within {self._seconds:.0f} s.",
            hint="It has as many ranks as it may have (--num-workers 2:8 sets the most), or it has ended.",
        )

    # --- messages -----------------------------------------------------------------------------------------------

    def _open_mailbox(self, board: Store) -> None:
        from torch.distributed import PrefixStore

        self._mailbox = Board(self._sign(PrefixStore("board", board)), self._own)
        self._watch()

    def _watch(self) -> None:
        if self._mailbox is not None and self._leads:
            self._mailbox.watch([node for node in self._nodes if node != self._own])

    def _close_mailbox(self) -> None:
        """Close it when its messages were sent: the others wait for the failure that ended this attempt."""
        if self._mailbox is not None:
            self._mailbox.flush(_FLUSH_SECONDS)
            self._mailbox.close()

    def post(self, to: str, message: Message) -> None:
        """Send a message to the launcher of another machine."""
        if self._mailbox is None:
            return
        if "accept" in message:
            message = {**message, "nodes": self._nodes}
        self._mailbox.post(to, message)

    def publish_failure(self, failure: dict[str, Any]) -> None:
        """Send this machine's failure to all others."""
        for node in self._nodes:
            if node != self._own:
                self.post(node, {"remote_failure": failure})

    def publish_end(self) -> None:
        """Do nothing: the launcher that decides counts the ends."""

    def news(self) -> list[Message]:
        """Return messages for the launcher: mail, lost machines, or that another machine decides from now on."""
        if self._mailbox is None:
            return []
        found: list[Message] = [self._noted(mail) for mail in self._mailbox.receive()]
        return found + (self._lost_nodes() if self._leads else self._lost_leader())

    def _noted(self, mail: dict[str, Any]) -> Message:
        if "arrival" in mail:
            self._nodes[mail["arrival"]] = mail["node"]
            self._watch()
        if "remote_failure" in mail:
            return {"remote_failure": mail["remote_failure"], "attempt": self._attempt}
        return {"mail": mail, "attempt": self._attempt}

    def _lost_nodes(self) -> list[Message]:
        assert self._mailbox is not None, "asked where there is one"
        lost = []
        for node in self._mailbox.silent(_SUSPECT_SECONDS):
            ended = is_refused(self._standby_of(node), _SUSPECT_SECONDS)
            if ended or node in self._mailbox.silent(self._silence):
                lost.append(node)
                self._ended += [node] if ended else []
        if not lost:
            return []
        alive = [node for node in self._nodes if node not in lost]
        self._check_part(alive)
        hosts = {node: self._nodes.pop(node)["host"] for node in lost}
        self._watch()
        return [{"lost_nodes": hosts, "attempt": self._attempt}]

    def _standby_of(self, node: str) -> tuple[str, int]:
        address, port = self._nodes[node]["standby"]
        return address, port

    def _check_part(self, alive: list[str]) -> None:
        if not may_continue(list(self._nodes), alive, self._ended, self._leader):
            hosts = ", ".join(node["host"] for name, node in self._nodes.items() if name not in alive)
            raise PhalanxError(
                f"this machine no longer sees {hosts}, and the run may go on there: it ends here.",
                hint="Half of the machines, or more, must see each other, with the one that decides among them.",
            )

    def _lost_leader(self) -> list[Message]:
        assert self._mailbox is not None, "asked where there is one"
        if not self._mailbox.unreachable(_SUSPECT_SECONDS):
            return []
        ended = is_refused(self._standby_of(self._leader), _SUSPECT_SECONDS)
        if not ended and not self._mailbox.unreachable(self._silence):
            return []
        return self._fail_over(ended)

    def _fail_over(self, ended: bool) -> list[Message]:
        """Move to the first machine that answers, in the order of arrival; it decides from now on."""
        from torch.distributed import TCPStore

        lost = self._leader
        host = self._nodes[lost]["host"]
        if ended:
            self._ended.append(lost)
        assert self._mailbox is not None, "asked where there is one"
        self._mailbox.close()  # what was not sent is lost with the machine
        seconds = timedelta(seconds=self._silence)
        rest = [node for node in sorted(self._nodes) if node != lost]
        candidates = [node for node in rest if node == self._own or answers(self._standby_of(node), _SUSPECT_SECONDS)]
        self._check_part(candidates)
        del self._nodes[lost]
        self._leader = candidates[0]
        if self._leads:
            store: Any = self._standby
            self._rank_store = self._open_at(self._address)
        else:
            store = TCPStore(*self._standby_of(self._leader), is_master=False, wait_for_workers=False, timeout=seconds)
        self._store = store
        self._hosts_store = self._leads
        self._host, self._port = self._standby_of(self._leader)
        self._open_mailbox(store)
        news: Message = {"leader": self._leader, "lost": {lost: host}, "attempt": self._attempt}
        if self._leads and self._rank_store is not None:
            news |= {
                "address": [self._address, self._rank_store.port],
                "others": [node for node in candidates if node != self._own],
            }
        return [news]

    def leave(self) -> None:
        """Send what is left, and leave."""
        if self._mailbox is not None and self._leads:
            self._mailbox.flush(_FLUSH_SECONDS)
            time.sleep(2 * _POLL_SECONDS)  # the others read their last message
        self._close_mailbox()
