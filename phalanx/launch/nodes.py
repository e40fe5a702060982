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
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from phalanx.errors import PhalanxError
from phalanx.host.addresses import own_address
from phalanx.host.job_secret import VARIABLE
from phalanx.host.messages import Message
from phalanx.host.signed_store import sign_store
from phalanx.host.wire import Wire, decode, encode, kind_of
from phalanx.launch.agent_messages import (
    Accused,
    Agreed,
    AllEnded,
    Arrived,
    AskCalls,
    Calls,
    CallsWanted,
    Known,
    LeaderLost,
    Leads,
    Mailed,
    News,
    NodeArrived,
    NodeFinished,
    NodePlace,
    NodesLost,
    RemoteFailure,
    SilentNodes,
    TakeIn,
    TakenIn,
    WatchNodes,
)
from phalanx.launch.environment import NodeInfo
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
        self._silent: tuple[str, ...] = ()
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
        self._readers: Final[dict[type, Callable[[str, Any], Wire | None]]] = {
            Accused: self._on_accused,
            Known: self._on_known,
            Agreed: self._on_agreed,
            Leads: self._on_leads,
            NodeFinished: self._on_finished,
            RemoteFailure: self._on_failure,
            AskCalls: self._on_question,
            NodeArrived: lambda sender, message: message,
            Calls: lambda sender, message: message,
            AllEnded: lambda sender, message: message,
        }
        """By its kind, what to do about mail; returns what the launcher has to know."""

    def _sign(self, prefix: str) -> Store:
        return self._signed(self._store, prefix)

    def _signed(self, store: Store, prefix: str) -> Store:
        return sign_store(PrefixStore(prefix, store), {VARIABLE: self._request.get("secret") or ""})

    def _notify(self) -> None:
        os.eventfd_write(self.wakeup, 1)

    def _open_neighbour(self, address: tuple[str, int]) -> Store:
        return self._signed(open_store(*address, SUSPECT_SECONDS, is_master=False), "watch")

    # --- gathering ----------------------------------------------------------------------------------------------

    def gather(self, attempt: int, send: Callable[[Wire], None]) -> NodeInfo:
        """Wait for the nodes, or be taken in by those that train; return the place of this one."""
        self._attempt = attempt
        if self._mailbox is not None:  # the others wait for the failure that ended the attempt before
            self._mailbox.close(_SEND_SECONDS)
            self._mailbox = None
        self._finished, self._silent = set(), ()
        self._knows_failure, self._unread = False, []
        try:
            check_same(self._sign("phalanx"), self._request.get("identity") or {})
            return self._gather(send)
        except (DistNetworkError, RuntimeError) as error:
            self._attempt_store = None
            raise self._leader_is_lost() from error

    def _gather(self, send: Callable[[Wire], None]) -> NodeInfo:
        def report(present: int) -> None:
            send(News(self._attempt, Arrived(present)))

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
        self._run_id, self._leader = place.run_id, place.leader
        if self._may_change:
            self._nodes = gathering.taking_part or self._read_nodes(place.list_at)
        self._begin()
        self._open_mailbox().start()
        nodes = [
            [node, entry["host"], entry["ranks"], entry["standby"]]
            for node, entry in self._nodes.items()
            if self._may_change
        ]
        return NodeInfo(
            node_rank=place.node_rank,
            num_nodes=place.num_nodes,
            first_rank=place.first_rank,
            world_size=place.world_size,
            master_addr=self._host,
            master_port=place.master_port,
            run_id=self._run_id,
            own=self._own,
            leader=self._leader,
            nodes=nodes,
            round=self._round,
        )

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

    def _lead(self, gathering: Gathering, report: Callable[[int], None]) -> NodePlace:
        # The ranks' store is on the endpoint's host, which all nodes can reach.
        self._rank_store = open_store(self._host, 0, self._seconds, is_master=True)
        # Another node may lead after a restart: the run keeps its name.
        facts = {"master_port": self._rank_store.port, "run_id": self._run_id or self._request["launch_id"]}
        expected = len(self._nodes) or self._request["num_nodes"]  # after a restart: those that were there
        try:
            return gathering.lead(expected, report, facts)
        finally:
            self._nodes = gathering.taking_part or gathering.roster.entries

    def _join_late(self, run: Message, send: Callable[[Wire], None]) -> NodeInfo:
        """Ask the node that leads to take this one in."""
        self._leader, self._run_id = run["leader"], run["run_id"]
        self._members = None
        mailbox = self._open_mailbox()
        mailbox.start()
        entry = self._entry
        self._mail(self._leader, NodeArrived(self._own, entry["host"], entry["ranks"], tuple(entry["standby"])))
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline and not mailbox.failed:
            mails = mailbox.receive()
            for number, mail in enumerate(mails):
                if kind_of(mail["message"]) is TakenIn:
                    self._unread += mails[number + 1 :]
                    return self._take_place(decode(mail["message"]))
                self._unread.append(mail)
            if current_round(self._sign("phalanx")) > self._round:  # all start again: with this one
                mailbox.close()
                return self._gather(send)
            time.sleep(_JOIN_SECONDS)
        raise PhalanxError(
            f"the run at {self._host}:{self._port} did not take this node in within {self._seconds:.0f} s.",
            hint="It has as many ranks as it may have (--num-workers 2:8 sets the most), or it has ended.",
        )

    def _take_place(self, message: TakenIn) -> NodeInfo:
        place = NodeInfo(
            **{**message.common, **message.places[self._own]},
            own=self._own,
            leader=self._leader,
            run_id=self._run_id,
            round=self._round,
        )
        self._nodes = {
            node: {"host": host, "ranks": ranks, "standby": standby} for node, host, ranks, standby in place.nodes
        }
        self._begin(place.term, message.gone, message.new)
        return place

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

    def take_in(self, request: TakeIn) -> None:
        """Let nodes that have come late take part, and tell them which of the others count for a quorum."""
        if self._members is not None:
            gone, new = tuple(self._members.gone), tuple(self._members.new)
            self._mail(tuple(request.places), TakenIn(request.common, request.places, gone, new))

    def _mail(self, to: str | Sequence[str], message: Wire) -> None:
        self.post(to, encode(message))

    def post(self, to: str | Sequence[str], message: Message) -> None:
        """Send an encoded message to a node, to several, to `LEADER`, or to `ALL`."""
        if self._mailbox is not None:
            self._mailbox.post(self._leader if to == LEADER else to, message)

    def news(self) -> list[News]:
        """Return messages for the launcher: mail, lost nodes, or that another node leads from now on."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakeup)
        if self._mailbox is None:
            return []
        unread, self._unread = self._unread, []
        read = [self._read(mail) for mail in (*unread, *self._mailbox.receive())]
        messages = [message for message in read if message is not None]
        if self._members is not None:
            messages += self._look_around(self._members, self._mailbox)
        elif not self._may_change:
            messages += self._look_at_fixed(self._mailbox)
        return [News(self._attempt, message) for message in messages]

    def _read(self, mail: Mail) -> Wire | None:
        """Take what a message says about the nodes; return what the launcher has to know."""
        sender, message = mail["sender"], mail["message"]
        reader = self._readers.get(kind_of(message))
        return Mailed(sender, message) if reader is None else reader(sender, decode(message))

    def _on_accused(self, sender: str, message: Accused) -> None:
        if self._members is not None:
            self._members.on_accusation(message.signs, time.monotonic())

    def _on_known(self, sender: str, message: Known) -> None:
        if self._members is not None:
            self._members.on_known(sender, message.version)

    def _on_agreed(self, sender: str, message: Agreed) -> None:
        if self._members is not None and sender == self._leader:
            self._members.agree(message.version)

    def _on_leads(self, sender: str, message: Leads) -> None:
        if self._members is not None and sender == self._leader:
            self._members.confirm(message.term)

    def _on_finished(self, sender: str, _: NodeFinished) -> None:
        self._finished.add(sender)
        if len(self._finished) == len(self._nodes):
            self._mail(ALL, AllEnded())

    def _on_failure(self, sender: str, message: RemoteFailure) -> RemoteFailure | None:
        """Pass on the first failure, which is that of all nodes; the launcher knows its own."""
        is_news = not self._knows_failure and sender != self._own
        self._knows_failure = True
        return message if is_news else None

    def _on_question(self, sender: str, message: AskCalls) -> CallsWanted:
        return CallsWanted(message.number, sender, is_own=sender == self._own)

    def change(self, request: WatchNodes) -> None:
        """Take part with other nodes, too, or without them, as the launcher says."""
        if self._members is not None:
            if self._members.change(request.nodes, time.monotonic(), request.version):
                self._mail(LEADER, Known(request.version))
            self._nodes = self._members.nodes
            self._serve()

    def lead(self, term: int) -> None:
        """Say that this node leads, as its launcher has decided: to all nodes, in its store, at the endpoint."""
        if self._members is not None:
            self._members.confirm(term)
            self._mail(ALL, Leads(term))
            self._describe_run()

    # --- lost nodes ------------------------------------------------------------------------------------------

    def _look_at_fixed(self, mailbox: Mailbox) -> list[Wire]:
        """Name silent nodes of a fixed number, which may still answer; end with the one that leads."""
        now = time.monotonic()
        if not self._leads:
            if mailbox.failed or now - mailbox.contact > self._silence + 2 * beat_seconds(self._request["num_nodes"]):
                raise self._leader_is_lost()
            return []
        self._beats.take(mailbox.beats(), now)
        seconds = _LOST_SECONDS + 2 * beat_seconds(len(self._nodes))
        names = tuple(describe(node, self._nodes) for node in self._beats.silent(seconds, now))
        changed, self._silent = names != self._silent, names
        return [SilentNodes(names)] if changed else []

    def _look_around(self, members: Membership, mailbox: Mailbox) -> list[Wire]:
        """Tell the nodes' state what was heard, and carry out what it says."""
        now = time.monotonic()
        members.on_beats(mailbox.beats(), now)
        members.on_contact(mailbox.contact)
        if mailbox.failed:
            members.on_store_ended()
        for node, heard in self._neighbours.heard().items():
            members.on_neighbour(node, heard)
        members.on_answers(self._probes.answers(), now)
        news: list[Wire] = []
        for action in members.check(now):
            if isinstance(action, Stop):
                raise PhalanxError(action.cause, hint=action.hint)
            if isinstance(action, Ask):
                self._probes.ask({node: self._nodes[node]["standby"] for node in action.nodes if node in self._nodes})
            elif isinstance(action, Watch):
                self._neighbours.watch({node: tuple(members.nodes[node]["standby"]) for node in action.nodes})
            elif isinstance(action, Accuse):
                self._mail(LEADER, Accused(action.signs))
            elif isinstance(action, Agreement):
                self._mail(ALL, Agreed(action.version))
                news.append(Agreed(action.version))
            elif isinstance(action, Lost):
                news.append(NodesLost(action.nodes, action.ended))
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

    def _move(self, move: Move, members: Membership, mailbox: Mailbox) -> LeaderLost:
        """Move to the store of the node that leads from now on, which may be this one."""
        mailbox.close()  # what was not sent is lost with the node
        host = self._nodes[move.lost]["host"]
        news = LeaderLost(move.leader, None, move.term, move.ended, move.gone, move.new, host)
        self._nodes, self._leader, self._leads = members.nodes, move.leader, members.leads
        self._host, self._port = self._nodes[self._leader]["standby"]
        if self._leads:
            self._store = self._standby
            self._rank_store = open_store(self._address, 0, self._seconds, is_master=True)
            news = replace(news, address=(self._address, self._rank_store.port))
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
