"""A background thread for communication."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

Mark = Callable[[str], AbstractContextManager[object]]

_mark: Mark | None = None


def mark_jobs(mark: Mark | None) -> None:
    """Run every job of this process within `mark(label)`, so that a profiler shows it; None: as before."""
    global _mark
    _mark = mark


def _run(label: str, job: Callable[[], Any]) -> Any:
    if _mark is None:
        return job()
    with _mark(label):
        return job()


class CommThread:
    """Runs jobs in a background thread, in the order in which they were submitted; `label` is what they do."""

    def __init__(self, name: str, device: torch.device | None = None, label: str = "all-reduce") -> None:
        self._label = label
        on_gpu = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.busy_s = 0.0
        self.waited_s = 0.0
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], torch.futures.Future[Any]] | None] = queue.SimpleQueue()
        self._open: list[torch.futures.Future[Any]] = []
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], Any]) -> torch.futures.Future[Any]:
        """Add a job; the future gets its result or its error."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._open.append(future)
        self._jobs.put((job if self._stream is None else self._on_stream(job, self._stream), future))
        return future

    def _on_stream(self, job: Callable[[], Any], stream: torch.cuda.Stream) -> Callable[[], Any]:
        computed = torch.cuda.current_stream(stream.device).record_event()

        def run() -> Any:
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):  # a thread starts with device 0
                computed.wait(stream)
                return job()

        return run

    def run(self, job: Callable[[], Any]) -> Any:
        """Run a job in the caller's thread; all of its time counts as waiting."""
        begin = time.perf_counter()
        try:
            return _run(self._label, job)
        finally:
            seconds = time.perf_counter() - begin
            self.busy_s += seconds
            self.waited_s += seconds

    def drain(self) -> None:
        """Wait until all jobs are done; raise the first error. On a GPU only its stream waits, not the host."""
        if not self._open:
            return
        begin = time.perf_counter()
        try:
            for future in self._open:
                future.wait()
        finally:
            self._open.clear()
            self.waited_s += time.perf_counter() - begin
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def close(self) -> None:
        """End the thread; wait for it only if no job is pending, as a job may wait for ranks that have failed."""
        if self._thread is not None:
            self._jobs.put(None)
            if all(future.done() for future in self._open):
                self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            begin = time.perf_counter()
            try:
                result = _run(self._label, job)
            except BaseException as error:  # noqa: BLE001 - it is raised where the future is waited for
                future.set_exception(error)
            else:
                future.set_result(result)
            finally:
                self.busy_s += time.perf_counter() - begin
