"""Rendezvous of several machines: they exchange messages and notice which of them are lost.

A fixed number of machines is the case in which all must be there. Where the number may change (`min_ranks` is given),
machines may come late or be lost: one launcher, at first that of the machine with the store, decides for all
(`roles.Leading`), and when its machine is lost the first of the others takes over with its standby store.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx.errors import PhalanxError
from phalanx.host.addresses import own_address
from phalanx.host.messages import Message
from phalanx.host.signed_store import VARIABLE, sign_store
from phalanx.launch.gathering import DECIDED, NODES, Entry, Gathering, agree_on_round, check_same
from phalanx.launch.mailbox import ALL, Mail, Mailbox, listens, may_continue
from phalanx.launch.spec import split_endpoint
from phalanx.observe.format import ranks_text

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

LEADER = "leader"
"""The address of a message to the machine that leads."""
_CONNECT_SECONDS = 60.0
_SUSPECT_SECONDS = 1.0
_LOST_SECONDS = 2.0
"""A machine of a fixed number without a heartbeat for this long is named when ranks elsewhere fail."""
_POLL_SECONDS = 0.05
_SEND_SECONDS = 2.0
_LEAVE_SECONDS = 3.0


class NodeGroup:
    """This node among the others, over the store of the one that leads."""

    def __init__(self, request: Message) -> None:
        self._request = request
        self._may_change = "min_ranks" in request
        self._seconds: float = request["seconds"]
        self._silence: float = request.get("silence_seconds", _CONNECT_SECONDS)
        self.wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when there is news."""
        self._host, self._port = split_endpoint(request["endpoint"])
        self._store, self._leads = connect(request)
        self._attempt_store: Store | None = None
        self._rank_store: TCPStore | None = None
        self._mailbox: Mailbox | None = None
        self._attempt, self._round = 0, -1
        self._own, self._leader, self._run_id = "", "", ""
        self._nodes: dict[str, Entry] = {}
        """The machines of the run in their order; of a fixed number the leader alone needs them."""
        self._ended: set[str] = set()
        self._finished: set[str] = set()
        self._silent: list[str] = []
        self._knows_failure = False
        node_rank, ranks = request["node_rank"], request["ranks_per_node"]
        self._entry: Entry = {"node_rank": node_rank, "host": socket.gethostname(), "ranks": ranks}
        if self._may_change:
            self._address = own_address(self._host)
            self._standby = open_store(self._address, 0, self._seconds, is_master=True)
            self._entry["standby"] = [self._address, self._standby.port]

    def _sign(self, prefix: str) -> Store:
        from torch.distributed import PrefixStore

        return sign_store(PrefixStore(prefix, self._store), {VARIABLE: self._request.get("secret") or ""})

    # --- gathering ----------------------------------------------------------------------------------------------

    def gather(self, attempt: int, send: Callable[[Message], None]) -> dict[str, Any]:
        """Wait for the machines, or be taken in by those that train; return the fields of this one's `NodeInfo`."""
        from torch.distributed import DistNetworkError

        self._attempt = attempt
        if self._mailbox is not None:  # the others wait for the failure that ended the attempt before
            self._mailbox.close(_SEND_SECONDS)
            self._mailbox = None
        self._ended, self._finished, self._silent = set(), set(), []
        self._knows_failure = False
        try:
            check_same(self._sign("phalanx"), self._request.get("identity") or {})
            return self._gather(send)
        except (DistNetworkError, RuntimeError) as error:
            self._attempt_store = None
            raise self._leader_is_lost() from error

    def _gather(self, send: Callable[[Message], None]) -> dict[str, Any]:
        def report(present: int) -> None:
            send({"arrived": present, "attempt": self._attempt})

        self._round = agree_on_round(self._sign("phalanx"), max(self._attempt, self._round + 1))
        self._attempt_store = self._sign(f"phalanx/{self._round}")
        gathering = Gathering(self._attempt_store, self._request, self._entry, f"{self._host}:{self._port}")
        self._own = gathering.own
        place = self._lead(gathering, report) if self._leads else gathering.wait(report)
        if place is None and not self._may_change:
            raise gathering.without_this_one()
        if place is None:
            return self._join_late(json.loads(self._attempt_store.get(DECIDED)))
        self._run_id, self._leader = place["run_id"], place["leader"]
        if not self._leads:
            self._nodes = json.loads(self._attempt_store.get(NODES)) if self._may_change else {}
        self._open_mailbox(place["num_nodes"])
        machines = [[node, entry["host"], entry["ranks"]] for node, entry in self._nodes.items() if self._may_change]
        return {**place, "master_addr": self._host, "own": self._own, "machines": machines}

    def _lead(self, gathering: Gathering, report: Callable[[int], None]) -> Message:
        # The ranks' store is on the endpoint's host, which all machines can reach.
        self._rank_store = open_store(self._host, 0, self._seconds, is_master=True)
        # Another machine may lead after a restart: the run keeps its name.
        facts = {"master_port": self._rank_store.port, "run_id": self._run_id or self._request["launch_id"]}
        expected = len(self._nodes) or self._request["num_nodes"]  # after a restart: those that were there
        try:
            return gathering.lead(expected, report, facts)
        finally:
            self._nodes = gathering.entries

    def _join_late(self, run: Message) -> dict[str, Any]:
        """Ask the machine that leads to take this one in."""
        self._leader, self._run_id = run["leader"], run["run_id"]
        mailbox = self._open_mailbox(run["num_nodes"], joins_late=True)
        mailbox.post(self._leader, {"arrival": self._own, "node": self._entry})
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline and not mailbox.failed:
            for mail in mailbox.receive():
                self._read(mail)
                if "accept" in mail:
                    return {**mail["accept"], "own": self._own, "leader": self._leader, "run_id": self._run_id}
            time.sleep(_POLL_SECONDS)
        raise PhalanxError(
            f"the run at {self._host}:{self._port} did not take this machine in within {self._seconds:.0f} s.",
            hint="It has as many ranks as it may have (--num-workers 2:8 sets the most), or it has ended.",
        )

    # --- messages -----------------------------------------------------------------------------------------------

    def _open_mailbox(self, num_nodes: int, *, joins_late: bool = False) -> Mailbox:
        assert self._attempt_store is not None, "opened before"
        parts = (self._attempt_store, self._own, num_nodes, partial(os.eventfd_write, self.wakeup, 1))
        self._mailbox = Mailbox(*parts, joins_late=joins_late)
        self._watch()
        self._mailbox.start()
        return self._mailbox

    def _watch(self) -> None:
        if self._mailbox is not None and self._leads:
            self._mailbox.others.watch(node for node in self._nodes if node != self._own)

    def post(self, to: str, message: Message) -> None:
        """Send a message to the launcher of a machine, to `LEADER`, or to `ALL`."""
        if self._mailbox is not None:
            self._mailbox.post(self._leader if to == LEADER else to, message)

    def news(self) -> list[Message]:
        """Return messages for the launcher: mail, lost machines, or that another machine leads from now on."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakeup)
        if self._mailbox is None:
            return []
        found = [message for mail in self._mailbox.receive() for message in self._read(mail)]
        found += self._find_lost(self._mailbox) if self._leads else self._find_lost_leader(self._mailbox)
        return [{**message, "attempt": self._attempt} for message in found]

    def _read(self, mail: Mail) -> list[Message]:
        """Take what a message says about the machines; return what the launcher has to know, its kind first."""
        if "nodes" in mail:
            if not self._leads:
                nodes = self._nodes | mail["nodes"]
                self._nodes = {node: entry for node, entry in nodes.items() if entry is not None}
            return []
        if "node_finished" in mail:
            self._finished.add(mail["sender"])
            if len(self._finished) == len(self._nodes):
                self.post(ALL, {"all_ended": True})
            return []
        if "remote_failure" in mail:  # the first of them is that of all machines
            is_news = not self._knows_failure and mail["sender"] != self._own
            self._knows_failure = True
            return [{"remote_failure": mail["remote_failure"]}] if is_news else []
        if "question" in mail:
            return [{**mail, "own": mail["sender"] == self._own}]
        for kind in ("answer", "all_ended"):
            if kind in mail:
                return [{kind: mail[kind]}]
        if "arrival" in mail:
            self._take_in(mail["arrival"], mail["node"])
        return [{"mail": mail}]

    def _take_in(self, node: str, entry: Entry) -> None:
        """Let all machines know one that has come late: each may have to take over."""
        self._nodes[node] = entry
        self._watch()
        self.post(node, {"nodes": dict(self._nodes)})
        self.post(ALL, {"nodes": {node: entry}})

    # --- lost machines ------------------------------------------------------------------------------------------

    def _find_lost(self, mailbox: Mailbox) -> list[Message]:
        """Return the machines that are silent; those of a fixed number may still answer."""
        if not self._may_change:
            names = [describe(node, self._nodes) for node in mailbox.others.silent(_LOST_SECONDS)]
            changed, self._silent = names != self._silent, names
            return [{"silent_nodes": names}] if changed else []
        suspects, silent = mailbox.others.silent(_SUSPECT_SECONDS), mailbox.others.silent(self._silence)
        lost = [node for node in suspects if self._listens(node) is False or node in silent]
        if not lost:
            return []
        self._check_quorum([node for node in self._nodes if node not in lost])
        hosts = {node: self._nodes.pop(node)["host"] for node in lost}
        self._watch()
        self.post(ALL, {"nodes": dict.fromkeys(lost)})
        return [{"lost_nodes": hosts}]

    def _listens(self, node: str) -> bool | None:
        """Whether the launcher of a machine runs; False if it has certainly ended, because its machine refuses."""
        found = listens(self._nodes[node]["standby"], _SUSPECT_SECONDS)
        self._ended |= {node} if found is False else set()
        return found

    def _check_quorum(self, alive: list[str]) -> None:
        if not may_continue(list(self._nodes), alive, list(self._ended), self._leader):
            hosts = ", ".join(entry["host"] for node, entry in self._nodes.items() if node not in alive)
            raise PhalanxError(
                f"lost contact with {hosts}, which may continue the run; this machine stops to avoid a split.",
                hint="Half of the machines, or more, must see each other, with the one that decides among them.",
            )

    def _find_lost_leader(self, mailbox: Mailbox) -> list[Message]:
        if not self._may_change:
            if mailbox.failed or mailbox.unreachable(self._silence):
                raise self._leader_is_lost()
            return []
        if not mailbox.failed and not mailbox.unreachable(_SUSPECT_SECONDS):
            return []
        # A process that is killed closes its connections one after the other: its machine may refuse a moment later.
        if self._listens(self._leader) is not False and not mailbox.unreachable(self._silence):
            return []
        mailbox.close()  # what was not sent is lost with the machine
        return [self._fail_over()]

    def _leader_is_lost(self) -> PhalanxError:
        return PhalanxError(
            f"lost the machine that hosts the rendezvous at {self._host}:{self._port}.",
            hint="Look at that machine's own output: its launcher has ended.",
        )

    def _fail_over(self) -> Message:
        """Move to the first machine that answers, in the order of arrival; it decides from now on."""
        lost = self._leader
        others = (node for node in sorted(self._nodes) if node != lost)
        candidates = [node for node in others if node == self._own or self._listens(node)]
        self._check_quorum(candidates)
        self._leader = candidates[0]
        news: Message = {"leader": self._leader, "lost": {lost: self._nodes.pop(lost)["host"]}}
        self._leads = self._leader == self._own
        self._host, self._port = self._nodes[self._leader]["standby"]
        if self._leads:
            self._store = self._standby
            self._rank_store = open_store(self._address, 0, self._seconds, is_master=True)
            news |= {"address": [self._address, self._rank_store.port], "others": candidates[1:]}
        else:
            self._store = open_store(self._host, self._port, self._silence, is_master=False)
        self._attempt_store = self._sign("failover")
        self._open_mailbox(len(self._nodes))
        return news

    def leave(self) -> None:
        """Send what is left, and leave; the leader leaves last, so that the others can still read."""
        from torch.distributed import DistNetworkError

        if self._mailbox is not None:
            self._mailbox.close(_SEND_SECONDS)
        lost = self._mailbox is not None and (self._mailbox.failed or self._mailbox.unreachable(_SUSPECT_SECONDS))
        if self._attempt_store is None or lost:
            return
        with contextlib.suppress(DistNetworkError, RuntimeError):  # the leader has already ended
            self._attempt_store.set(f"left/{self._own}", "")
            deadline = time.monotonic() + _LEAVE_SECONDS
            others = [f"left/{node}" for node in self._nodes]
            while self._leads and not self._attempt_store.check(others) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)


def describe(node: str, nodes: dict[str, Entry]) -> str:
    """Return a machine in words: "1 (host, ranks 8-15)"."""
    node_rank = list(nodes).index(node)
    first = sum(entry["ranks"] for entry in list(nodes.values())[:node_rank])
    own = nodes[node]
    return f"{node_rank} ({own['host']}, {ranks_text(range(first, first + own['ranks']))})"


def open_store(host: str, port: int, seconds: float, *, is_master: bool) -> TCPStore:
    """Host a store, at any free port where `port` is 0, or connect to one."""
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=min(seconds, _CONNECT_SECONDS))
    return TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)


def connect(request: Message) -> tuple[TCPStore, bool]:
    """Host the store at the endpoint if this node has to, else connect to it; return whether it hosts it, too."""
    from torch.distributed import DistNetworkError

    from phalanx.torch_compat import is_own_host

    host, port = split_endpoint(request["endpoint"])
    node_rank, seconds = request["node_rank"], request["seconds"]
    # Node 0 hosts when the nodes are numbered (a host's name may map to loopback); else torch's rule decides.
    if is_own_host(host) if node_rank is None else node_rank == 0:
        # Fails where another launcher on this machine hosts it already: then connect to that.
        with contextlib.suppress(DistNetworkError, RuntimeError, ValueError):
            return open_store(host, port, seconds, is_master=True), True
    began = time.monotonic()
    try:
        return open_store(host, port, seconds, is_master=False), False
    except (DistNetworkError, RuntimeError, ValueError, TimeoutError) as error:
        waited = time.monotonic() - began
        raise PhalanxError(
            f"no answer from the rendezvous endpoint {host}:{port} (waited {waited:.0f} s).",
            hint="Start node 0 there, and check that this machine can reach that host and port.",
        ) from error
