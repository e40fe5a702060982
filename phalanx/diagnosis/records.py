"""The calls of this rank, from torch's flight recorder and the ring of Phalanx, and which of them are overdue.

torch is imported when there are groups of it: the launcher and ranks of TensorFlow load this module without torch.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar

from phalanx.observe.call_ring import GRADIENTS, call_ring, pick_line
from phalanx.observe.sinks import announce

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


class Joined:
    """Since when this process is in its process groups; the names of earlier ones may be used again."""

    at: ClassVar[float] = 0.0
    messages: ClassVar[Counter[MessageKey]] = Counter()
    """How many messages were sent or requested over nccl since then: torch numbers them otherwise at each end."""

    @classmethod
    def begin(cls) -> None:
        """Forget what was called in earlier groups."""
        cls.at = time.time()
        cls.messages.clear()


def read_calls_here() -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
    """Return the calls of this process, the oldest first, and the ranks of each group by its name."""
    from phalanx.torch_compat import flight_records, group_ranks

    calls, groups = to_calls(flight_records(), group_ranks(), Joined.messages)
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
    current = [record for record in with_batch_ends(records) if began(record) >= Joined.at]
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
    from phalanx.torch_compat import is_done

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


# --- operations over nccl that have not ended within their group's timeout --------------------------------------------
# Over gloo a call waits, and raises at the timeout. Over nccl the host only queues an operation, and waits later, where
# it needs a result, without an error: torch's watchdog ends the process a minute after the timeout. So a thread of the
# rank looks at torch's records. Making a communicator is not recorded: the main thread's stack shows that wait.

WATCH_SECONDS = 1.0
"""How often a rank looks."""
_MOST_SKIPPED = 4
"""The most looks in a row that are left out while operations end: to read all records takes a millisecond and more."""
_DISTRIBUTED = os.path.join("torch", "distributed", "")
_INNER_FRAMES = 4


class OverdueWatch:
    """Looks whether this rank has waited too long. `backend`: whose operations raise no error themselves."""

    def __init__(self, slot: int, backend: str = "nccl") -> None:
        self._slot, self._backend = slot, backend
        self._reported = ""
        self._progress = b""
        self._skipped = 0
        self._position: tuple[int, int] | None = None
        self._since = 0.0

    def check(self) -> bool:
        """Report the oldest operation that is late, once; return True."""
        dist = getattr(sys.modules.get("torch"), "distributed", None)
        is_ready = dist is not None and dist.is_available() and dist.is_initialized()
        overdue = self.find(time.time()) if is_ready else ""
        if overdue and overdue != self._reported:
            self._reported = overdue
            announce("overdue", self._slot, overdue)
        return True

    def find(self, now: float) -> str:
        """Say which operation is late, in words by which the launcher knows a timeout; empty where none is."""
        from phalanx.torch_compat import has_backend, recorded_progress, unfinished_records

        if not has_backend(self._backend) or self._makes_progress(recorded_progress()):
            return ""
        late = [record for record in unfinished_records(self._backend) if _is_late(record, now)]
        return self._describe(now) if late else self._blocked(now)

    def _makes_progress(self, progress: bytes) -> bool:
        """Whether operations were queued or ended since the last look, and all were looked at not long ago."""
        is_progress, self._progress = progress != self._progress, progress
        if is_progress:
            self._position = None
            self._skipped += 1
        skips = is_progress and self._skipped <= _MOST_SKIPPED
        if not skips:
            self._skipped = 0
        return skips

    def _describe(self, now: float) -> str:
        from phalanx.torch_compat import flight_records, is_done

        late = [record for record in with_batch_ends(flight_records()) if not is_done(record) and _is_late(record, now)]
        of_backend = [record for record in late if record["profiling_name"].startswith(f"{self._backend}:")]
        if not of_backend:  # the messages of a batch that has ended
            return ""
        first = min(of_backend, key=began)
        call = to_call(first)
        operation = f"{call['op']} of {call['detail']}" if call["detail"] else call["op"]
        return self._text(first["timeout_ms"] / 1e3, f"{operation} at {call['where']}")

    def _blocked(self, now: float) -> str:
        """Say where the main thread has been in one call of torch.distributed for as long as the timeout."""
        from phalanx.torch_compat import group_timeout

        frame = _distributed_frame(sys._current_frames().get(threading.main_thread().ident or 0))
        position = None if frame is None else (id(frame), frame.f_lasti)
        if frame is None or position != self._position:
            self._position, self._since = position, now
            return ""
        variables = frame.f_locals
        limit = group_timeout(self._backend, variables.get("group", variables.get("process_group")))
        if limit is None or now - self._since < limit:
            return ""
        stack = []
        outer: FrameType | None = frame
        while outer is not None:
            stack.append((outer.f_code.co_filename, outer.f_lineno))
            outer = outer.f_back
        return self._text(limit, f"{frame.f_code.co_name} at {pick_line(stack)}")

    def _text(self, seconds: float, operation: str) -> str:
        return f"Timed out waiting {seconds:g} s for an operation over {self._backend}: {operation}"


def _is_late(record: Any, now: float) -> bool:
    return began(record) >= Joined.at and now - began(record) > record["timeout_ms"] / 1e3


def _distributed_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of torch.distributed among the innermost ones that works for a process group."""
    for _ in range(_INNER_FRAMES):
        if frame is None:
            return None
        if _DISTRIBUTED in frame.f_code.co_filename and {"group", "process_group"} & set(frame.f_code.co_varnames):
            return frame
        frame = frame.f_back
    return None
