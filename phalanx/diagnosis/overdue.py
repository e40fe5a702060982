"""Operations over nccl that have not ended within their group's timeout.

Over gloo a call waits, and raises at the timeout. Over nccl the host only queues an operation, and waits later, where
it needs a result, without an error: torch's watchdog ends the process a minute after the timeout. So a thread of the
rank looks at torch's records. Making a communicator is not recorded: the main thread's stack shows that wait.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType
from typing import Any

from phalanx.diagnosis.records import CallHistory, began, to_call, with_batch_ends
from phalanx.observe.call_ring import pick_line
from phalanx.observe.sinks import announce
from phalanx.torch_compat import (
    flight_records,
    group_timeout,
    has_backend,
    is_done,
    recorded_progress,
    unfinished_records,
)

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

    def check(self) -> None:
        """Report the oldest operation that is late, once."""
        overdue = self.find(time.time())
        if overdue and overdue != self._reported:
            self._reported = overdue
            announce("overdue", self._slot, overdue)

    def find(self, now: float) -> str:
        """Say which operation is late, in words by which the launcher knows a timeout; empty where none is."""
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
    return began(record) >= CallHistory.since and now - began(record) > record["timeout_ms"] / 1e3


def _distributed_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of torch.distributed among the innermost ones that works for a process group."""
    for _ in range(_INNER_FRAMES):
        if frame is None:
            return None
        if _DISTRIBUTED in frame.f_code.co_filename and {"group", "process_group"} & set(frame.f_code.co_varnames):
            return frame
        frame = frame.f_back
    return None
