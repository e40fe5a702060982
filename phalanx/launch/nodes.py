"""Rendezvous of several nodes: they exchange messages and notice which of them are lost.

A fixed number of nodes is the case in which all must be there. Where the number may change (`min_ranks` is given),
nodes may come late or be lost: one launcher, at first that of the node with the store, decides for all
(`phalanx.recovery`), and when its node is lost the first of the others takes over with its standby store, if
enough of them report to it. It tells them then, and leaves its address at the endpoint, should a launcher be started
there again: that one then comes late, instead of beginning a second run. What a node makes of silence, refusals and
the words of others is in `membership`; this module hears and does.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from phalanx.errors import PhalanxError
from phalanx.host.addresses import own_address
from phalanx.host.job_secret import VARIABLE
from phalanx.host.messages import Message
from phalanx.host.signed_store import sign_store
from phalanx.launch.gathering import (
    DECIDED,
    MOVED,
    NODES,
    Gathering,
    MovedError,
    agree_on_round,
    check_same,
    current_round,
    describe_run,
    reserve_names,
)
from phalanx.launch.mailbox import Mail, Mailbox
from phalanx.launch.membership import (
    ALL,
    LEADER,
    SUSPECT_SECONDS,
    Accuse,
    Agreement,
    Ask,
    Entry,
    Heartbeats,
    Lost,
    Membership,
    Move,
    Stop,
    Watch,
    beat_seconds,
)
from phalanx.launch.probes import NeighbourWatch, Probes, ask_all
from phalanx.launch.spec import split_endpoint
from phalanx.observe.format import ranks_text
from phalanx.torch_compat import is_own_host

_CONNECT_SECONDS = 60.0
_LOST_SECONDS = 2.0
"""A node of a fixed number without a heartbeat for this long is named when ranks elsewhere fail."""
_POLL_SECONDS = 0.05
_JOIN_SECONDS = 0.25
_SEND_SECONDS = 2.0
_LEAVE_SECONDS = 3.0
_SIGNPOST_SECONDS = 0.4


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
        self._nodes: Mapping[str, Entry] = {}
        """The nodes of the run in their order; of a fixed number the leader alone needs them."""
        self._members: Membership | None = None
        """What this node knows of the others, if their number may change."""
        self._beats = Heartbeats()
        """Those of a fixed number of nodes."""
        self._finished: set[str] = set()
        self._silent: list[str] = []
        self._knows_failure = False
        self._probes = Probes(SUSPECT_SECONDS)
        self._neighbours = NeighbourWatch(self._open_neighbour, self._notify)
        self._endpoint_store = self._store
        self._signpost: Signpost | None = None
        self._unread: list[Mail] = []
        self._last_name = ""
        """The name of the node that came last, also if it was lost: a later one gets another."""
        node_rank, ranks = request["node_rank"], request["ranks_per_node"]
        self._entry: Entry = {"node_rank": node_rank, "host": socket.gethostname(), "ranks": ranks}
        if self._may_change:
            self._address = own_address(self._host)
            self._standby = open_store(self._address, 0, self._seconds, is_master=True)
            self._entry["standby"] = [self._address, self._standby.port]

    def _sign(self, prefix: str) -> Store:
        return self._signed(self._store, prefix)

    def _signed(self, store: Store, prefix: str) -> Store:
        return sign_store(PrefixStore(prefix, store), {VARIABLE: self._request.get("secret") or ""})

    def _notify(self) -> None:
        os.eventfd_write(self.wakeup, 1)

    def _open_neighbour(self, address: tuple[str, int]) -> Store:
        return self._signed(open_store(*address, SUSPECT_SECONDS, is_master=False), "watch")

    # --- gathering ----------------------------------------------------------------------------------------------

    def gather(self, attempt: int, send: Callable[[Message], None]) -> dict[str, Any]:
        """Wait for the nodes, or be taken in by those that train; return the fields of this one's `NodeInfo`."""
        self._attempt = attempt
        if self._mailbox is not None:  # the others wait for the failure that ended the attempt before
            self._mailbox.close(_SEND_SECONDS)
            self._mailbox = None
        self._finished, self._silent = set(), []
        self._knows_failure, self._unread = False, []
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
        endpoint = f"{self._host}:{self._port}"
        before = self._members.quorum() if self._members is not None and self._leads else None
        parts = (self._attempt_store, self._request, self._entry, endpoint)
        gathering = Gathering(*parts, before=before, look=self._look_for_signpost)
        self._own = gathering.own
        try:
            place = self._lead(gathering, report) if self._leads else gathering.wait(report)
        except MovedError as moved:  # its store stays open: it leads others there, too
            self._leads, self._round, (self._host, self._port) = False, -1, moved.address
            self._store = open_store(self._host, self._port, self._silence, is_master=False)
            return self._gather(send)
        if place is None and not self._may_change:
            raise gathering.roster.without_this_one()
        if place is None:
            return self._join_late(json.loads(self._attempt_store.get(DECIDED)), send)
        self._run_id, self._leader = place["run_id"], place["leader"]
        list_at = place.pop("list_at", None)
        if self._may_change:
            self._nodes = gathering.taking_part or self._read_nodes(list_at)
        self._begin()
        self._open_mailbox().start()
        nodes = [
            [node, entry["host"], entry["ranks"], entry["standby"]]
            for node, entry in self._nodes.items()
            if self._may_change
        ]
        return {**place, "master_addr": self._host, "own": self._own, "nodes": nodes, "round": self._round}

    def _read_nodes(self, list_at: tuple[str, int] | None) -> dict[str, Entry]:
        """Read the list of all nodes from one that has it, and let others read it from this one."""
        key = f"{NODES}/{self._round}"
        content = b""
        if list_at is not None:
            with contextlib.suppress(DistNetworkError, DistStoreError):  # it was lost since: the leader has it, too
                near = self._signed(open_store(*list_at, self._silence, is_master=False), "phalanx")
                near.wait([key], timedelta(seconds=self._silence))
                content = near.get(key)
        assert self._attempt_store is not None, "opened before"
        content = content or self._attempt_store.get(NODES)
        self._signed(self._standby, "phalanx").set(key, content.decode())
        nodes: dict[str, Entry] = json.loads(content)
        return nodes

    def _look_for_signpost(self) -> None:
        """Raise MovedError if the run that began at this endpoint goes on elsewhere."""
        if self._may_change and self._store is self._endpoint_store:
            root = self._sign("phalanx")
            if root.check([MOVED]):
                host, port = json.loads(root.get(MOVED))
                raise MovedError((host, port))

    def _lead(self, gathering: Gathering, report: Callable[[int], None]) -> Message:
        # The ranks' store is on the endpoint's host, which all nodes can reach.
        self._rank_store = open_store(self._host, 0, self._seconds, is_master=True)
        # Another node may lead after a restart: the run keeps its name.
        facts = {"master_port": self._rank_store.port, "run_id": self._run_id or self._request["launch_id"]}
        expected = len(self._nodes) or self._request["num_nodes"]  # after a restart: those that were there
        try:
            return gathering.lead(expected, report, facts)
        finally:
            self._nodes = gathering.taking_part or gathering.roster.entries

    def _join_late(self, run: Message, send: Callable[[Message], None]) -> dict[str, Any]:
        """Ask the node that leads to take this one in."""
        self._leader, self._run_id = run["leader"], run["run_id"]
        self._members = None
        mailbox = self._open_mailbox()
        mailbox.start()
        mailbox.post(self._leader, {"arrival": self._own, "node": self._entry})
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline and not mailbox.failed:
            mails = mailbox.receive()
            for number, mail in enumerate(mails):
                if "accept" in mail:
                    self._unread += mails[number + 1 :]
                    place = {**mail["accept"], **mail["places"][self._own]}
                    self._nodes = {
                        node: {"host": host, "ranks": ranks, "standby": standby}
                        for node, host, ranks, standby in place["nodes"]
                    }
                    self._begin(place.get("term", 0), place.pop("gone", ()), place.pop("new", ()))
                    known = {"own": self._own, "leader": self._leader, "run_id": self._run_id, "round": self._round}
                    return {**place, **known}
                self._unread.append(mail)
            if current_round(self._sign("phalanx")) > self._round:  # all start again: with this one
                mailbox.close()
                return self._gather(send)
            time.sleep(_JOIN_SECONDS)
        raise PhalanxError(
            f"the run at {self._host}:{self._port} did not take this node in within {self._seconds:.0f} s.",
            hint="It has as many ranks as it may have (--num-workers 2:8 sets the most), or it has ended.",
        )

    def _begin(self, term: int = 0, gone: Iterable[str] = (), new: Iterable[str] = ()) -> None:
        """Take part with the nodes that are known."""
        now = time.monotonic()
        if self._may_change:
            term = max(term, self._members.term if self._members is not None else 0)
            self._members = Membership(self._own, self._silence, now)
            self._members.begin(self._leader, self._nodes, now, term=term, gone=gone, new=new)
        elif self._leads:
            self._beats = Heartbeats()
            self._beats.watch((node for node in self._nodes if node != self._own), now)

    # --- messages -----------------------------------------------------------------------------------------------

    def _open_mailbox(self) -> Mailbox:
        assert self._attempt_store is not None, "opened before"
        opened = iter([self._attempt_store])

        def connect() -> Store:
            """Return this node's connection to the leader's store, and then another one."""
            store = next(opened, None)
            if store is None:
                more = open_store(self._host, self._port, self._silence, is_master=False)
                store = self._signed(more, f"phalanx/{self._round}")
            return store

        period = partial(beat_seconds, len(self._nodes) or self._request["num_nodes"])
        self._mailbox = Mailbox(connect, self._own, self._leader, period=period, notify=self._notify)
        self._serve()
        return self._mailbox

    def _serve(self) -> None:
        self._last_name = max([self._last_name, *self._nodes])
        if self._mailbox is not None and self._leads:
            self._mailbox.serve(self._nodes)

    def post(self, to: str | Sequence[str], message: Message) -> None:
        """Send a message to the launcher of a node, to those of several, to `LEADER`, or to `ALL`."""
        if "accept" in message and self._members is not None:
            message["accept"] |= {"gone": list(self._members.gone), "new": list(self._members.new)}
        if self._mailbox is not None:
            self._mailbox.post(self._leader if to == LEADER else to, message)

    def news(self) -> list[Message]:
        """Return messages for the launcher: mail, lost nodes, or that another node leads from now on."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakeup)
        if self._mailbox is None:
            return []
        unread, self._unread = self._unread, []
        messages = [message for mail in (*unread, *self._mailbox.receive()) for message in self._read(mail)]
        if self._members is not None:
            messages += self._look_around(self._members, self._mailbox)
        elif not self._may_change:
            messages += self._look_at_fixed(self._mailbox)
        return [{**message, "attempt": self._attempt} for message in messages]

    def _read(self, mail: Mail) -> list[Message]:
        """Take what a message says about the nodes; return what the launcher has to know, its kind first."""
        if "kind" in mail:
            return [{"mail": mail}]
        if "accused" in mail and self._members is not None:
            self._members.on_accusation(mail["accused"], time.monotonic())
        if "knows" in mail and self._members is not None:
            self._members.on_known(mail["sender"], mail["knows"])
        if "agreed" in mail and self._members is not None and mail["sender"] == self._leader:
            self._members.agree(mail["agreed"])
        if "leads" in mail and self._members is not None and mail["sender"] == self._leader:
            self._members.confirm(mail["leads"])
        if "node_finished" in mail:
            self._finished.add(mail["sender"])
            if len(self._finished) == len(self._nodes):
                self.post(ALL, {"all_ended": True})
            return []
        if "remote_failure" in mail:  # the first of them is that of all nodes
            is_news = not self._knows_failure and mail["sender"] != self._own
            self._knows_failure = True
            return [{"remote_failure": mail["remote_failure"]}] if is_news else []
        if "question" in mail:
            return [{**mail, "is_ours": mail["sender"] == self._own}]
        for kind in ("answer", "all_ended"):
            if kind in mail:
                return [{kind: mail[kind]}]
        return [{"arrival": mail["arrival"], "entry": mail["node"]}] if "arrival" in mail else []

    def change(self, entries: dict[str, Entry | None], version: int) -> None:
        """Take part with these nodes, too, or without them (None), as the launcher says."""
        if self._members is not None:
            if self._members.change(entries, time.monotonic(), version):
                self.post(LEADER, {"knows": version})
            self._nodes = self._members.nodes
            self._serve()

    def lead(self, term: int) -> None:
        """Say that this node leads, as its launcher has decided: to all nodes, in its store, at the endpoint."""
        if self._members is not None:
            self._members.confirm(term)
            self.post(ALL, {"leads": term})
            self._describe_run()

    # --- lost nodes ------------------------------------------------------------------------------------------

    def _look_at_fixed(self, mailbox: Mailbox) -> list[Message]:
        """Name silent nodes of a fixed number, which may still answer; end with the one that leads."""
        now = time.monotonic()
        if not self._leads:
            if mailbox.failed or now - mailbox.contact > self._silence + 2 * beat_seconds(self._request["num_nodes"]):
                raise self._leader_is_lost()
            return []
        self._beats.take(mailbox.beats(), now)
        seconds = _LOST_SECONDS + 2 * beat_seconds(len(self._nodes))
        names = [describe(node, self._nodes) for node in self._beats.silent(seconds, now)]
        changed, self._silent = names != self._silent, names
        return [{"silent_nodes": names}] if changed else []

    def _look_around(self, members: Membership, mailbox: Mailbox) -> list[Message]:
        """Tell the nodes' state what was heard, and carry out what it says."""
        now = time.monotonic()
        members.on_beats(mailbox.beats(), now)
        members.on_contact(mailbox.contact)
        if mailbox.failed:
            members.on_store_ended()
        for node, heard in self._neighbours.heard().items():
            members.on_neighbour(node, heard)
        members.on_answers(self._probes.answers(), now)
        news: list[Message] = []
        for action in members.check(now):
            if isinstance(action, Stop):
                raise PhalanxError(action.cause, hint=action.hint)
            if isinstance(action, Ask):
                self._probes.ask({node: self._nodes[node]["standby"] for node in action.nodes if node in self._nodes})
            elif isinstance(action, Watch):
                self._neighbours.watch({node: tuple(members.nodes[node]["standby"]) for node in action.nodes})
            elif isinstance(action, Accuse):
                self.post(LEADER, {"accused": dict(action.signs)})
            elif isinstance(action, Agreement):
                self.post(ALL, {"agreed": action.version})
                news.append({"agreed": action.version})
            elif isinstance(action, Lost):
                news.append({"lost_nodes": list(action.nodes), "ended": list(action.ended)})
            elif isinstance(action, Move):
                news.append(self._move(action, members, mailbox))
        if members.phase != "searching" and members.nodes is not self._nodes:
            self._nodes = members.nodes
            self._serve()
        return news

    def _leader_is_lost(self) -> PhalanxError:
        return PhalanxError(
            f"lost the node that hosts the rendezvous at {self._host}:{self._port}.",
            hint="Look at that node's own output: its launcher has ended.",
        )

    def _move(self, move: Move, members: Membership, mailbox: Mailbox) -> Message:
        """Move to the store of the node that leads from now on, which may be this one."""
        mailbox.close()  # what was not sent is lost with the node
        host = self._nodes[move.lost]["host"]
        news: Message = {"leader": move.leader, "lost": host, "term": move.term}
        news |= {"ended": list(move.ended), "gone": list(move.gone), "new": list(move.new)}
        self._nodes, self._leader, self._leads = members.nodes, move.leader, members.leads
        self._host, self._port = self._nodes[self._leader]["standby"]
        if self._leads:
            self._store = self._standby
            self._rank_store = open_store(self._address, 0, self._seconds, is_master=True)
            news |= {"address": [self._address, self._rank_store.port]}
            check_same(self._sign("phalanx"), self._request.get("identity") or {})
            agree_on_round(self._sign("phalanx"), self._round)
        else:
            try:
                self._store = open_store(self._host, self._port, self._silence, is_master=False)
            except (DistNetworkError, RuntimeError):  # it was lost since: it refuses, or will be silent
                mailbox.failed = True
                return news
        self._attempt_store = self._sign(f"phalanx/{self._round}")
        if self._leads:
            reserve_names(self._attempt_store, self._last_name)
        self._open_mailbox().start()
        if self._signpost is not None:
            self._signpost.stop()
        if members.leaves_signpost:
            self._signpost = Signpost(self._request, (self._host, self._port), self._signed)
            self._signpost.start()
        return news

    def _describe_run(self) -> None:
        """Say in the store of this node that it leads."""
        assert self._attempt_store is not None, "opened before"
        facts = {"run_id": self._run_id, "leader": self._own, "num_nodes": len(self._nodes)}
        describe_run(self._attempt_store, facts)

    def leave(self) -> None:
        """Send what is left, and leave; the leader leaves last, so that the others can still read."""
        if self._signpost is not None:
            self._signpost.stop()
        if self._mailbox is not None:
            self._mailbox.close(_SEND_SECONDS)
        lost = self._mailbox is not None and (self._mailbox.failed or self._is_out_of_reach(self._mailbox))
        if self._attempt_store is None or lost:
            return
        with contextlib.suppress(DistNetworkError, RuntimeError):  # the leader has already ended
            self._attempt_store.set(f"left/{self._own}", "")
            deadline = time.monotonic() + _LEAVE_SECONDS
            others = [f"left/{node}" for node in self._nodes]
            while self._leads and not self._attempt_store.check(others) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)

    def _is_out_of_reach(self, mailbox: Mailbox) -> bool:
        period = beat_seconds(len(self._nodes) or self._request["num_nodes"])
        return time.monotonic() - mailbox.contact > SUSPECT_SECONDS + 2 * period


class Signpost:
    """Leaves the address of a node that took over at the endpoint, if a launcher is started there again."""

    def __init__(self, request: Message, address: tuple[str, int], signed: Callable[[TCPStore, str], Store]) -> None:
        self._endpoint, self._address, self._signed = split_endpoint(request["endpoint"]), address, signed
        self._stopped = threading.Event()

    def start(self) -> None:
        """Look at the endpoint now and then in a thread: its node may not answer."""
        threading.Thread(target=self._run, name="phalanx-signpost", daemon=True).start()

    def stop(self) -> None:
        """Leave it to others from now on."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(_SIGNPOST_SECONDS):
            # The endpoint may be a name that is not known, or where nothing answers as a store does.
            with contextlib.suppress(DistNetworkError, RuntimeError, ValueError, OSError):
                if ask_all({"": self._endpoint}, SUSPECT_SECONDS)[""]:
                    store = open_store(*self._endpoint, SUSPECT_SECONDS, is_master=False)
                    self._signed(store, "phalanx").set(MOVED, json.dumps(self._address))


def describe(node: str, nodes: Mapping[str, Entry]) -> str:
    """Return a node in words: "1 (host, ranks 8-15)"."""
    node_rank = list(nodes).index(node)
    first = sum(entry["ranks"] for entry in list(nodes.values())[:node_rank])
    described = nodes[node]
    return f"{node_rank} ({described['host']}, {ranks_text(range(first, first + described['ranks']))})"


def open_store(host: str, port: int, seconds: float, *, is_master: bool) -> TCPStore:
    """Host a store, at any free port where `port` is 0, or connect to one."""
    timeout = timedelta(seconds=min(seconds, _CONNECT_SECONDS))
    return TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)


def connect(request: Message) -> tuple[TCPStore, bool]:
    """Host the store at the endpoint if this node has to, else connect to it; return whether it hosts it, too."""
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
            hint="Start node 0 there, and check that this node can reach that host and port.",
        ) from error
