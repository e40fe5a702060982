"""Signals as messages: while a launch runs they wake its event loop instead of raising in the middle of it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals at which a run ends or saves."""
JOINS_LATE = "PHALANX_JOINS_LATE"
"""Set for a rank that takes a place in a group that trains; it begins with `STOPS` blocked, until it handles them."""
_RESIZED = signal.SIGWINCH


class SignalInbox:
    """Collects SIGINT, SIGTERM, SIGHUP and SIGUSR1 between enter and exit; in other threads only what is posted."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[signal.Signals, Handler] = {}
        self._wakeup_before: int | None = None
        self._lock = threading.Lock()
        self._was_resized = False

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            for number in (*STOPS, _RESIZED):
                # Signals that the parent process ignores (nohup) stay ignored.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, lambda number, frame: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if self._wakeup_before is not None:
            signal.set_wakeup_fd(self._wakeup_before)
        self.close()

    def close(self) -> None:
        """Close the pipe; safe to call twice."""
        with self._lock:  # a later `post` must not write into a reused descriptor
            if self._write >= 0:
                os.close(self._read)
                os.close(self._write)
                self._read = self._write = -1

    def fileno(self) -> int:
        """Let selectors wait for a signal."""
        return self._read

    def take(self) -> list[signal.Signals]:
        """Return the watched signals that came since the last call, in order."""
        received = b""
        with contextlib.suppress(BlockingIOError):
            received = os.read(self._read, 4096)
        self._was_resized = self._was_resized or _RESIZED in received
        return [signal.Signals(number) for number in received if number in STOPS]

    def take_resize(self) -> bool:
        """Return whether the terminal has got another size since the last call."""
        was_resized, self._was_resized = self._was_resized, False
        return was_resized

    def post(self, number: signal.Signals) -> None:
        """Add a signal as if it had been received: a launch in another thread gets no real ones."""
        with self._lock:
            if self._write >= 0:
                os.write(self._write, bytes([number]))


_reason: str | None = None


def request_stop(reason: str) -> None:
    """Ask this process's rank to stop; `reason` is what it reports, such as SIGTERM."""
    global _reason
    _reason = reason


def stop_reason() -> str | None:
    """Return why this rank has to stop, or None."""
    return _reason
