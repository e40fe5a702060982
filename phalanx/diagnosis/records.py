"""The calls of this rank, from torch's flight recorder and the ring of Phalanx."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from phalanx.observe.call_ring import GRADIENTS, call_ring, pick_line
from phalanx.torch_compat import flight_records, group_ranks, is_done

_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Byte": "uint8",
    "Bool": "bool",
}
_MESSAGE = re.compile(r"nccl:(send|recv) (\d+)(?:->|<-)(\d+)")
_AUTOGRAD = "pt_autograd"
"""How torch names the threads of backward passes on GPUs, in which no frame of Python is."""

Record = Mapping[str, Any]
MessageKey = tuple[str, str, int]
"""A group's name, "send" or "recv", and the other rank in the group."""


class CallHistory:
    """Which calls of this process count: those since it joined its groups, whose names earlier ones may have had."""

    since: ClassVar[float] = 0.0
    messages: ClassVar[Counter[MessageKey]] = Counter()
    """How many messages were sent or requested over nccl since then: torch numbers them otherwise at each end."""

    @classmethod
    def begin(cls) -> None:
        """Forget what was called in earlier groups."""
        cls.since = time.time()
        cls.messages.clear()


def read_calls_here() -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
    """Return the calls of this process, the oldest first, and the ranks of each group by its name."""
    calls, groups = to_calls(flight_records(), group_ranks(), CallHistory.messages)
    ring = call_ring()
    if ring is not None:
        calls, groups = calls + ring.to_dicts(), {**groups, **ring.groups}
    return sorted(calls, key=lambda call: call["began"]), groups


def to_calls(
    records: Sequence[Record], groups: Mapping[str, Sequence[int]], messages: Mapping[MessageKey, int]
) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
    """Return torch's records as calls, and the groups with one more for each pair of ranks that exchange messages.

    `messages`: how many were sent or requested in all, of which the records have the last ones.
    """
    current = [record for record in with_batch_ends(records) if began(record) >= CallHistory.since]
    calls = [to_call(record) for record in current if not record["is_p2p"]]
    members_of = {name: list(ranks) for name, ranks in groups.items()}
    remaining = Counter(messages)
    for record in reversed(current):
        match = _MESSAGE.fullmatch(record["profiling_name"])
        members = groups.get(record["process_group"][0])
        if match is None or members is None:
            continue
        op, rank, peer = match[1], members[int(match[2])], members[int(match[3])]
        ends = [rank, peer] if op == "send" else [peer, rank]
        key = (record["process_group"][0], op, int(match[3]))
        name = f"{key[0]} {ends[0]}>{ends[1]} nccl"
        members_of[name] = ends
        text = f"{op} {'to' if op == 'send' else 'from'} rank {peer}"
        calls.append(
            {**to_call(record), "group": name, "number": remaining[key], "op": text, "bucket": 0, "peer": peer}
        )
        remaining[key] -= 1
    return _number_buckets(calls), members_of


def with_batch_ends(records: Sequence[Record]) -> list[Record]:
    """Give each message of a batch the batch's end: torch notes that in one more record, which is left out."""
    ends = {_batch(record): record for record in records if record["profiling_name"].endswith("coalesced")}
    messages = {_batch(record) for record in records if record["is_p2p"] and ends.get(_batch(record)) is not record}
    finished_messages: list[Record] = []
    for record in records:
        batch = _batch(record)
        end = ends.get(batch, record)
        if end is not record and record["is_p2p"]:
            finished_messages.append(
                {**record, **{name: end[name] for name in ("retired", "state", "time_created_ns")}}
            )
        elif end is record and (batch not in ends or batch not in messages):  # collectives of a batch are one
            finished_messages.append(record)
    return finished_messages


def _batch(record: Record) -> tuple[str, int, int]:
    return record["process_group"][0], record["collective_seq_id"], record["p2p_seq_id"]


def began(record: Record) -> float:
    """Return when an operation was called, in seconds since the epoch."""
    return float(record["time_created_ns"]) / 1e9


def to_call(record: Record) -> dict[str, Any]:
    """Return one record as a call."""
    shapes = ", ".join(f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})" for shape in record["input_sizes"])
    dtypes = ", ".join(dict.fromkeys(_DTYPES.get(name, name) for name in record["input_dtypes"]))
    frames = record.get("frames", ())
    in_thread = not frames and record.get("thread_name", "").startswith(_AUTOGRAD)
    return {
        "group": record["process_group"][0],
        "number": record["collective_seq_id"],
        "op": record["profiling_name"].partition(":")[2],
        "detail": f"{shapes} {dtypes}".strip(),
        "where": "a backward pass" if in_thread else pick_line((frame["filename"], frame["line"]) for frame in frames),
        "began": began(record),
        "done": is_done(record),
        # DDP calls from C++, which the backward pass has called: no frame of Python is between them.
        "bucket": int(in_thread or any(frame["name"] == "_engine_run_backward" for frame in frames[:1])),
    }


def _number_buckets(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number DDP's calls in the last backward pass; where it began is known only in a trainer."""
    number = itertools.count(1)
    for call in calls:
        is_last = 0.0 < GRADIENTS.began <= call["began"]
        call["bucket"] = next(number) if call["bucket"] and is_last else 0
    return calls
