"""Which nodes take part, which of them are lost, and which one leads: what one node knows of the others.

A state machine without sockets, threads and clocks: `nodes` tells it what it has heard and the time, and carries out
what `check` returns; `tests/simulation` does so with thousands of nodes at once.

    settled --the leader is lost--> searching --a node before this one answers--> unconfirmed --it leads--> settled
                                    searching --none does--> electing --enough nodes report--> settled

*searching*: the nodes that were there before this one are asked, in their order, a few at a time. The first that
answers is the next leader. *unconfirmed*: this node has moved to it, and waits until it says that it leads.
*electing*: this node is the first; its launcher waits for the reports of the others (`recovery.launcher.node`) and
leads if there are enough of them. A node that cannot know whether others go on without it ends.

Every node sends few heartbeats to the leader, few enough that their sum does not grow with the number of nodes, and
is watched by its neighbours in the ring of names, which report to the leader what they notice.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

Entry = dict[str, Any]
"""What a node says of itself: node_rank, host, ranks, and the address of its standby store."""
Sign = Literal["ended", "silent"]
"""What a neighbour notices: the node refuses connections, or does not answer."""
Phase = Literal["settled", "searching", "unconfirmed", "electing"]
ALL, LEADER = "all", "leader"
"""The addresses of a message to every node, the sender included, and to the one that leads."""

SUSPECT_SECONDS = 1.0
"""Silence after which a node is asked whether it runs, and the time that it has to answer."""
_BEAT_SECONDS = 0.5
_BEATS_PER_SECOND = 2_000
_LOOK_SECONDS = 0.1
_WATCHED = 3
"""How many nodes each one watches."""
_LEASE_SECONDS = 2.0
"""How much longer than a leader without the others these wait: its ranks have ended before they go on without it."""
_CONFIRM_SECONDS = 5.0
"""How much longer than two nodes may need to notice a lost leader a new one may take to say that it leads."""
_BESIDE = 5
"""For each lost node, this many on both sides of it are asked whether they run."""
_FIRST_ASKED = 8
"""How many nodes are asked first which of them leads next; then four times as many, and so on."""


def beat_seconds(num_nodes: int) -> float:
    """Return the seconds between two heartbeats of a node to the leader, whose load does not grow with them.

    For example, 64 nodes send one every 0.5 s, and 16,384 every 8.2 s: never more than 2,000 per second.
    """
    return max(_BEAT_SECONDS, num_nodes / _BEATS_PER_SECOND)


def election_seconds(silence: float, num_nodes: int) -> float:
    """Return how long a node that takes over waits for the others, which may notice later that it has to."""
    return max(3.0, silence) + 2 * beat_seconds(num_nodes)


def may_continue(members: Iterable[str], alive: Collection[str], ended: Collection[str], leader: str) -> bool:
    """Whether the nodes that see each other may go on without the others: never two parts of a run at once.

    `ended`: nodes whose launcher has certainly ended. Of the others more than half must be here; half is enough
    where `leader`, the node that decided before, is one of them. For example, of four nodes that a cut network
    divides into two and two, the pair with the leader goes on; after its launcher has ended, two of the other three do.
    """
    rest = [node for node in members if node not in ended]
    here = [node for node in rest if node in alive]
    return 2 * len(here) > len(rest) or (2 * len(here) == len(rest) and leader in here)


def changed(nodes: Mapping[str, Any], changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the nodes with these changes; None: without that one."""
    return {node: entry for node, entry in {**nodes, **changes}.items() if entry is not None}


def in_order(nodes: Mapping[str, Any]) -> list[str]:
    """Return the names in the order of arrival, which is that of the ring of neighbours."""
    return sorted(nodes)


@dataclasses.dataclass(frozen=True)
class Quorum:
    """Nodes, by the addresses of their launchers, of which enough have to be there."""

    nodes: Mapping[str, Entry]
    lists: Sequence[Collection[str]]
    """The nodes of the list, and those of the one before that enough of them know of: of each enough."""
    ended: Collection[str]
    leader: str

    def suffices(self, present: Iterable[Entry]) -> bool:
        """Whether the nodes with these entries may go on without the others."""
        addresses = {tuple(entry["standby"]) for entry in present}
        alive = {node for node, entry in self.nodes.items() if tuple(entry["standby"]) in addresses}
        return all(may_continue(members, alive, self.ended, self.leader) for members in self.lists)


class Heartbeats:
    """When the heartbeat counter of each node last changed."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, float]] = {}

    def watch(self, nodes: Iterable[str], now: float) -> None:
        """Watch these nodes from now on; new ones count as just seen."""
        self._seen = {node: self._seen.get(node, (None, now)) for node in nodes}

    @property
    def watched(self) -> list[str]:
        """The nodes that are watched."""
        return list(self._seen)

    def take(self, beats: Mapping[str, Any], now: float) -> None:
        """Take the present counters; those of nodes that are not watched are ignored."""
        seen = self._seen
        for node, beat in beats.items():
            if node in seen and seen[node][0] != beat:
                seen[node] = (beat, now)

    def silent(self, seconds: float, now: float) -> list[str]:
        """Return the watched nodes without a heartbeat for this many seconds."""
        return [node for node, (_, changed) in self._seen.items() if now - changed > seconds]


# --- what to do -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ask:
    """Find out whether the launchers of these nodes run; a node that was just asked is not asked again."""

    nodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Watch:
    """Watch these neighbours from now on, and no others."""

    nodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Accuse:
    """Report to the leader what this node has noticed of its neighbours."""

    signs: Mapping[str, Sign]


@dataclasses.dataclass(frozen=True)
class Lost:
    """Nodes are lost, as the leader decides; `ended`: those of them whose launcher has certainly ended."""

    nodes: tuple[str, ...]
    ended: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Move:
    """The leader is lost: go on with another one, or be it, if enough nodes report."""

    leader: str
    lost: str
    term: int
    ended: tuple[str, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]
    """Nodes that are not in the list any more, and that are in it now, which too few of the others may know."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Tell the others that enough nodes know a version of the list: now it counts."""

    version: int


@dataclasses.dataclass(frozen=True)
class Stop:
    """This node ends, for this reason."""

    cause: str
    hint: str


Action = Ask | Watch | Accuse | Lost | Agreement | Move | Stop


class Membership:
    """One node among those of a run whose number may change."""

    def __init__(self, own: str, silence: float, now: float) -> None:
        """`silence`: seconds after which a node that does not answer is lost."""
        self.own, self._silence = own, silence
        self.nodes: Mapping[str, Entry] = {}
        """The nodes of the run; the order of their names is that of arrival, and in it they lead."""
        self.leader = ""
        self.term = 0
        """How many times the leader has changed: what an earlier one says does not count."""
        self.phase: Phase = "settled"
        self.version = 0
        """That of the list of nodes; the leader counts it."""
        self.gone: dict[str, float] = {}
        """Nodes that have left the list, and in which version, until enough others know that.

        Till then they count where nodes may go on without others: a leader that is cut off notices that of one
        node after the other, while the others have a majority.
        """
        self.new: dict[str, float] = {}
        """Nodes that have come, and in which version; till enough others know that they do not count."""
        self._known: dict[str, int] = {}
        """As the leader: the version that each node knows."""
        self.ended: dict[str, float] = {}
        """Nodes whose launcher has certainly ended, and when this node learned it."""
        self._beats = Heartbeats()
        self._heard: dict[str, float] = {}
        """When each neighbour has answered last."""
        self._noticed: dict[str, Sign] = {}
        self._reported: dict[str, Sign] = {}
        self._accused: dict[str, tuple[Sign, float]] = {}
        """What neighbours have noticed, and when the leader heard of it."""
        self._answers: dict[str, tuple[bool | None, float]] = {}
        self._contact = now
        self._suspected: float | None = None
        """Since when the leader is asked whether it runs."""
        self._store_ended = False
        self._uncertain: set[str] = set()
        """Nodes that did not refuse when another leader was looked for: they may go on without this one."""
        self._confirm_by = 0.0
        self._is_stale = False
        """Whether this node has heard nothing for so long that the others may have gone on without it."""
        self._alone_at = math.inf
        """Since when others may have gone on, and ended, without this node: that long an election takes."""
        self._lost = ""
        self._asked: tuple[str, ...] = ()
        """The nodes that were asked to lead, whose answers are not all there."""
        self._asking_until = 0.0
        self._watched: tuple[str, ...] = ()
        self._watching: tuple[str, ...] = ()
        self._looked = -math.inf
        """When the leader has looked for silent nodes."""
        self._checked = now
        self._woke: float | None = None
        """When this node went on that was suspended for so long that the others may have left it out, and finished."""

    # --- what is heard ------------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this node leads, or is about to."""
        return self.leader == self.own

    @property
    def looks_at(self) -> float:
        """When the leader looks for lost nodes again, at the earliest."""
        return self._looked + _LOOK_SECONDS

    @property
    def leaves_signpost(self) -> bool:
        """Whether this node says at the endpoint where the run goes on: the leader and some after it do."""
        names = in_order(self.nodes)
        after_leader = bisect.bisect_left(names, self.own) - bisect.bisect_left(names, self.leader)
        return self.own in self.nodes and after_leader % len(names) <= _WATCHED

    @property
    def period(self) -> float:
        """Seconds between two heartbeats to the leader."""
        return beat_seconds(len(self.nodes))

    def begin(
        self,
        leader: str,
        nodes: Mapping[str, Entry],
        now: float,
        *,
        term: int = 0,
        gone: Iterable[str] = (),
        new: Iterable[str] = (),
    ) -> None:
        """Take part with these nodes, which one of them leads.

        `gone`, `new`: those that have left and count still, and those that have come and do not count yet.
        """
        self.leader, self.nodes, self.term = leader, nodes, max(term, self.term)
        self.phase, self.version = "settled", 0
        self.gone, self.new, self._known = dict.fromkeys(gone, 0.0), dict.fromkeys(new, 0.0), {}
        self.ended, self._uncertain = {}, set()
        self._beats = Heartbeats()
        self._answers, self._accused, self._noticed, self._reported = {}, {}, {}, {}
        self._enter_store(now)
        self._follow_ring(now)

    def change(self, entries: Mapping[str, Entry | None], now: float, version: int) -> bool:
        """Take part with these nodes, too, or without them (None), as the launcher says.

        Return whether the leader has to know that this node knows.
        """
        self.version = max(version, self.version)
        went = [node for node, entry in entries.items() if entry is None]
        self.gone |= {node: version for node in went if node in self.nodes or node in self.gone}
        self.new |= {node: version for node in entries if node not in went and node not in self.nodes}
        self.nodes = changed(self.nodes, entries)
        self._follow_ring(now)
        return not self.leads

    def _leave_out(self, nodes: Collection[str], now: float) -> None:
        """Go on without nodes, which count until enough others know that."""
        self.gone |= dict.fromkeys(nodes, math.inf)  # the launcher counts the versions
        self.nodes = changed(self.nodes, dict.fromkeys(nodes))
        self._follow_ring(now)

    def agree(self, version: int) -> None:
        """Note that enough nodes know a version of the list."""
        self.gone = {node: left for node, left in self.gone.items() if left > version}
        self.new = {node: came for node, came in self.new.items() if came > version}

    def confirm(self, term: int) -> None:
        """Note that the leader leads: it has said so, or the launcher of this node has had enough reports."""
        self.term = max(term, self.term)
        if self.phase in ("unconfirmed", "electing"):
            self.phase = "settled"
            self._uncertain.clear()

    def on_beats(self, beats: Mapping[str, Any], now: float) -> None:
        """Take the heartbeat counters in the leader's store."""
        self._beats.take(beats, now)

    def on_known(self, node: str, version: int) -> None:
        """Note the version of the list that a node knows."""
        self._known[node] = max(version, self._known.get(node, 0))

    def on_contact(self, at: float) -> None:
        """Note when the leader's store has answered last."""
        self._contact = max(at, self._contact)

    def on_store_ended(self) -> None:
        """Note that the leader's store has closed the connection."""
        self._store_ended = True

    def on_neighbour(self, node: str, heard: float | None) -> None:
        """Note when a neighbour has answered last; None: it refuses connections."""
        if node not in self._heard:
            return
        if heard is None:
            self._noticed[node] = "ended"
        elif heard > self._heard[node]:
            self._heard[node] = heard
            self._noticed.pop(node, None)

    def on_accusation(self, signs: Mapping[str, Sign], now: float) -> None:
        """Take what a node has noticed of its neighbours."""
        for node, sign in signs.items():
            if node in self.nodes:
                self._accused[node] = (sign, now)

    def on_answers(self, answers: Mapping[str, bool | None], now: float) -> None:
        """Take the answers of nodes that were asked: True, False if they refuse, None if they are silent."""
        self._answers |= {node: (answer, now) for node, answer in answers.items()}
        for node in [node for node, answer in answers.items() if answer is False]:
            self.ended.setdefault(node, now)

    # --- what follows from it -----------------------------------------------------------------------------------------

    def check(self, now: float) -> list[Action]:
        """Return what to do now."""
        actions: list[Action] = []
        if now - self._checked > self._silence:
            self._woke = now
        self._checked = now
        self._watch_neighbours(now, actions)
        if self.phase == "searching":
            self._go_on_searching(now, actions)
        elif self.phase == "electing" and self._woke is not None:  # the reports that came meanwhile are old
            actions.append(self._left_out(self._lost))
        elif self.leads:
            self._find_lost(now, actions)
            if (self.gone or self.new) and self.phase == "settled":
                self._look_for_agreement(actions)
        else:
            self._watch_leader(now, actions)
        return actions

    def _enter_store(self, now: float) -> None:
        self._contact, self._suspected, self._store_ended = now, None, False
        self._reported = {}
        self._beats.watch([node for node in self.nodes if node != self.own] if self.leads else [], now)

    def _follow_ring(self, now: float) -> None:
        self._beats.watch([node for node in self.nodes if node != self.own] if self.leads else [], now)
        names = in_order(self.nodes)
        place = bisect.bisect_right(names, self.own)
        ring = names[place : place + _WATCHED] + names[:_WATCHED]
        self._watched = tuple([node for node in dict.fromkeys(ring) if node != self.own][:_WATCHED])
        self._heard = {node: self._heard.get(node, now) for node in self._watched}
        self._noticed = {node: sign for node, sign in self._noticed.items() if node in self._heard}
        self._reported = {node: sign for node, sign in self._reported.items() if node in self._heard}
        self._accused = {node: sign for node, sign in self._accused.items() if node in self.nodes}

    def _watch_neighbours(self, now: float, actions: list[Action]) -> None:
        if self._watched != self._watching:
            self._watching = self._watched
            actions.append(Watch(self._watched))
        for node, heard in self._heard.items():
            if now - heard > self._silence and node not in self._noticed:
                self._noticed[node] = "silent"
        news = {node: sign for node, sign in self._noticed.items() if self._reported.get(node) != sign}
        self._reported = dict(self._noticed)
        if self.leads:
            self.on_accusation(news, now)
        elif others := {node: sign for node, sign in news.items() if node != self.leader}:
            actions.append(Accuse(others))

    def _find_lost(self, now: float, actions: list[Action]) -> None:
        """Report the nodes that have ended or are silent; while this one is elected only those that have ended."""
        if now < self.looks_at:
            return
        self._looked = now
        late = self._beats.silent(SUSPECT_SECONDS + 2 * self.period, now)
        gone = set(self._beats.silent(self._silence + 2 * self.period, now))
        overdue = self._beats.silent(self._silence + self.period, now)
        gone |= {node for node in overdue if self._is_unanswered(node, now)}
        suspects = [node for node in dict.fromkeys([*late, *self._accused]) if node in self.nodes and node != self.own]
        if asked := tuple(node for node in suspects if node not in gone):
            actions.append(Ask(asked))
        for node in [*self._accused]:
            if self._answered(node, since=self._accused[node][1]) is True:
                del self._accused[node]  # the neighbour alone does not reach it
        lost = sorted(node for node in self.ended if node in self.nodes)
        if self.phase == "settled":
            lost += [node for node in suspects if node not in lost and (node in gone or self._is_convicted(node, now))]
        if not lost:
            return
        alive = self.nodes.keys() - set(lost)
        if self.phase == "settled" and not self._may_continue(alive):
            actions.append(self._split(lost))
            return
        self._leave_out(lost, now)
        actions.append(Lost(tuple(lost), tuple(node for node in lost if node in self._surely_ended)))
        if beside := self._beside(lost):
            actions.append(Ask(beside))

    def _beside(self, lost: Iterable[str]) -> tuple[str, ...]:
        """Return nodes on both sides of lost ones, five times as many: what has ended one may have ended them, too.

        Of a rack of 64 only three are watched by nodes that are left. With the questions to 15 on each side of
        them, and then to 75, all are found in three rounds, instead of three in each.
        """
        names = in_order(self.nodes)
        gaps = Counter(bisect.bisect_left(names, node) for node in lost)
        ranges = (range(place - _BESIDE * count, place + _BESIDE * count) for place, count in gaps.items())
        numbers = {number % len(names) for numbers in ranges for number in numbers[: len(names)]}
        return tuple(names[number] for number in sorted(numbers) if names[number] != self.own)

    def quorum(self) -> Quorum:
        """Return the nodes of which enough have to come when all gather again."""
        return Quorum(self.nodes, (tuple(self.nodes), tuple(self._before)), self.ended, self.own)

    @property
    def _surely_ended(self) -> set[str]:
        """The nodes that have ended and cannot have gone on without this one.

        If the leader is only silent the others may have gone on with it, and ended because the run has; or with the
        next one, if this node learned late that they had ended.
        """
        if self.phase == "settled":
            return set(self.ended)
        early = {node for node, at in self.ended.items() if at < self._alone_at}
        return early if self._lost in early else set()

    def _may_continue(self, alive: Collection[str]) -> bool:
        """Whether these nodes are enough of the list, and of the one before that enough others know of."""
        lists = [self.nodes, self._before] if self.gone or self.new else [self.nodes]
        return all(may_continue(members, alive, self.ended, self.leader) for members in lists)

    @property
    def _before(self) -> list[str]:
        """The nodes of the list before the changes that too few others may know."""
        members = [node for node in self.nodes if node not in self.new] if self.new else [*self.nodes]
        return [*members, *(node for node in self.gone if node not in self.nodes and node not in self.new)]

    def _look_for_agreement(self, actions: list[Action]) -> None:
        """Let a version of the list count once enough nodes of the one before know it."""
        changes = [*self.gone.values(), *self.new.values()]
        for version in sorted({int(change) for change in changes if change <= self.version}, reverse=True):
            knowing = {self.own, *(node for node, known in self._known.items() if known >= version)}
            if self._may_continue(knowing):
                self.agree(version)
                actions.append(Agreement(version))
                return

    def _answered(self, node: str, since: float) -> bool | None:
        answer, at = self._answers.get(node, (None, -1.0))
        return answer if at >= since else None

    def _is_unanswered(self, node: str, now: float) -> bool:
        """Whether a node has not answered the last question, which is not old."""
        answer, at = self._answers.get(node, (True, now))
        return answer is None and now - at <= 3 * SUSPECT_SECONDS

    def _is_convicted(self, node: str, now: float) -> bool:
        """Whether a node that a neighbour finds lost has not answered the leader either."""
        if node not in self._accused:
            return False
        since = self._accused[node][1]
        answer, at = self._answers.get(node, (None, -1.0))
        return answer is not True and (at >= since or now - since > 2 * SUSPECT_SECONDS)

    def _split(self, lost: Collection[str]) -> Stop:
        hosts = sorted({self.nodes[node]["host"] for node in lost})
        more = f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
        return Stop(
            f"lost contact with {', '.join(hosts[:8])}{more}, which may continue the run; "
            "this node stops to avoid a split.",
            "Half of the nodes, or more, must see each other, with the one that decides among them.",
        )

    # --- another leader -----------------------------------------------------------------------------------------------

    def _watch_leader(self, now: float, actions: list[Action]) -> None:
        if self.phase == "unconfirmed" and now > self._confirm_by:
            actions.append(self._left_out(self.leader))
            return
        silence = now - self._contact
        ended = self._store_ended or self._noticed.get(self.leader) == "ended"
        if not ended and silence <= SUSPECT_SECONDS + 2 * self.period:
            self._suspected = None
            if self._woke is not None and now - self._woke > self._silence:  # else it may not have said so yet
                self._woke = None
            return
        # A process that is killed closes its connections one after the other: its node may refuse a moment later.
        self._suspected = now if self._suspected is None else self._suspected
        answer = self._answered(self.leader, self._suspected)
        if answer is not False and silence <= 1.1 * self._silence + 2 * self.period + _LEASE_SECONDS:
            actions.append(Ask((self.leader,)))
            return
        if self.phase == "unconfirmed" and self._uncertain:  # the run may have ended without this node
            actions.append(self._left_out(self.leader))
            return
        if self.phase == "settled":
            self._uncertain = set()
            # The others have left this one out by now, and may have ended because the run has.
            self._is_stale = silence > self._silence
            self._alone_at = self._contact + election_seconds(self._silence, len(self.nodes))
        if answer is not False:
            self._uncertain.add(self.leader)
        self._lost = self.leader
        self._accused, self._suspected = {}, None
        self._leave_out([self.leader], now)
        self.phase, self._asked = "searching", ()
        self._go_on_searching(now, actions)

    def _go_on_searching(self, now: float, actions: list[Action]) -> None:
        """Ask the nodes that lead before this one would; move to the first that answers."""
        names = in_order(self.nodes)
        if self._asked:
            answers = {node: self._answers.get(node) for node in self._asked if node in self.nodes}
            if any(answer is None for answer in answers.values()) and now < self._asking_until:
                return
            first = next((node for node, answer in answers.items() if answer is not None and answer[0]), None)
            silent = {node for node, answer in answers.items() if answer is None or answer[0] is None}
            if first is not None:
                self._uncertain |= {node for node in silent if node < first}
                self._move(first, now, actions)
                return
            self._uncertain |= silent
        number = max(_FIRST_ASKED, 4 * len(self._asked))
        before = itertools.islice(names, bisect.bisect_left(names, self.own))
        possible = (node for node in before if node not in self.ended and node not in self._uncertain)
        rest = tuple(itertools.islice(possible, number))
        if not rest and (self._woke is not None or (self._is_stale and self._lost in self.ended)):
            actions.append(self._left_out(self._lost))
            return
        if not rest:
            self._move(self.own, now, actions)
            return
        self._asked = rest
        self._answers = {node: answer for node, answer in self._answers.items() if node not in self._asked}
        self._asking_until = now + 2 * SUSPECT_SECONDS
        actions.append(Ask(self._asked))

    def _move(self, leader: str, now: float, actions: list[Action]) -> None:
        self.leader, self._asked = leader, ()
        self.term += 1
        self.phase = "electing" if self.leads else "unconfirmed"
        self._confirm_by = now + election_seconds(self._silence, len(self.nodes)) + self._silence + _CONFIRM_SECONDS
        self._enter_store(now)
        actions.append(
            Move(leader, self._lost, self.term, tuple(sorted(self._surely_ended)), tuple(self.gone), tuple(self.new))
        )

    def _left_out(self, node: str) -> Stop:
        if node == self._lost:
            text = "lost contact with the node that decided for too long; the others may have gone on or finished"
        else:
            host = self.nodes[node]["host"]
            text = f"lost contact with the node that decided, and {host}, which may see it still, does not take over"
        return Stop(f"{text}.", "This node stops to avoid a split. Start it again: it can come late.")
