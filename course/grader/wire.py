"""A wrapper round the process group that records every call: who, to whom, how many bytes, from when to when.

It replaces the methods of torch's `ProcessGroup` and `Work.wait`, so a call is seen however the learner's file imports
torch.distributed. Before a rank blocks, it notes where: that is how a grader can say which rank waits for what.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

STATE_BYTES = 1024
_METHODS = (
    *("send", "recv", "recv_anysource", "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather"),
    *("_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter", "barrier"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single", "monitored_barrier"),
)
_OUTPUTS_FIRST = (
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
)
"""Methods whose first argument is where they receive, and whose second is what they send."""
_PUBLIC = {
    "recv_anysource": "recv",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall_base": "all_to_all_single",
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "allreduce_coalesced": "all_reduce",
}
"""The functions of torch.distributed that call a method, for calls that go round them."""
_SENDS = ("send", "isend", "send_object_list")


@dataclass
class Call:
    """One call of torch.distributed by one rank."""

    kind: str
    """The function as the learner called it: send, isend, recv, irecv, all_reduce, broadcast, ..."""
    peer: int | None
    """The other rank of a message; None for collectives and for a receive from any rank."""
    bytes: int
    dtype: str
    start: float
    """Seconds since the run began, on one clock for all ranks."""
    end: float | None
    """When the call, or the wait for it, came back; None if it was not waited for."""
    blocking: bool
    line: int
    """The line of the learner's file."""
    tag: int = 0
    thread: str = "MainThread"

    @property
    def is_send(self) -> bool:
        """Whether this rank sends the bytes to one peer."""
        return self.kind in _SENDS


class Recorder:
    """The calls of this rank, and where it waits now."""

    def __init__(self, file: Path, state: Path, began: float) -> None:
        self.calls: list[Call] = []
        self.forbidden: frozenset[str] = frozenset()
        self._learner = str(file)
        self._began = began
        self._state = os.open(state, os.O_RDWR | os.O_CREAT)
        self._changes = 0
        self._open: dict[int, tuple[Any, Call]] = {}
        self._main: dict[str, Any] = {"doing": "starts"}
        """What the main thread does; calls of other threads show as changes only."""

    def install(self) -> None:
        """Record from now on."""
        for name in _METHODS:
            real = getattr(dist.ProcessGroup, name, None)
            if real is not None:
                setattr(dist.ProcessGroup, name, self._recorded(name, real))
        real_wait = dist.Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            _, call = self._open.pop(id(work), (None, None))
            if call is None:
                return real_wait(work, *args, **kwargs)
            self.note("waits", call)
            try:
                return real_wait(work, *args, **kwargs)
            finally:
                call.end = self.now()
                self.note("runs")

        dist.Work.wait = wait  # type: ignore[assignment, method-assign]

    def now(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self._began

    def note(self, doing: str, call: Call | None = None) -> None:
        """Say what this rank does, where another process can read it."""
        self._changes += 1
        if threading.current_thread() is threading.main_thread():
            self._main = {"doing": doing}
            if call is not None:
                self._main |= {"kind": call.kind, "peer": call.peer, "line": call.line}
        state = {**self._main, "changes": self._changes, "calls": len(self.calls)}
        os.pwrite(self._state, json.dumps(state).encode().ljust(STATE_BYTES), 0)

    def _recorded(self, method: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(group: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._describe(method, group, args, kwargs)
            if call.kind in self.forbidden and (call.line or call.thread != "MainThread"):
                raise Forbidden(call.line, f"torch.distributed.{call.kind}")
            self.calls.append(call)
            self.note("waits", call)
            try:
                work = real(group, *args, **kwargs)
            finally:
                self.note("runs")
            if work is None:
                call.end = self.now()
            else:
                self._open[id(work)] = (work, call)  # the reference keeps the id from being used again
            return work

        return recorded

    def _describe(self, method: str, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        kind, line = _PUBLIC.get(method, method), 0
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name == self._learner:
                line = frame.f_lineno
                break
            if name.endswith("distributed_c10d.py") and frame.f_code.co_name != "batch_isend_irecv":
                kind = frame.f_code.co_name
            frame = frame.f_back
        given = [*args, *kwargs.values()]
        tensors = list(_tensors(given[1:] if method in _OUTPUTS_FIRST else given[:1]))
        peer, tag = None, 0
        if method in ("send", "recv"):
            words = [*args[1:], *kwargs.values()]  # the peer's rank in the group, and the tag
            peer, tag = dist.get_global_rank(group, words[0]), words[1]
        return Call(
            kind,
            peer,
            sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            self.now(),
            None,
            not kind.startswith("i"),
            line,
            tag,
            threading.current_thread().name,
        )


class Forbidden(RuntimeError):
    """The answer uses what the exercise asks to write."""

    def __init__(self, line: int, name: str) -> None:
        super().__init__(f"line {line} uses {name}, which this exercise asks you to write")
        self.line = line
        self.name = name


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Yield the tensors in these values, at any depth."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
