"""Find operations over nccl that have not ended within their group's timeout, and report them to the launcher.

Over gloo a call waits, and raises at the timeout. Over nccl the host only queues an operation, and waits later, where
it needs a result, without an error: torch's watchdog ends the process a minute after the timeout. So a thread of the
rank looks at torch's records. Making a communicator is not recorded: there the stack of the main thread shows the wait.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType
from typing import Any

from phalanx.launch.records import Joined, began, to_call, with_batch_ends
from phalanx.observe.collectives import pick_line
from phalanx.observe.sinks import announce

WATCH_SECONDS = 1.0
"""How often a rank looks."""
_MOST_SKIPPED = 4
"""While operations end, so many looks in a row are left out: to read all records takes a millisecond and more."""
_DISTRIBUTED = os.path.join("torch", "distributed", "")
_INNER_FRAMES = 4


class OverdueWatch:
    """Looks whether this rank has waited too long. `backend`: whose operations raise no error themselves."""

    def __init__(self, slot: int, backend: str = "nccl") -> None:
        self._slot, self._backend = slot, backend
        self._reported = ""
        self._progress = b""
        self._skipped = 0
        self._place: tuple[int, int] | None = None
        self._since = 0.0

    def check(self) -> bool:
        """Report the oldest operation that is late, once; return True."""
        dist = getattr(sys.modules.get("torch"), "distributed", None)
        known = dist is not None and dist.is_available() and dist.is_initialized()
        found = self.find(time.time()) if known else ""
        if found and found != self._reported:
            self._reported = found
            announce("overdue", self._slot, found)
        return True

    def find(self, now: float) -> str:
        """Say which operation is late, in words by which the launcher knows a timeout; empty where none is."""
        from phalanx.torch_records import has_backend, recorded_progress, unfinished_records

        if not has_backend(self._backend) or self._makes_progress(recorded_progress()):
            return ""
        late = [record for record in unfinished_records(self._backend) if _is_late(record, now)]
        return self._describe(now) if late else self._blocked(now)

    def _makes_progress(self, progress: bytes) -> bool:
        """Whether operations were queued or ended since the last look, and all were looked at not long ago."""
        changed, self._progress = progress != self._progress, progress
        if changed:
            self._place = None
            self._skipped += 1
        skips = changed and self._skipped <= _MOST_SKIPPED
        if not skips:
            self._skipped = 0
        return skips

    def _describe(self, now: float) -> str:
        from phalanx.torch_records import flight_records, is_done

        late = [each for each in with_batch_ends(flight_records()) if not is_done(each) and _is_late(each, now)]
        own = [each for each in late if each["profiling_name"].startswith(f"{self._backend}:")]
        if not own:  # the messages of a batch that has ended
            return ""
        first = min(own, key=began)
        call = to_call(first)
        what = f"{call['op']} of {call['detail']}" if call["detail"] else call["op"]
        return self._text(first["timeout_ms"] / 1e3, f"{what} at {call['where']}")

    def _blocked(self, now: float) -> str:
        """Say where the main thread has been in one call of torch.distributed for as long as the timeout."""
        from phalanx.torch_records import group_timeout

        frame = _distributed_frame(sys._current_frames().get(threading.main_thread().ident or 0))
        place = None if frame is None else (id(frame), frame.f_lasti)
        if frame is None or place != self._place:
            self._place, self._since = place, now
            return ""
        limit = group_timeout(self._backend, _group_of(frame))
        if limit is None or now - self._since < limit:
            return ""
        stack = []
        walked: FrameType | None = frame
        while walked is not None:
            stack.append((walked.f_code.co_filename, walked.f_lineno))
            walked = walked.f_back
        return self._text(limit, f"{frame.f_code.co_name} at {pick_line(stack)}")

    def _text(self, seconds: float, what: str) -> str:
        return f"Timed out waiting {seconds:g} s for an operation over {self._backend}: {what}"


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


def _group_of(frame: FrameType) -> Any:
    known = frame.f_locals
    return known.get("group", known.get("process_group"))
