"""A run that is the trial of a search: after an epoch, the tuner decides whether it continues."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.observe.trial_control import TrialControl
from phalanx.world.abort import raise_if_aborted
from phalanx.world.env import read_rank_env

if TYPE_CHECKING:
    import torch.distributed as dist

_POLL_SECONDS = 0.02


class EpochControl:
    """Decides after epochs whether a tuning trial continues."""

    def __init__(self, store: dist.Store | None, *, asks: bool, given_up: Callable[[], bool] = lambda: False) -> None:
        """`store`: shares the answer of the rank that `asks` (None: one rank); `given_up`: the run ends anyway."""
        self._control = TrialControl.from_environment()
        self._store = store
        self._asks = asks
        self._given_up = given_up

    @property
    def is_active(self) -> bool:
        """Whether this run is a trial that may be stopped."""
        return self._control is not None

    def start_after(self, epochs: int) -> None:
        """Note the epochs that a resumed run has completed."""
        if self._control is not None:
            self._control.start_after(epochs)

    @property
    def decided(self) -> int:
        """After how many epochs the tuner has answered last."""
        return 0 if self._control is None else self._control.iteration

    def should_continue(self, epochs: int) -> bool:
        """Whether training continues after this many epochs; every rank calls this, and gets the same answer.

        Raises if ranks are lost meanwhile; those that go on ask again.
        """
        before = self.decided
        if self._control is None or not self._control.is_due(epochs):
            return True
        try:
            return self._answer(self._control, epochs)
        except BaseException:
            self._control.start_after(before)
            raise

    def _answer(self, control: TrialControl, epochs: int) -> bool:
        if self._store is None:
            return control.wait(epochs, given_up=self._has_to_leave)
        env = read_rank_env()
        key = f"trial_control/{env.attempt if env is not None else 0}/{epochs}"
        if self._asks:
            goes_on = control.wait(epochs, given_up=self._has_to_leave)
            self._store.set(key, "on" if goes_on else "stop")
            return goes_on
        # Not store.get, which has a timeout: the answer may take hours, until other trials have come this far.
        while not self._store.check([key]):
            raise_if_aborted()
            time.sleep(_POLL_SECONDS)
        return bool(self._store.get(key) == b"on")

    def _has_to_leave(self) -> bool:
        raise_if_aborted()
        return self._given_up()
