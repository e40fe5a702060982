"""How long a rank waits for communication that torch runs: measured in one step of every few seconds, without a sync.

In that step each place where the rank's work waits (`Work.wait`, a collective in the order of the computation, fsdp's
waits between CUDA streams) is put between two marks: events of CUDA in the stream that computes, else the host's clock.
Marks are read later. What `torch.compile` has put into its graphs is not seen.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from itertools import takewhile
from typing import Any, Protocol

import torch

from phalanx.torch_compat import around_waits

_EVERY_SECONDS = 2.0
_FIRST_STEPS = 3
"""These make communicators and load kernels: they are not measured."""
_DISTRIBUTED = "torch/distributed/"


class _Mark(Protocol):
    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, other: Any) -> float: ...


class HostMark:
    """A moment on the host, where the host itself waits; like an event of CUDA."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self.at = time.perf_counter()

    def query(self) -> bool:
        """Whether it has been reached."""
        return True

    def elapsed_time(self, other: HostMark) -> float:
        """Return the milliseconds to a later one."""
        return (other.at - self.at) * 1e3


class WaitSampler:
    """Measures one step of every few seconds; the mean of these stands for all steps."""

    def __init__(self, device: torch.device, *, compiled: bool) -> None:
        self._on_gpu, self._compiled = device.type == "cuda", compiled
        self._stream: Any = torch.cuda.current_stream(device) if self._on_gpu else None
        self._undo: Callable[[], None] | None = None
        self._due = time.monotonic()
        self._steps = self._measured = 0
        self._marks: list[tuple[_Mark, _Mark]] = []
        self._waited = 0.0

    def begin(self) -> None:
        """Begin to measure a step, where that is due; called before each of its forward passes."""
        is_due = self._steps >= _FIRST_STEPS and time.monotonic() >= self._due
        if is_due and self._undo is None and not self._marks:
            self._undo = around_waits(self._timed, in_graphs=not self._compiled)

    def step_done(self) -> None:
        """Count a step, and end the measurement of it."""
        self._steps += 1
        if self._undo is not None:
            self.close()
            self._measured += 1
            self._due = time.monotonic() + _EVERY_SECONDS

    def seconds(self) -> float | None:
        """Return the seconds waited in all steps so far; None before one is measured, or where no wait was seen."""
        if self._undo is None:
            reached = list(takewhile(lambda pair: pair[1].query(), self._marks))  # in the order of one stream
            self._waited += sum(begin.elapsed_time(end) for begin, end in reached) / 1e3
            del self._marks[: len(reached)]
        if not self._waited or not self._measured:
            return None
        return self._waited / self._measured * self._steps

    def close(self) -> None:
        """End a measurement that has begun."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._counts(args):
                return original(*args, **kwargs)
            begin, end = self._mark(), self._mark()
            begin.record(self._stream)
            try:
                return original(*args, **kwargs)
            finally:
                end.record(self._stream)
                self._marks.append((begin, end))

        return call

    def _mark(self) -> _Mark:
        return torch.cuda.Event(enable_timing=True) if self._on_gpu else HostMark()  # type: ignore[no-untyped-call]

    def _counts(self, args: tuple[Any, ...]) -> bool:
        """Whether what computes waits: not another stream, and not for a copy from the host."""
        if not self._on_gpu:
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        if isinstance(args[0], torch.cuda.Stream):
            return args[0] == self._stream and _DISTRIBUTED in sys._getframe(2).f_code.co_filename
        return bool(torch.cuda.current_stream(self._stream.device) == self._stream)
