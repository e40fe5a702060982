"""Compare the collectives of all ranks: the first one on which they disagree, the rank to blame, and one sentence.

Example: three ranks, each with its last calls in one group, and where it is.

    rank 0    all_reduce #4, done    all_reduce #5 at train.py:10, not done
    rank 1    all_reduce #4, done    all_reduce #5 at train.py:10, not done
    rank 2    all_reduce #4, done                                              is at data.py:31 in load

No number has two different calls, so there is no mismatch. Ranks 0 and 1 wait in #5; rank 2 has not entered it, and
waits in no other call: "rank 2 never entered all_reduce #5 that ranks 0, 1 entered at train.py:10; it is at data.py:31
in load". If rank 2 had called a broadcast as #5, it would be blamed for that: of the calls with one number the one that
fewer ranks made is wrong. If rank 2 waited in another group for rank 3, which does not wait, rank 3 would be blamed.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.diagnosis.calls import Call, RankCalls
from phalanx.observe.format import ranks_text

_UNEVEN = ("all_gather", "all_to_all", "gather", "scatter", "reduce_scatter", "alltoall", "allgather")
"""Collectives whose shapes may differ between ranks without an error."""
_LISTED = 4

Key = tuple[str, tuple[int, ...]]
"""A group: its name and its ranks."""
Calls = Mapping[int, Mapping[int, Call]]
"""The calls of one group by rank and number."""
Wait = tuple[Call, list[int], list[int]]
"""A call, the ranks that wait in it, and those that have not entered it."""


@dataclass(frozen=True)
class Blame:
    """The rank that the others wait for, or that called something else, and why."""

    rank: int
    cause: str
    """The sentence, without the rank's name at its beginning."""
    details: tuple[str, ...] = ()
    since: float = 0.0
    """When the first rank began to wait, in seconds since the epoch."""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.cause}"


def find_blame(ranks: Sequence[RankCalls]) -> Blame | None:
    """Return the rank to blame; None where no rank waits in a collective and all called the same."""
    by_rank = {calls_of_rank.rank: calls_of_rank for calls_of_rank in ranks}
    groups = _by_group(ranks)
    mismatches = [
        mismatch for key, calls in groups.items() if (mismatch := _find_mismatch(by_rank, key, calls)) is not None
    ]
    if mismatches:
        return min(mismatches, key=lambda mismatch: mismatch.since)
    # Where every call has been entered, the GPU may not have come to the later ones: it runs them in their order.
    return _find_missing(by_rank, groups) or _find_missing(
        by_rank, _by_group([_drop_queued(calls_of_rank) for calls_of_rank in ranks])
    )


def _drop_queued(rank: RankCalls) -> RankCalls:
    """Leave out the calls that a rank has made after the first one that has not ended."""
    first = min((call.began for call in rank.calls if not call.done), default=math.inf)
    return dataclasses.replace(rank, calls=tuple(call for call in rank.calls if call.done or call.began <= first))


def _by_group(ranks: Sequence[RankCalls]) -> dict[Key, dict[int, dict[int, Call]]]:
    """Return each group's calls by rank and number; only ranks that have answered."""
    calls_of: dict[Key, dict[int, dict[int, Call]]] = {}
    for rank_calls in ranks:
        for name, members in rank_calls.groups.items():
            calls_of.setdefault((name, members), {})[rank_calls.rank] = {}
        for call in rank_calls.calls:
            if (members_of := rank_calls.groups.get(call.group)) is not None:
                calls_of[call.group, members_of][rank_calls.rank][call.number] = call
    return calls_of


# --- ranks that call something else -----------------------------------------------------------------------------------


def _find_mismatch(by_rank: Mapping[int, RankCalls], key: Key, calls: Calls) -> Blame | None:
    """Return who called another collective first in a group: the smaller part of the ranks."""
    with_calls = {rank: by_number for rank, by_number in calls.items() if by_number}
    is_pair = any(call.peer is not None for by_number in with_calls.values() for call in by_number.values())
    if len(with_calls) < 2 or is_pair:  # one rank sends, the other receives: in any shape of that many bytes
        return None
    last = {rank: max(by_number) for rank, by_number in with_calls.items()}
    begin = max(min(by_number) for by_number in with_calls.values())
    for number in range(begin, sorted(last.values())[-2] + 1):
        entered = {rank: by_number[number] for rank, by_number in with_calls.items() if number in by_number}
        is_end = any(last[rank] == number for rank in entered)
        kinds = {rank: _kind(call, exact=is_end) for rank, call in entered.items()}
        if len(set(kinds.values())) > 1:
            return _explain_mismatch(by_rank, calls, entered, kinds)
    return None


def _kind(call: Call, *, exact: bool) -> tuple[str, str]:
    may_differ = call.op.split(" ")[0].startswith(_UNEVEN) and not exact
    return call.op, "" if may_differ else call.detail


def _explain_mismatch(
    by_rank: Mapping[int, RankCalls],
    calls: Calls,
    entered: Mapping[int, Call],
    kinds: Mapping[int, tuple[str, str]],
) -> Blame:
    counts = Counter(kinds.values())

    def doubt(rank: int) -> tuple[int, bool, int]:
        return -counts[kinds[rank]], not _is_usual(calls[rank], entered[rank]), rank

    guilty = max(entered, key=doubt)
    guilty_call = entered[guilty]
    usual = min(entered, key=doubt)
    peers = [rank for rank in entered if kinds[rank] == kinds[usual]]
    right = entered[usual]
    cause = _difference(guilty_call, right, peers, skips=_comes_later(calls[usual], right, guilty_call))
    remaining = [rank for rank in entered if rank != guilty and rank not in peers]
    lines = [f"rank {rank} called {entered[rank].text} at {entered[rank].where}" for rank in remaining[:_LISTED]]
    return Blame(guilty, cause, tuple(lines), min(call.began for call in entered.values()))


def _difference(call: Call, right: Call, peers: Sequence[int], *, skips: bool) -> str:
    """Say how a call differs from that of the other ranks."""
    them = f"{ranks_text(peers)} called"
    if skips and call.where != right.where:
        entered = f"{_name_of(right)} that {ranks_text(peers)} entered at {right.where}"
        return f"never entered {entered}; it went on to {call.text} at {call.where}"
    if call.op == right.op and call.detail != right.detail:
        return (
            f"called {call.op} #{call.number} with {call.detail or 'no tensor'} at {call.where}, "
            f"{them} it with {right.detail or 'no tensor'} at {right.where}"
        )
    return f"called {call.text} at {call.where} as #{call.number}, where {them} {right.text} at {right.where}"


def _name_of(call: Call) -> str:
    bucket = f" (bucket {call.bucket})" if call.bucket else ""
    return f"{call.op} #{call.number}{bucket}" + (f" of {call.detail}" if call.detail else "")


def _identity(call: Call) -> tuple[str, str, str]:
    return call.op, call.detail, call.where


def _comes_later(calls: Mapping[int, Call], first: Call, second: Call) -> bool:
    """Whether a call like `second` came right after one like `first` before: then `first` was left out now."""
    pairs = ((calls[n], calls.get(n + 1)) for n in calls if n + 1 < first.number)
    return any(
        _identity(one) == _identity(first) and two is not None and _identity(two) == _identity(second)
        for one, two in pairs
    )


def _is_usual(calls: Mapping[int, Call], call: Call) -> bool:
    """Whether a rank made this call after the same call as before: of two ranks, the other one is at fault."""
    before = calls.get(call.number - 1)
    if before is None:
        return False
    pair = (_identity(before), _identity(call))
    return any(
        (_identity(calls[n - 1]), _identity(calls[n])) == pair for n in calls if n < call.number and n - 1 in calls
    )


# --- ranks that do not come -------------------------------------------------------------------------------------------


def _find_missing(
    by_rank: Mapping[int, RankCalls], groups: Mapping[Key, Mapping[int, Mapping[int, Call]]]
) -> Blame | None:
    """Follow who waits for which rank, to a rank that is waited for and does not wait itself."""
    waits = [wait for key, calls in groups.items() for wait in _waits(by_rank, key, calls)]
    if not waits:
        return None
    waiting = {rank for _, entered, _ in waits for rank in entered}
    roots = [wait for wait in waits if any(rank not in waiting for rank in wait[2])]
    if not roots and (circle := _find_circle(waits)) is not None:
        return circle
    call, entered, absent = min(roots or waits, key=lambda wait: wait[0].began)
    # Where all of them wait for each other, the one that has made fewer calls is the one behind.
    idle = [rank for rank in absent if rank not in waiting] or list(absent)
    guilty = min(idle, key=lambda rank: (*_innocence(by_rank.get(rank)), rank))
    if guilty in by_rank and by_rank[guilty].aborted:
        for rank in entered:
            if (other := _has_changed(by_rank[rank].calls, call.group, call.number)) is not None:
                cause = f"called {_name_of(other)} at {other.where}, unlike before; rank {guilty} aborted in it"
                return Blame(rank, cause, since=call.began)
    return Blame(guilty, _absence(call, entered, by_rank.get(guilty)), _bystanders(guilty, idle, by_rank), call.began)


def _waits(by_rank: Mapping[int, RankCalls], key: Key, calls: Calls) -> list[Wait]:
    """Return the call in which some ranks of a group wait."""
    last = {rank: max(by_number, default=0) for rank, by_number in calls.items()}
    pending = {number for rank, by_number in calls.items() for number in _pending(by_rank[rank], by_number, last[rank])}
    for number in sorted(pending):
        absent = [rank for rank in key[1] if last.get(rank, 0) < number]
        if absent:
            by_number = next(by_number[number] for by_number in calls.values() if number in by_number)
            behind = [last[rank] + 1 for rank in absent if rank in calls and by_number.peer is None]
            first = min(behind, default=number)  # messages may be waited for in any order
            entered = sorted(rank for rank, by_number in calls.items() if first in by_number)
            return [(calls[entered[0]][first], entered, [rank for rank in absent if last.get(rank, 0) < first])]
    return []


def _find_circle(waits: Sequence[Wait]) -> Blame | None:
    """Name the ranks that wait for each other, where point-to-point messages are among what they wait for."""
    by_rank = {rank: wait for wait in sorted(waits, key=lambda wait: -wait[0].began) for rank in wait[1]}
    rank, path = min(by_rank), list[int]()
    while rank not in path:
        path.append(rank)
        rank = min(by_rank[rank][2])
    circle = path[path.index(rank) :]
    if all(by_rank[member][0].peer is None for member in circle):
        return None
    first = circle.index(min(circle))
    circle = circle[first:] + circle[:first]
    lines = [f"in {_name_of(by_rank[member][0])} at {by_rank[member][0].where}" for member in circle]
    peers = ", ".join(f"rank {member} {line}" for member, line in list(zip(circle, lines, strict=True))[1:_LISTED])
    more = f" and {len(circle) - _LISTED} more ranks" if len(circle) > _LISTED else ""
    cause = f"waits {lines[0]}, {peers}{more}: they wait for each other"
    return Blame(circle[0], cause, since=min(by_rank[member][0].began for member in circle))


def _pending(rank: RankCalls, calls: Mapping[int, Call], last: int) -> list[int]:
    """Return the numbers of the calls that a rank has entered and not left."""
    is_end = rank.failed and bool(rank.calls) and rank.calls[-1] == calls.get(last)
    return [number for number, call in calls.items() if not call.done or (is_end and number == last)]


def _has_changed(calls: Sequence[Call], group: str, number: int) -> Call | None:
    """Return a rank's call where an earlier one from the same line had another shape or dtype, and none had this."""
    of_group = [call for call in calls if call.group == group]
    last = next(call for call in of_group if call.number == number)
    before = [
        call.detail for call in of_group if call.number < number and (call.op, call.where) == (last.op, last.where)
    ]
    return last if before and last.detail not in before else None


def _innocence(rank: RankCalls | None) -> tuple[bool, bool, int]:
    """Return what speaks for a rank: it waits itself, it answers, it has made many calls."""
    return (rank.waits, rank.answered, sum(call.number for call in rank.calls[-1:])) if rank else (False, False, 0)


def _absence(call: Call, entered: Sequence[int], guilty: RankCalls | None) -> str:
    position = guilty.position if guilty is not None else ""
    it_is = f"; it {position}" if position else ""
    collective = _name_of(call)
    if guilty is None or not guilty.answered:
        wait = "waits" if len(entered) == 1 else "wait"
        return f"does not answer{it_is}; {ranks_text(entered)} {wait} for it in {collective} at {call.where}"
    if call.peer is not None:
        counterpart = "recv" if call.op.startswith("send") else "send"
        return f"has called no {counterpart} for {collective} that {ranks_text(entered)} called at {call.where}{it_is}"
    return f"never entered {collective} that {ranks_text(entered)} entered at {call.where}{it_is}"


def _bystanders(guilty: int, idle: Sequence[int], by_rank: Mapping[int, RankCalls]) -> tuple[str, ...]:
    remaining = [rank for rank in idle if rank != guilty and not (rank in by_rank and by_rank[rank].waits)]
    lines = [
        f"rank {rank} did not enter it either; it {by_rank[rank].position}" for rank in remaining if rank in by_rank
    ]
    more = [f"and {len(remaining) - _LISTED} more ranks"] if len(remaining) > _LISTED else []
    return (*lines[:_LISTED], *more)
