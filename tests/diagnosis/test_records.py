"""Torch's records of nccl as calls: batches of messages, their numbers at both ends, backward passes on GPUs."""

from __future__ import annotations

import pytest

from phalanx.diagnosis.blame import find_blame
from phalanx.diagnosis.calls import Call, RankCalls
from phalanx.diagnosis.overdue import _is_late
from phalanx.diagnosis.records import to_calls, with_batch_ends

FRAMES = [
    {"name": "isend", "filename": "/usr/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", "line": 9},
    {"name": "step", "filename": "/home/me/train.py", "line": 31},
]


def record(name, *, collective=0, p2p=0, number=1, group="0", done=True, **more):
    """Return a record as `_dump_nccl_trace` has it, called `number` seconds after the first."""
    return {
        "frames": FRAMES,
        "record_id": number,
        "pg_id": 0,
        "process_group": (group, "default_pg"),
        "thread_name": "python",
        "collective_seq_id": collective,
        "p2p_seq_id": p2p,
        "op_id": number,
        "profiling_name": name,
        "time_created_ns": int((1000 + number) * 1e9),
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "completed" if done else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": done,
        "timeout_ms": 3000,
        "is_p2p": "send" in name or "recv" in name,
        **more,
    }


def batch(names, *, number, p2p, done):
    """Return a batch of messages: torch never notes an end for them, but for a record that follows them."""
    made = [record(name, p2p=p2p, number=number + index, done=False) for index, name in enumerate(names)]
    end = record("nccl:coalesced", p2p=p2p, number=number + len(names), done=done, is_p2p=True, frames=[])
    return [*made, {**end, "input_sizes": [], "input_dtypes": []}]


def calls_of(rank, records, messages):
    made, groups = to_calls(records, {"0": [0, 1]}, messages)
    calls = tuple(Call(**call) for call in sorted(made, key=lambda call: call["began"]))
    return RankCalls(rank, calls, {name: tuple(ranks) for name, ranks in groups.items()}, position="is at data.py:5")


def test_the_messages_of_a_batch_end_with_it():
    records = [
        *batch(["nccl:send 0->1", "nccl:recv 0<-1"], number=1, p2p=1, done=True),
        *batch(["nccl:send 0->1", "nccl:recv 0<-1"], number=4, p2p=2, done=False),
    ]
    found = with_batch_ends(records)
    assert [(each["profiling_name"], each["retired"]) for each in found] == [
        ("nccl:send 0->1", True), ("nccl:recv 0<-1", True), ("nccl:send 0->1", False), ("nccl:recv 0<-1", False),
    ]  # fmt: skip


def test_the_collectives_of_a_batch_are_one():
    members = [record("nccl:all_gather", collective=5, number=number, done=False) for number in (1, 2)]
    end = record("nccl:ALLGATHER_coalesced", collective=5, number=3)
    alone = record("nccl:all_reduce", collective=6, number=4)
    assert with_batch_ends([*members, end, alone]) == [end, alone]


def test_a_message_that_the_other_end_has_not_called_is_found_after_more_messages_than_are_kept():
    """The records keep the last messages of each end, which count differently; all were counted when they began."""
    sent = [record("nccl:send 0->1", p2p=40 + number, number=number, done=number < 3) for number in (1, 2, 3)]
    taken = [record("nccl:recv 1<-0", p2p=7 + number, number=number) for number in (1, 2)]
    ranks = [calls_of(0, sent, {("0", "send", 1): 1203}), calls_of(1, taken, {("0", "recv", 0): 1202})]
    assert str(find_blame(ranks)) == (
        "rank 1 has called no recv for send to rank 1 #1203 of (4,) float32 that rank 0 called at train.py:31; "
        "it is at data.py:5"
    )


@pytest.mark.parametrize("first", ["send", "recv"])
def test_a_batch_is_not_taken_for_a_circle_and_single_messages_in_this_order_are(first):
    names = {"send": ("nccl:send {0}->{1}", "nccl:recv {0}<-{1}"), "recv": ("nccl:recv {0}<-{1}", "nccl:send {0}->{1}")}
    counts = [{("0", "send", 1): 1, ("0", "recv", 1): 1}, {("0", "send", 0): 1, ("0", "recv", 0): 1}]
    given = [[name.format(rank, 1 - rank) for name in names[first]] for rank in (0, 1)]
    batches = [calls_of(rank, batch(given[rank], number=1, p2p=1, done=False), counts[rank]) for rank in (0, 1)]
    assert find_blame(batches) is None
    single = [
        [record(name, p2p=number, number=number, done=False) for number, name in enumerate(given[rank], 1)]
        for rank in (0, 1)
    ]
    found = find_blame([calls_of(rank, single[rank], counts[rank]) for rank in (0, 1)])
    assert found is not None
    assert "they wait for each other" in found.cause


def test_a_collective_of_a_backward_pass_on_a_gpu_has_no_line_and_says_so():
    given = record("nccl:all_reduce", collective=1, thread_name="pt_autograd_0", frames=[])
    ((call,), _) = to_calls([given], {"0": [0, 1]}, {})
    assert (call["where"], call["done"], call["op"]) == ("a backward pass", True, "all_reduce")


def test_an_operation_is_late_after_its_own_timeout():
    given = record("nccl:all_reduce", collective=1, done=False)
    assert [_is_late(given, 1001 + seconds) for seconds in (2.9, 3.1)] == [False, True]
