"""SIGTERM and SIGUSR1 while Keras trains: the run ends at once, and says from which backup it can go on."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from phalanx.errors import PreemptedError
from phalanx.world.env import read_rank_env, stop_signals

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from phalanx.trainers.tensorflow.reporting import KerasReport


@contextmanager
def stopping(report: KerasReport) -> Iterator[None]:
    """End training by an exception when a signal asks for it; workers have no boundary of their own to agree on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        kept = f"the last backup is {report.backup}" if report.backup else "there is no backup yet"
        raise PreemptedError(
            f"stopped by {name} after step {report.step}: {kept}",
            hint=f"To go on from it, run it again with resume_from_checkpoint={report.backup!r}."
            if report.backup
            else "Set checkpoint_dir or checkpoint_frequency to keep the progress of a run that is stopped.",
        )

    before = {number: signal.signal(number, stop) for number in stop_signals(read_rank_env())}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
