"""Runs several trials at once, each in a thread, and wakes one thread that follows them all."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from phalanx.host.signals import SignalInbox
from phalanx.tools.tune.executor import Ending, Executor, Slot, TrialStart
from phalanx.tools.tune.schedulers import Points
from phalanx.tools.tune.trial import Trial

_POLL_SECONDS = 0.5


class Pool:
    """Runs trials in the free slots of an executor. `wait` returns when one has new events, or a signal has come."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._free = list(executor.slots)
        self._running: dict[int, tuple[Trial, SignalInbox, threading.Thread]] = {}
        self._ended: queue.SimpleQueue[tuple[Trial, Slot, Ending | BaseException]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._signals = SignalInbox()

    def __enter__(self) -> Pool:
        self._signals.__enter__()
        self._selector.register(self._signals, selectors.EVENT_READ)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Stop everything, also after an error."""
        self.stop(signal.SIGINT)
        self.stop(signal.SIGINT)
        for _, _, thread in list(self._running.values()):
            thread.join()
        self._selector.close()
        self._signals.__exit__(kind, error, frames)
        os.close(self._wake_read)
        os.close(self._wake_write)

    @property
    def has_room(self) -> bool:
        """Whether a trial can be started."""
        return bool(self._free)

    @property
    def running(self) -> list[Trial]:
        """The trials under way, by number."""
        return [self._running[number][0] for number in sorted(self._running)]

    def start(self, trial: Trial, points: Points | None, env: Mapping[str, str]) -> None:
        """Run a trial in a free slot."""
        signals = SignalInbox()
        start = TrialStart(trial, self._free.pop(0), points, env, signals, self._wake)
        thread = threading.Thread(target=self._work, args=(start,), name=f"trial-{trial.number}")
        self._running[trial.number] = (trial, signals, thread)
        thread.start()

    def _work(self, start: TrialStart) -> None:
        began = time.monotonic()
        ending: Ending | BaseException
        try:
            ending = self._executor.run(start)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            ending = error
        finally:
            start.signals.close()
        start.trial.seconds += time.monotonic() - began
        self._ended.put((start.trial, start.slot, ending))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: it wakes already
            os.write(self._wake_write, b"!")

    def wait(self) -> list[signal.Signals]:
        """Wait until a trial has new events; return the signals that this process received."""
        self._selector.select(_POLL_SECONDS)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        return self._signals.take()

    def ended(self) -> list[tuple[Trial, Ending]]:
        """Return the trials that have ended since the last call, by number."""
        found: list[tuple[Trial, Any]] = []
        while not self._ended.empty():
            trial, slot, ending = self._ended.get()
            self._running.pop(trial.number)[2].join()
            self._free.append(slot)
            self._free.sort(key=lambda free: free.number)
            found.append((trial, ending))
        for _, ending in found:
            if isinstance(ending, BaseException):
                raise ending
        return sorted(found, key=lambda pair: pair[0].number)

    def stop(self, number: signal.Signals) -> None:
        """Ask every trial to stop; SIGINT twice kills."""
        for _, signals, _ in self._running.values():
            signals.post(number)
