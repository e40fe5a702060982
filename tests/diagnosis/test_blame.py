"""The comparison of all ranks' collectives: which rank is blamed, and in which words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phalanx.diagnosis.blame import find_blame
from phalanx.diagnosis.calls import Call, RankCalls
from phalanx.diagnosis.inquiry import Inquiry
from phalanx.launch.agent_messages import Calls, CallsWanted
from phalanx.observe.format import ranks_text

STEP = [("all_reduce", "(68,) float32", "train.py:10"), ("all_reduce", "(4,) float32", "train.py:12")]
"""The collectives of a step: the gradients and a metric."""


def calls(entries, *, group="0", pending=True, first=1):
    """Return calls in their order; the last one is not done."""
    last = len(entries) - 1
    return [
        Call(group, first + index, op, detail, where, float(index), done=not (pending and index == last))
        for index, (op, detail, where) in enumerate(entries)
    ]


def rank(number, entries, *, size=4, position="is at train.py:12 in main", **more):
    groups = {"0": tuple(range(size))}
    return RankCalls(number, tuple(calls(entries)), groups, position=position, **more)


def test_a_rank_that_never_comes_is_named_with_the_line_where_the_others_wait():
    ranks = [rank(r, STEP * 3) for r in range(3)] + [rank(3, STEP * 2, position="is at dataloader.py:31 in load")]
    assert str(find_blame(ranks)) == (
        "rank 3 never entered all_reduce #5 of (68,) float32 that ranks 0-2 entered at train.py:10; "
        "it is at dataloader.py:31 in load"
    )


def test_ranks_that_go_on_normally_are_not_blamed():
    entries = tuple(calls(STEP * 3, pending=False))
    groups = {"0": (0, 1)}
    assert find_blame([RankCalls(0, entries, groups), RankCalls(1, entries[:-1], groups)]) is None


def test_a_rank_that_left_out_a_call_is_named_with_both_lines():
    skipped = [*STEP * 2, STEP[0], STEP[0]]
    found = find_blame([rank(r, [*STEP * 2, *STEP]) for r in range(3)] + [rank(3, skipped)])
    assert str(found) == (
        "rank 3 never entered all_reduce #6 of (4,) float32 that ranks 0-2 entered at train.py:12; "
        "it went on to all_reduce of (68,) float32 at train.py:10"
    )


@pytest.mark.parametrize("answered", [True, False])
def test_a_rank_that_waits_too_and_is_late_to_answer_is_not_blamed(answered):
    position = "is at train.py:31 in load"
    guilty = RankCalls(3, answered=False, position=position)
    if answered:
        guilty = RankCalls(3, tuple(calls(STEP * 2, pending=False)), {"0": (0, 1, 2, 3)}, position=position)
    found = find_blame([RankCalls(0, answered=False, waits=True), *(rank(r, STEP * 3) for r in (1, 2)), guilty])
    assert found is not None
    assert (found.rank, found.details) == (3, ())
    assert "train.py:31 in load" in found.cause


@pytest.mark.parametrize("guilty", [0, 1])
def test_of_two_ranks_the_one_is_blamed_that_does_what_it_never_did_before(guilty):
    usual, odd = STEP * 3, [*STEP * 2, STEP[0], ("all_gather", "(2,) float32", "train.py:40")]
    ranks = [rank(r, odd if r == guilty else usual, size=2) for r in range(2)]
    assert str(find_blame(ranks)) == (
        f"rank {guilty} called all_gather of (2,) float32 at train.py:40 as #6, where rank {1 - guilty} called "
        "all_reduce of (4,) float32 at train.py:12"
    )


@pytest.mark.parametrize("detail", ["(5,) float32", "(4,) float64"])
def test_another_shape_or_dtype_is_shown_beside_the_right_one(detail):
    odd = [*STEP * 2, STEP[0], ("all_reduce", detail, "train.py:12")]
    found = find_blame([rank(r, odd if r == 2 else STEP * 3) for r in range(4)])
    assert str(found) == (
        f"rank 2 called all_reduce #6 with {detail} at train.py:12, "
        "ranks 0, 1, 3 called it with (4,) float32 at train.py:12"
    )


def test_uneven_gathers_that_ended_are_not_a_mismatch():
    def entries(r):
        return [("all_gather", f"({r},) float32", "train.py:5"), *STEP]

    ranks = [rank(r, entries(r)) for r in range(3)] + [rank(3, entries(3)[:2])]
    found = find_blame(ranks)
    assert (found.rank, "never entered all_reduce #3" in found.cause) == (3, True)


@pytest.mark.parametrize("position", ["is stopped (SIGSTOP or a debugger)", "ended with exit code 0"])
def test_a_rank_that_cannot_answer_is_blamed(position):
    ranks = [rank(r, STEP) for r in (0, 1, 3)] + [RankCalls(2, answered=False, position=position)]
    assert str(find_blame(ranks)) == (
        f"rank 2 does not answer; it {position}; "
        "ranks 0, 1, 3 wait for it in all_reduce #2 of (4,) float32 at train.py:12"
    )


def test_an_error_marks_calls_as_done_that_are_not():
    failed = [RankCalls(r, tuple(calls(STEP, pending=False)), {"0": (0, 1, 2)}, failed=True) for r in (0, 1)]
    found = find_blame([*failed, RankCalls(2, tuple(calls(STEP[:1], pending=False)), {"0": (0, 1, 2)})])
    assert (found.rank, "never entered all_reduce #2" in found.cause) == (2, True)


@pytest.mark.parametrize(
    ("odd", "guilty"), [("(5,) float32", 1), ("(4,) float32", 0)], ids=["the peer changed", "the aborted rank changed"]
)
def test_of_a_rank_that_a_library_aborted_only_the_peers_calls_are_known(odd, guilty):
    entries = [*STEP * 2, STEP[0], ("all_reduce", odd, "train.py:12")]
    aborted = RankCalls(0, answered=False, aborted=True, position="was killed by SIGABRT (signal 6)")
    assert find_blame([aborted, rank(1, entries, size=2)]).rank == guilty


def test_the_cause_is_found_through_groups_that_wait_for_each_other():
    """64 ranks in 8 groups of data parallelism and 8 of tensor parallelism; one rank sleeps, and all others wait."""
    size, width, asleep = 64, 8, 43
    rows = [tuple(range(begin, begin + width)) for begin in range(0, size, width)]
    columns = [tuple(range(begin, size, width)) for begin in range(width)]
    ranks = []
    for number in range(size):
        row, column = rows[number // width], columns[number % width]
        groups = {f"row {row[0]}": row, f"column {column[0]}": column}
        inner = calls([("all_gather", "(8,) float32", "model.py:7")] * 3, group=f"row {row[0]}")
        outer = calls([("all_reduce", "(16,) float32", "train.py:20")] * 2, group=f"column {column[0]}", pending=False)
        if number == asleep:  # it is asleep before the third gather of its row
            made = (*inner[:2], *outer)
        elif asleep in row:
            made = (*inner, *outer)
        else:  # the other rows have gathered, and wait in their columns for the row that is late
            last = Call(f"column {column[0]}", 3, "all_reduce", "(16,) float32", "train.py:20", 9.0, done=False)
            done = Call(f"row {row[0]}", 3, "all_gather", "(8,) float32", "model.py:7", 2.0, done=True)
            made = (*inner[:2], done, *outer, last)
        ranks.append(RankCalls(number, made, groups, position="is at data.py:3 in read"))
    assert str(find_blame(ranks)) == (
        "rank 43 never entered all_gather #3 of (8,) float32 that ranks 40-42, 44-47 entered at model.py:7; "
        "it is at data.py:3 in read"
    )


def test_ranks_that_wait_for_each_other_in_two_groups_are_reported():
    groups = {"a": (0, 1), "b": (0, 1)}
    first = RankCalls(0, (Call("a", 1, "all_reduce", "(1,) float32", "train.py:5", 1.0, done=False),), groups)
    second = RankCalls(1, (Call("b", 1, "all_reduce", "(1,) float32", "train.py:9", 2.0, done=False),), groups)
    assert "never entered all_reduce #1" in str(find_blame([first, second]))


def test_records_survive_the_way_to_another_machine():
    whole = rank(2, STEP * 40, failed=True)
    part = RankCalls.from_message(whole.to_message(10))
    assert part.calls == whole.calls[-10:]
    assert (part.rank, part.groups, part.failed, part.position) == (2, whole.groups, True, whole.position)


def test_ranks_in_words():
    assert [ranks_text(ranks) for ranks in ([3], [0, 1], [5, 0, 1, 2], range(10000))] == [
        "rank 3",
        "ranks 0, 1",
        "ranks 0-2, 5",
        "ranks 0-9999",
    ]


def test_a_failure_that_asks_while_a_notice_waits_for_answers_gets_them_too():
    node = SimpleNamespace(node_rank=0, num_nodes=2)
    group = SimpleNamespace(states=[], signal=lambda number, states: None)
    evidence = SimpleNamespace(collect_calls=lambda states, asked: [])
    rendezvous = SimpleNamespace(
        has_other_nodes=True, ask_calls=lambda: None, send_calls=lambda wanted, node, calls: None
    )
    later: list[object] = []
    schedule = lambda seconds, call: later.append(call)  # noqa: E731
    facts = {"node": node, "group": group, "rendezvous": rendezvous, "later": schedule}
    inquiry = Inquiry(SimpleNamespace(**facts), evidence)
    answered: list[str] = []
    inquiry.find_blame(lambda blame: answered.append("failure"))
    inquiry.find_blame(lambda blame: answered.append("notice"))
    inquiry.answer_question(CallsWanted(7, "n", is_own=True))
    inquiry.handle_answer(Calls(7, 1, []))
    for call in later:  # the limits of time
        call()
    assert answered == ["failure", "notice"]


def message(own, op, peer, *, number=1, done=False, where="ring.py:7"):
    """Return what a rank knows that has sent to or received from another."""
    sender, receiver = (own, peer) if op == "send" else (peer, own)
    words = f"send to rank {peer}" if op == "send" else f"recv from rank {peer}"
    call = Call(f"0 {sender}>{receiver} 0", number, words, "(4,) float32", where, 1.0 + own, done, peer=peer)
    return RankCalls(own, (call,), {call.group: (sender, receiver)}, position="is at ring.py:9 in main")


def test_ranks_that_all_send_first_are_named_with_their_lines():
    found = find_blame([message(rank, "send", (rank + 1) % 3) for rank in range(3)])
    assert str(found) == (
        "rank 0 waits in send to rank 1 #1 of (4,) float32 at ring.py:7, rank 1 in send to rank 2 #1 of (4,) float32 "
        "at ring.py:7, rank 2 in send to rank 0 #1 of (4,) float32 at ring.py:7: they wait for each other"
    )


def test_a_rank_that_never_receives_is_named_and_a_message_on_its_way_is_not():
    idle = RankCalls(1, position="is at train.py:31 in load")
    assert str(find_blame([message(0, "send", 1), idle])) == (
        "rank 1 has called no recv for send to rank 1 #1 of (4,) float32 that rank 0 called at ring.py:7; it is at "
        "train.py:31 in load"
    )
    assert find_blame([message(0, "send", 1), message(1, "recv", 0)]) is None
    assert find_blame([message(0, "send", 1, done=True), idle]) is None


def test_a_message_and_a_collective_that_wait_for_each_other():
    reduces = calls([("all_reduce", "(4,) float32", "train.py:10")])
    groups = {"0": (0, 1)}
    waits = message(1, "recv", 0)
    ranks = [RankCalls(0, tuple(reduces), groups), RankCalls(1, waits.calls, {**groups, **waits.groups})]
    assert str(find_blame(ranks)) == (
        "rank 0 waits in all_reduce #1 of (4,) float32 at train.py:10, rank 1 in recv from rank 0 #1 of (4,) float32 "
        "at ring.py:7: they wait for each other"
    )


def queued(rank_number, *groups_of_calls):
    """Return a rank over nccl that has queued calls of which none has ended: (group, its ranks, op, peer) each."""
    made = tuple(
        Call(name, 1, op, "(4,) float32", f"train.py:{10 + index}", float(index), done=False, peer=peer)
        for index, (name, _, op, peer) in enumerate(groups_of_calls)
    )
    return RankCalls(rank_number, made, {name: ranks for name, ranks, _, _ in groups_of_calls}, position="is at x.py:1")


def test_messages_that_both_ends_have_queued_in_an_order_that_cannot_end_are_a_circle():
    there, back = ("0 0>1 nccl", (0, 1)), ("0 1>0 nccl", (0, 1))
    ranks = [
        queued(0, (*back, "recv from rank 1", 1), (*there, "send to rank 1", 1)),
        queued(1, (*there, "recv from rank 0", 0), (*back, "send to rank 0", 0)),
    ]
    assert str(find_blame(ranks)) == (
        "rank 0 waits in recv from rank 1 #1 of (4,) float32 at train.py:10, "
        "rank 1 in recv from rank 0 #1 of (4,) float32 at train.py:10: they wait for each other"
    )


def test_a_rank_that_has_queued_calls_of_two_groups_in_another_order_is_in_the_way():
    """Each of the two waits in a group for the other, which the GPU reaches only after its own first call."""
    first, second = ("a", (0, 1)), ("b", (0, 1))
    ranks = [
        queued(0, (*first, "all_reduce", None), (*second, "all_reduce", None)),
        queued(1, (*second, "all_reduce", None), (*first, "all_reduce", None)),
    ]
    found = find_blame(ranks)
    assert found is not None
    assert "never entered all_reduce #1 of (4,) float32 that rank" in found.cause
