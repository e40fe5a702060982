"""Rendezvous of several nodes: each writes an entry into the leader's store and gets its place among the others.

A node writes its entry and waits for its key; the leader, which hosts the store, reads all entries at
once and writes all places at once. So the messages and bytes of every other node do not depend on their number.

If the number of nodes may change, each has to know all others. That list is read from node to node: each has
it from another one, and up to eight others from it, so that the leader does not send it to all.

`Roster` decides who takes part, and `Gathering` reads and writes the store. Values are JSON, signed where the job has a
secret (`signed_store`): torch's own rendezvous would unpickle what any process that reaches the port has written.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

from torch.distributed import DistStoreError, Store

from phalanx.errors import PhalanxError, UsageError
from phalanx.host.messages import Message
from phalanx.host.wire import decode, encode
from phalanx.launch.agent_messages import NodePlace, Refused
from phalanx.launch.membership import Entry, Heartbeats, Quorum

_POLL_SECONDS = 0.05
_WAITING_BEATS_PER_SECOND = 1_000
_MISSED_BEATS = 5
"""A waiting node that has missed this many heartbeats does not count; it may have been started again."""
_ARRIVALS, _PRESENT = "arrivals", "present"
MOVED = "moved"
"""A key of a store at the endpoint: where the run goes on, if its first leader was lost and is started again."""
DECIDED, NODES = "decided", "nodes"
"""Keys of what all nodes have in common, and of the entries of those that take part, if their number may change."""
HEARING_SECONDS = 1.5
"""How long the first node waits at least: a run that has moved away says so (`MOVED`) within this time."""
_READERS = 8
"""How many nodes read the list of all from one that has it."""
_NAMED = 8
"""How many nodes an error names."""


class MovedError(Exception):
    """The run that began here goes on at another address, where another node took over."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(f"the run has moved to {address[0]}:{address[1]}")
        self.address = address


class Roster:
    """The nodes that have come, as the leader counts them, and when they are enough; no store and no clock."""

    def __init__(self, request: Message, endpoint: str, now: float, before: Quorum | None = None) -> None:
        """`before`: the nodes of the attempt before, of which enough have to come: the others may go on."""
        self._endpoint, self._before = endpoint, before
        self.num_nodes: int = request["num_nodes"]
        self._least: int | None = request.get("min_ranks")
        """How many ranks are enough; None: those of all nodes."""
        self._seconds: float = request["seconds"]
        self._began, self.deadline = now, now + self._seconds
        # 64 nodes that wait send a heartbeat every second, 4,096 every 4 s: the store's load does not grow.
        self.beat_seconds = max(1.0, self.num_nodes / _WAITING_BEATS_PER_SECOND)
        self.silent_seconds = _MISSED_BEATS * self.beat_seconds
        self.entries: dict[str, Entry] = {}
        """The nodes that have come, in the order of arrival."""
        self._beats = Heartbeats()

    @property
    def may_change(self) -> bool:
        """Whether the number of nodes may change."""
        return self._least is not None

    def take(self, entries: Mapping[str, Entry], beats: Mapping[str, Any], now: float) -> None:
        """Take the entries of nodes that came since, and the heartbeats of all."""
        self.entries |= entries
        self._beats.watch(self.entries, now)
        self._beats.take(beats, now)

    def absent(self, now: float) -> set[str]:
        """Return the nodes that have come and gone."""
        return set(self._beats.silent(self.silent_seconds, now))

    def present(self, now: float) -> dict[str, Entry]:
        """Return the entries of the nodes that are present, in the order of arrival."""
        silent = self.absent(now)
        return {name: entry for name, entry in sorted(self.entries.items()) if name not in silent}

    def complete(self, expected: int, now: float) -> dict[str, Entry] | None:
        """Return those that take part, in node order, once they are enough; None: wait; PhalanxError: they are not."""
        present = self.present(now)
        ranks = sum(entry["ranks"] for entry in present.values())
        if self.may_change and now < self._began + HEARING_SECONDS:
            return None
        if len(present) >= expected and ranks >= (self._least or 0):
            taking_part = present if self.may_change else dict(list(present.items())[: self.num_nodes])
        elif now <= self.deadline:
            return None
        elif self._least is None or ranks < self._least:
            raise self.too_few(now)
        elif self._before is not None and not self._before.suffices(present.values()):
            raise self._split()
        else:
            taking_part = present
        if not self.may_change:
            check_numbers(taking_part)
        named = list(taking_part)
        order = order_nodes([entry["node_rank"] for entry in taking_part.values()])
        return {named[index]: taking_part[named[index]] for index in order}

    def places(self, taking_part: Mapping[str, Entry], facts: Message) -> dict[str, NodePlace | Refused]:
        """Return the place of each node: `facts`, the same for all, with its node rank and its first rank."""
        facts = self.facts(taking_part, facts)
        places, first_rank, entries = dict[str, NodePlace | Refused](), 0, list(taking_part.values())
        for node_rank, (node, entry) in enumerate(taking_part.items()):
            reads_elsewhere = self.may_change and node_rank > _READERS
            list_at = tuple(entries[(node_rank - 1) // _READERS]["standby"]) if reads_elsewhere else None
            places[node] = NodePlace(node_rank, first_rank, **facts, list_at=list_at)
            first_rank += entry["ranks"]
        if not self.may_change:
            too_many = refusal(self.without_this_one())
            places |= {node: too_many for node in self.entries if node not in places}
        return places

    @staticmethod
    def facts(taking_part: Mapping[str, Entry], facts: Message) -> Message:
        """Return what all nodes that take part have in common."""
        world_size = sum(entry["ranks"] for entry in taking_part.values())
        return {**facts, "num_nodes": len(taking_part), "world_size": world_size}

    # --- errors -------------------------------------------------------------------------------------------------

    def without_this_one(self) -> UsageError:
        """Return the error of a node that is one too many."""
        return UsageError(
            f"{self.num_nodes} nodes have joined at {self._endpoint} without this one.",
            hint="Start one launcher per node, and give every job its own port (--rdzv-endpoint).",
        )

    def _split(self) -> PhalanxError:
        return PhalanxError(
            f"too few nodes came again at {self._endpoint} within {self._seconds:.0f} s; "
            "the others may continue the run, and this node stops to avoid a split.",
            hint="Half of the nodes, or more, must see each other, with the one that decides among them.",
        )

    def too_few(self, now: float) -> PhalanxError:
        """Return the error of a run that cannot begin."""
        present = self.present(now).values()
        came = [f"{entry['host']} ({entry['ranks']} ranks)" for entry in present]
        within = f"at {self._endpoint} within {self._seconds:.0f} s"
        if self._least is not None:
            return PhalanxError(
                f"too few ranks joined {within}: {_some(came)} came, and {self._least} ranks are needed.",
                hint="Start the same command on every node, or lower the minimum: --num-workers 2:8.",
            )
        given = {entry["node_rank"] for entry in present}
        numbers = [f"node {number}" for number in range(self.num_nodes) if number not in given]
        who = f": {_some(came)} came" if came else ""
        who += f", {_some(numbers)} did not" if came and None not in given else ""
        return PhalanxError(
            f"not all {self.num_nodes} nodes joined {within}{who}.",
            hint="Start the same command on every node, each with its own node rank.",
        )


class Gathering:
    """One attempt's gathering over a store, from the entry of this node to its place."""

    def __init__(
        self,
        store: Store,
        request: Message,
        entry: Entry,
        endpoint: str,
        *,
        before: Quorum | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """`before`: as in `Roster`. `look`: called while this node waits; raises if it need not wait any more."""
        self._look = look
        self._store: Any = store  # torch's stubs lack some of its methods
        self.roster = Roster(request, endpoint, time.monotonic(), before)
        self.own = _name(store.add(_ARRIVALS, 1))
        self._beats = 0
        self._beat()
        store.set(f"entry/{self.own}", json.dumps(entry))
        self.taking_part: dict[str, Entry] = {}
        """As the leader has decided: the nodes that take part, in order."""
        self._present = store.add(_PRESENT, 1)
        self._absent = 0

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self.own}", f"waiting {self._beats}")

    # --- a node ----------------------------------------------------------------------------------------------

    def wait(self, report: Callable[[int], None]) -> NodePlace | None:
        """Wait for this node's place; None: the others have begun without it. `report`: how many are present."""
        place = f"place/{self.own}"
        while True:
            self._look()
            if self._store.check([DECIDED]) and not self._store.check([place]):
                return None
            report(self._present)
            if self._is_there(place):
                break
            now = time.monotonic()
            if now > self.roster.deadline + self.roster.silent_seconds:  # the leader's own error says more
                raise self.roster.too_few(now)
            self._beat()
            self._present = self._store.add(_PRESENT, 0)
        answer: NodePlace | Refused = decode(json.loads(self._store.get(place)))
        if isinstance(answer, Refused):
            raise (UsageError if answer.usage else PhalanxError)(answer.cause, hint=answer.hint)
        return answer

    def _is_there(self, key: str) -> bool:
        """Wait for a key until the next heartbeat is due."""
        try:
            self._store.wait([key], timedelta(seconds=self.roster.beat_seconds))
        except DistStoreError:  # not yet; a lost connection is another error
            return False
        return True

    # --- the leader ---------------------------------------------------------------------------------------------

    def lead(self, expected: int, report: Callable[[int], None], facts: Message) -> NodePlace:
        """Wait for the nodes, give each its place, and return that of this one. `facts`: the same for all."""
        reported = 0
        try:
            while True:
                self._look()
                present = self.read_present()
                if len(present) != reported:
                    reported = len(present)
                    report(reported)
                if (taking_part := self.roster.complete(expected, time.monotonic())) is not None:
                    return self._publish(taking_part, {**facts, "leader": self.own})
                time.sleep(_POLL_SECONDS)
        except PhalanxError as error:
            self._set_places({node: refusal(error) for node in self.roster.entries})
            raise

    def read_present(self) -> dict[str, Entry]:
        """Return the entries of the nodes that are present, in the order of arrival."""
        self._beat()
        known = self.roster.entries
        names = [_name(number) for number in range(1, self._store.add(_ARRIVALS, 0) + 1)]
        new = self._written([name for name in names if name not in known])
        entries = self._store.multi_get([f"entry/{name}" for name in new]) if new else []
        came = {name: json.loads(entry) for name, entry in zip(new, entries, strict=True)}
        watched = [*known, *came]
        beats = self._store.multi_get([f"beat/{name}" for name in watched])
        now = time.monotonic()
        self.roster.take(came, dict(zip(watched, beats, strict=True)), now)
        silent = len(self.roster.absent(now))
        self._store.add(_PRESENT, self._absent - silent)  # each has counted itself
        self._absent = silent
        return self.roster.present(now)

    def _written(self, names: list[str]) -> list[str]:
        """Return the nodes whose entries are there: one may have been killed after it had counted itself."""
        if not names or self._store.check([f"entry/{name}" for name in names]):
            return names
        return [name for name in names if self._store.check([f"entry/{name}"])]

    def _publish(self, taking_part: dict[str, Entry], facts: Message) -> NodePlace:
        places = self.roster.places(taking_part, facts)
        if self.roster.may_change:
            self._store.set(NODES, json.dumps(taking_part))
        self._set_places(places)
        # Last: a node without a place has come late from now on.
        self._store.set(DECIDED, json.dumps(self.roster.facts(taking_part, facts)))
        self.taking_part = taking_part
        own = places[self.own]
        assert isinstance(own, NodePlace), "the leader takes part"
        return own

    def _set_places(self, places: Mapping[str, NodePlace | Refused]) -> None:
        keys = [f"place/{node}" for node in places]
        self._store.multi_set(keys, [json.dumps(encode(place)) for place in places.values()])


def check_same(store: Store, identity: dict[str, str]) -> None:
    """Refuse to take part with another version or other settings than the node that came first."""
    entry = {"host": socket.gethostname(), "identity": identity}
    first = json.loads(store.compare_set("identity", "", json.dumps(entry)))
    expected: dict[str, str] = first["identity"]
    names = [name for name in {**expected, **identity} if expected.get(name) != identity.get(name)]
    if names:
        differences = [f"{name} is {identity.get(name)} here and {expected.get(name)} there" for name in names]
        more = f" (and {len(differences) - 5} more)" if len(differences) > 5 else ""
        raise UsageError(
            f"{entry['host']} differs from {first['host']}, which came first: {'; '.join(differences[:5])}{more}.",
            hint="Start the same command, with the same versions and settings, on every node.",
        )


def reserve_names(store: Store, last: str) -> None:
    """Let nodes that come to the store of one that takes over get other names than those up to `last`."""
    store.add(_ARRIVALS, int(last))


def describe_run(store: Store, facts: Message) -> None:
    """Write into the store of a node that took over what others find there: the run has begun, with these facts."""
    store.set(DECIDED, json.dumps(facts))


def agree_on_round(store: Store, wanted: int) -> int:
    """Return the number that the nodes agree on for an attempt: a node that came late has counted fewer."""
    current = int(store.compare_set("round", "", str(wanted)))
    while current < wanted:
        current = int(store.compare_set("round", str(current), str(wanted)))
    return current


def current_round(store: Store) -> int:
    """Return the round that the nodes have agreed on last."""
    return int(store.get("round"))


def _name(number: int) -> str:
    """Return the name of a node by its arrival; names sort in the order of arrival."""
    return f"{number:05d}"


def refusal(error: PhalanxError) -> Refused:
    """Return an error as a message."""
    return Refused(error.message, error.hint, usage=isinstance(error, UsageError))


def _some(names: list[str]) -> str:
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join(names[:_NAMED] + more)


def check_numbers(entries: dict[str, Entry]) -> None:
    """Refuse two nodes with the same node rank."""
    given: dict[int, str] = {}
    for entry in entries.values():
        if (node_rank := entry["node_rank"]) in given:
            raise UsageError(
                f"two nodes say they are node {node_rank}: '{given[node_rank]}' and '{entry['host']}'.",
                hint=f"Give each node its own number from 0 to {len(entries) - 1}.",
            )
        if node_rank is not None:
            given[node_rank] = entry["host"]


def order_nodes(node_ranks: Sequence[int | None]) -> list[int]:
    """Return the indices in node order: a node with a number has that place, the others fill the gaps in turn.

    For example, (None, 0, None) came: the second is node 0, the first node 1, the third node 2: [1, 0, 2].
    """
    given = set(node_ranks)
    gaps = (number for number in count() if number not in given)
    places = [next(gaps) if node_rank is None else node_rank for node_rank in node_ranks]
    return sorted(range(len(places)), key=places.__getitem__)
