"""Stop requests (signals, `max_steps`, tuning trials), agreed by all ranks at a step boundary."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from phalanx.errors import PreemptedError
from phalanx.observe import control
from phalanx.observe.control import TrialControl
from phalanx.world.env import read_rank_env, stop_signals

if TYPE_CHECKING:
    import torch.distributed as dist

    from phalanx.world.world import World


_LOOK_EVERY_SECONDS = 0.25
_MEASURED_STEPS = 8
_WISH = "stop_wish"


class StopRequest:
    """Receives the signals that stop a run; every rank gets the same answer at the same step."""

    def __init__(self, world: World, have_met: Callable[[int], bool] | None = None) -> None:
        """`have_met`: where ranks are not in lock-step, whether they have waited for each other in a step."""
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
        """Install the handlers; outside the main thread Python allows none, and only `stop_wish` stops the run."""
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals(self._world.env):
                self._previous[number] = signal.signal(number, self._hear)

    def silence(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @property
    def heard(self) -> bool:
        """Whether this rank has been asked to stop."""
        return self.told is not None or self._asked is not None

    @property
    def told(self) -> str | None:
        """The request to stop from outside the process, such as SIGTERM; None where there is none, or only `ask`."""
        self._heard = self._heard or control.stop_reason()
        return self._heard

    def ask(self, reason: str) -> None:
        """Request that all ranks stop at a step boundary, as a signal does; from any thread."""
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
        """Time the first steps, then agree on how often to read the store."""
        assert self._store is not None, "only with several ranks"
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
        assert self._store is not None, "only with several ranks"
        if not self._store.check([self._key]):
            return False
        wished_after, _, self.reason = self._store.get(self._key).decode().partition(":")
        return step > int(wished_after)


def preempted_error(reason: str | None, step: int, checkpoint: str | None) -> PreemptedError:
    """Return the error of a run that was stopped, with the checkpoint to resume from."""
    kept = f"checkpoint {checkpoint}" if checkpoint else "no checkpoint_dir was set, so nothing was kept"
    hint = (
        f"To go on, run it again with resume_from_checkpoint={checkpoint!r} (--resume-from-checkpoint {checkpoint})."
        if checkpoint
        else "Set checkpoint_dir to keep the progress of a run that is stopped."
    )
    return PreemptedError(f"stopped by {reason} after step {step}: {kept}", hint=hint)


_LOOK_SECONDS = 0.02


class EpochControl:
    """Decides after epochs whether a tuning trial continues."""

    def __init__(
        self,
        store: dist.Store | None,
        *,
        asks: bool,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`store`: shares the answer of the rank that `asks` (None: one rank); `given_up`: the run ends anyway."""
        self._gate = TrialControl.from_environment()
        self._store = store
        self._asks = asks
        self._given_up = given_up

    @property
    def is_there(self) -> bool:
        """Whether this run is a trial that may be stopped."""
        return self._gate is not None

    def start_after(self, epochs: int) -> None:
        """Note the epochs that a resumed run has completed."""
        if self._gate is not None:
            self._gate.start_after(epochs)

    def lets_pass(self, epochs: int) -> bool:
        """Whether training continues after this many epochs; every rank calls this, and gets the same answer."""
        if self._gate is None or not self._gate.is_due(epochs):
            return True
        return self._ask(epochs) if self._store is None else self._agree(self._store, epochs)

    def _ask(self, epochs: int) -> bool:
        assert self._gate is not None, "asked for only where there is a gate"
        return self._gate.wait(epochs, given_up=self._given_up)

    def _agree(self, store: dist.Store, epochs: int) -> bool:
        env = read_rank_env()
        key = f"gate/{env.attempt if env is not None else 0}/{epochs}"
        if self._asks:
            passes = self._ask(epochs)
            store.set(key, "on" if passes else "stop")
            return passes
        # Not store.get, which has a timeout: the answer may take hours, until other trials have come this far.
        while not store.check([key]):
            time.sleep(_LOOK_SECONDS)
        return bool(store.get(key) == b"on")
