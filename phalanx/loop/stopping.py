"""Stopping together: one rank hears a signal, all ranks stop at the same step boundary.

Ranks are in lock-step: none completes step s+1 before all have begun it. A rank that hears the signal after step s
writes the wish "s" into the store (the first wish stays, and the write is answered) before it begins s+1. Every rank
looks at the store after each step that is a multiple of `period`. Whatever rank looks after a step m > s has therefore
the wish before its eyes, and all of them stop at the first such m. The period is chosen once, by rank 0, so that
looking costs next to nothing when steps are short. Where ranks run apart, they look only after the steps in which they
have waited for each other, to gather losses or to average weights: no rank is past one of those before all have come to
it.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from phalanx.errors import PreemptedError
from phalanx.observe import stop_wish
from phalanx.world.env import stop_signals

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from phalanx.world.world import World

_LOOK_EVERY_SECONDS = 0.25
_MEASURED_STEPS = 8
_WISH = "stop_wish"


class StopRequest:
    """Hears the signals that stop a run, and tells every rank the same answer at the same step."""

    def __init__(self, world: World, have_met: Callable[[int], bool] | None = None) -> None:
        """`have_met`: where ranks are not in lock-step, whether they have met in a step, and may look after it."""
        self._world = world
        self._store = world.store if world.world_size > 1 else None
        self._key = f"{_WISH}/{world.env.attempt}"
        self._heard: str | None = None
        self._asked: str | None = None
        self._wished = False
        self._previous: dict[signal.Signals, Any] = {}
        self._have_met = have_met
        self._period: int | None = None
        self._started = 0.0
        self._seen = 0
        self.reason: str | None = None

    def listen(self) -> None:
        """Install the handlers; outside the main thread Python allows none: there a wish comes by `stop_wish`."""
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals(self._world.env):
                self._previous[number] = signal.signal(number, self._hear)

    def silence(self) -> None:
        """Put the previous handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @property
    def heard(self) -> bool:
        """Whether this rank has been told to stop."""
        return self.told is not None or self._asked is not None

    @property
    def told(self) -> str | None:
        """What told this rank from outside to stop, such as SIGTERM; None where only `ask` did, or nobody."""
        self._heard = self._heard or stop_wish.take()
        return self._heard

    def ask(self, reason: str) -> None:
        """Wish that all ranks stop at a boundary, as a signal would; from any thread."""
        self._asked = self._asked or reason

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = signal.Signals(number).name

    def agreed(self, step: int) -> bool:
        """Whether all ranks stop after this step; every rank calls this after every step."""
        wish = self.told or self._asked
        if self._store is None:
            self.reason = wish
            return wish is not None
        if wish is not None and not self._wished:
            self._wished = True
            self._store.compare_set(self._key, "", f"{step}:{wish}")
        if self._have_met is not None:
            return self._have_met(step) and self._look(step)
        if self._period is None:
            self._measure()
        elif step % self._period:
            return False
        return self._look(step)

    def _measure(self) -> None:
        """Time the first steps, and then agree how rarely looking is enough."""
        assert self._store is not None, "one rank alone has nobody to agree with"
        if self._seen == 0:
            self._started = time.monotonic()
        self._seen += 1
        if self._seen == _MEASURED_STEPS:
            seconds = (time.monotonic() - self._started) / (_MEASURED_STEPS - 1)
            key = f"{self._key}/period"
            if self._world.is_main:
                self._store.set(key, str(max(1, min(1000, int(_LOOK_EVERY_SECONDS / max(seconds, 1e-6))))))
            self._period = int(self._store.get(key))

    def _look(self, step: int) -> bool:
        assert self._store is not None, "one rank alone has nobody to agree with"
        if not self._store.check([self._key]):
            return False
        wished_after, _, self.reason = self._store.get(self._key).decode().partition(":")
        return step > int(wished_after)


def preempted_error(reason: str | None, step: int, checkpoint: str | None) -> PreemptedError:
    """Return the error of a run that was stopped, which names the checkpoint to go on from."""
    kept = f"checkpoint {checkpoint}" if checkpoint else "no checkpoint_dir was set, so nothing was kept"
    hint = (
        f"To go on, run it again with resume_from_checkpoint={checkpoint!r} (--resume-from-checkpoint {checkpoint})."
        if checkpoint
        else "Set checkpoint_dir to keep the progress of a run that is stopped."
    )
    return PreemptedError(f"stopped by {reason} after step {step}: {kept}", hint=hint)
