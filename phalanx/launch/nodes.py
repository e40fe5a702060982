"""Rendezvous of several machines: they exchange messages and notice which of them are lost.

A fixed number of machines is the case in which all must be there. Where the number may change (`min_ranks` is given),
machines may come late or be lost: one launcher, at first that of the machine with the store, decides for all
(`phalanx.recovery`), and when its machine is lost the first of the others takes over with its standby store. There it
writes that it has: machines that do not find that within a time end. And it leaves its address at the endpoint, should
a launcher be started there again: that one then comes late, instead of beginning a second run.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx.errors import PhalanxError
from phalanx.host.addresses import own_address
from phalanx.host.messages import Message
from phalanx.host.signed_store import VARIABLE, sign_store
from phalanx.launch.gathering import (
    DECIDED,
    MOVED,
    NODES,
    Entry,
    Gathering,
    MovedError,
    agree_on_round,
    check_same,
    describe_run,
)
from phalanx.launch.mailbox import ALL, Mail, Mailbox, may_continue
from phalanx.launch.probes import Probes, ask_all
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
_SIGNPOST_SECONDS = 1.0
_CONFIRM_SECONDS = 5.0
"""How much longer than two machines may need to notice a lost leader a new one may take to say that it leads."""


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
        self._probes = Probes(_SUSPECT_SECONDS)
        self._endpoint_store = self._store
        self._signpost: Signpost | None = None
        self._confirm_by: float | None = None
        """Until when the machine that is to lead from now on has to say so."""
        self._confirmed: tuple[list[str], str] = ([], "")
        """The machines, and the one that led, before that."""
        self._cut_off = False
        """Whether the machine that led may run still: it did not refuse, it did not answer."""
        self._unread: list[Mail] = []
        self._last_name = ""
        """The name of the machine that came last, also if it was lost: a later one gets another."""
        node_rank, ranks = request["node_rank"], request["ranks_per_node"]
        self._entry: Entry = {"node_rank": node_rank, "host": socket.gethostname(), "ranks": ranks}
        if self._may_change:
            self._address = own_address(self._host)
            self._standby = open_store(self._address, 0, self._seconds, is_master=True)
            self._entry["standby"] = [self._address, self._standby.port]

    def _sign(self, prefix: str) -> Store:
        return self._signed(self._store, prefix)

    def _signed(self, store: Store, prefix: str) -> Store:
        from torch.distributed import PrefixStore

        return sign_store(PrefixStore(prefix, store), {VARIABLE: self._request.get("secret") or ""})

    # --- gathering ----------------------------------------------------------------------------------------------

    def gather(self, attempt: int, send: Callable[[Message], None]) -> dict[str, Any]:
        """Wait for the machines, or be taken in by those that train; return the fields of this one's `NodeInfo`."""
        from torch.distributed import DistNetworkError

        self._attempt = attempt
        if self._mailbox is not None:  # the others wait for the failure that ended the attempt before
            self._mailbox.close(_SEND_SECONDS)
            self._mailbox = None
        self._ended, self._finished, self._silent = set(), set(), []
        self._knows_failure, self._confirm_by, self._unread = False, None, []
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
        gathering = Gathering(self._attempt_store, self._request, self._entry, endpoint, self._look_for_signpost)
        self._own = gathering.own
        try:
            place = self._lead(gathering, report) if self._leads else gathering.wait(report)
        except MovedError as moved:  # its store stays open: it leads others there, too
            self._leads, self._round, (self._host, self._port) = False, -1, moved.address
            self._store = open_store(self._host, self._port, self._silence, is_master=False)
            return self._gather(send)
        if place is None and not self._may_change:
            raise gathering.without_this_one()
        if place is None:
            return self._join_late(json.loads(self._attempt_store.get(DECIDED)))
        self._run_id, self._leader = place["run_id"], place["leader"]
        if not self._leads:
            self._nodes = json.loads(self._attempt_store.get(NODES)) if self._may_change else {}
        self._open_mailbox(place["num_nodes"])
        machines = [
            [node, entry["host"], entry["ranks"], entry["standby"]]
            for node, entry in self._nodes.items()
            if self._may_change
        ]
        return {**place, "master_addr": self._host, "own": self._own, "machines": machines}

    def _look_for_signpost(self) -> None:
        """Raise MovedError if the run that began at this endpoint goes on elsewhere."""
        if self._may_change and self._store is self._endpoint_store:
            root = self._sign("phalanx")
            if root.check([MOVED]):
                host, port = json.loads(root.get(MOVED))
                raise MovedError((host, port))

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
            found = mailbox.receive()
            for number, mail in enumerate(found):
                if "accept" in mail:
                    self._unread += found[number + 1 :]
                    place = mail["accept"]
                    self._nodes = {
                        node: {"host": host, "ranks": ranks, "standby": standby}
                        for node, host, ranks, standby in place["machines"]
                    }
                    return {**place, "own": self._own, "leader": self._leader, "run_id": self._run_id}
                self._unread.append(mail)
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
        self._last_name = max([self._last_name, *self._nodes])
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
        unread, self._unread = self._unread, []
        found = [message for mail in (*unread, *self._mailbox.receive()) for message in self._read(mail)]
        found += self._find_lost(self._mailbox) if self._leads else self._find_lost_leader(self._mailbox)
        return [{**message, "attempt": self._attempt} for message in found]

    def _read(self, mail: Mail) -> list[Message]:
        """Take what a message says about the machines; return what the launcher has to know, its kind first."""
        if "kind" in mail:
            return [{"mail": mail}]
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
        return [{"arrival": mail["arrival"], "entry": mail["node"]}] if "arrival" in mail else []

    def change(self, entries: dict[str, Entry | None]) -> None:
        """Take part with these machines, too, or without them (None), as the launcher says."""
        nodes = self._nodes | entries
        self._nodes = {node: entry for node, entry in nodes.items() if entry is not None}
        self._watch()

    # --- lost machines ------------------------------------------------------------------------------------------

    def _find_lost(self, mailbox: Mailbox) -> list[Message]:
        """Return the machines that are silent; those of a fixed number may still answer."""
        if not self._may_change:
            names = [describe(node, self._nodes) for node in mailbox.others.silent(_LOST_SECONDS)]
            changed, self._silent = names != self._silent, names
            return [{"silent_nodes": names}] if changed else []
        suspects, silent = mailbox.others.silent(_SUSPECT_SECONDS), set(mailbox.others.silent(self._silence))
        asked = [node for node in suspects if node in self._nodes and node not in silent]
        self._probes.ask({node: self._nodes[node]["standby"] for node in asked})
        refused = {node for node, answer in self._probes.answers().items() if answer is False}
        self._ended |= refused
        lost = [node for node in suspects if node in self._nodes and (node in silent or node in refused)]
        if not lost:
            return []
        self._check_quorum([node for node in self._nodes if node not in lost])
        for node in lost:
            del self._nodes[node]
        self._watch()
        return [{"lost_nodes": lost}]

    def _listens(self, node: str) -> bool | None:
        """Whether the launcher of a machine runs; False if it has certainly ended, because its machine refuses."""
        found = ask_all({node: self._nodes[node]["standby"]}, _SUSPECT_SECONDS)[node]
        self._ended |= {node} if found is False else set()
        return found

    def _check_quorum(self, alive: list[str]) -> None:
        nodes, leader = (list(self._nodes), self._leader) if self._confirm_by is None else self._confirmed
        if not may_continue(nodes, alive, list(self._ended), leader):
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
        if self._confirm_by is not None and mailbox.has_arrived:
            self._confirm_by = None
        if self._confirm_by is not None and time.monotonic() > self._confirm_by:
            raise self._is_left_out()
        if not mailbox.failed and not mailbox.unreachable(_SUSPECT_SECONDS):
            return []
        # A process that is killed closes its connections one after the other: its machine may refuse a moment later.
        answer = self._listens(self._leader)
        if answer is not False and not mailbox.unreachable(self._silence):
            return []
        if self._confirm_by is not None and self._cut_off:  # the run may have ended without this machine
            raise self._is_left_out()
        mailbox.close()  # what was not sent is lost with the machine
        return [self._fail_over(cut_off=answer is not False)]

    def _is_left_out(self) -> PhalanxError:
        host = self._nodes[self._leader]["host"]
        return PhalanxError(
            f"lost contact with the machine that decided, and {host}, which may see it still, does not take over.",
            hint="This machine stops to avoid a split. Start it again: it can come late.",
        )

    def _leader_is_lost(self) -> PhalanxError:
        return PhalanxError(
            f"lost the machine that hosts the rendezvous at {self._host}:{self._port}.",
            hint="Look at that machine's own output: its launcher has ended.",
        )

    def _fail_over(self, *, cut_off: bool) -> Message:
        """Move to the first machine that answers, in the order of arrival; it decides from now on."""
        lost = self._leader
        others = {node: entry["standby"] for node, entry in self._nodes.items() if node not in (lost, self._own)}
        answers = ask_all(others, _SUSPECT_SECONDS)
        self._ended |= {node for node, answer in answers.items() if answer is False}
        candidates = sorted([self._own, *(node for node, answer in answers.items() if answer)])
        self._check_quorum(candidates)
        if self._confirm_by is None:
            self._confirmed, self._cut_off = (list(self._nodes), lost), cut_off
        self._leader = candidates[0]
        news: Message = {"leader": self._leader, "lost": self._nodes.pop(lost)["host"], "ended": sorted(self._ended)}
        self._leads = self._leader == self._own
        self._host, self._port = self._nodes[self._leader]["standby"]
        self._confirm_by = None
        if self._leads:
            self._store = self._standby
            self._rank_store = open_store(self._address, 0, self._seconds, is_master=True)
            news |= {"address": [self._address, self._rank_store.port], "others": candidates[1:]}
            check_same(self._sign("phalanx"), self._request.get("identity") or {})
            agree_on_round(self._sign("phalanx"), self._round)
        else:
            self._store = open_store(self._host, self._port, self._silence, is_master=False)
        self._attempt_store = self._sign(f"phalanx/{self._round}")
        self._open_mailbox(len(self._nodes))
        if self._leads:
            self._describe_run()
        else:
            self._confirm_by = time.monotonic() + 2 * self._silence + _CONFIRM_SECONDS
            assert self._mailbox is not None, "opened above"
            self._mailbox.wait_for(DECIDED)
        return news

    def _describe_run(self) -> None:
        """Say in the store of this machine, and at the endpoint, that it leads."""
        assert self._attempt_store is not None, "opened before"
        facts = {"run_id": self._run_id, "leader": self._own, "num_nodes": len(self._nodes)}
        describe_run(self._attempt_store, facts, self._last_name)
        self._signpost = Signpost(self._request, (self._host, self._port), self._signed)
        self._signpost.start()

    def leave(self) -> None:
        """Send what is left, and leave; the leader leaves last, so that the others can still read."""
        from torch.distributed import DistNetworkError

        if self._signpost is not None:
            self._signpost.stop()
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


class Signpost:
    """Leaves the address of a machine that took over at the endpoint, if a launcher is started there again."""

    def __init__(self, request: Message, address: tuple[str, int], signed: Callable[[TCPStore, str], Store]) -> None:
        self._endpoint, self._address, self._signed = split_endpoint(request["endpoint"]), address, signed
        self._stopped = threading.Event()

    def start(self) -> None:
        """Look at the endpoint now and then in a thread: its machine may not answer."""
        threading.Thread(target=self._run, name="phalanx-signpost", daemon=True).start()

    def stop(self) -> None:
        """Leave it to others from now on."""
        self._stopped.set()

    def _run(self) -> None:
        from torch.distributed import DistNetworkError

        while not self._stopped.wait(_SIGNPOST_SECONDS):
            # The endpoint may be a name that is not known, or where nothing answers as a store does.
            with contextlib.suppress(DistNetworkError, RuntimeError, ValueError, OSError):
                if ask_all({"": self._endpoint}, _SUSPECT_SECONDS)[""]:
                    store = open_store(*self._endpoint, _SUSPECT_SECONDS, is_master=False)
                    self._signed(store, "phalanx").set(MOVED, json.dumps(self._address))


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
