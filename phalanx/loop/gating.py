"""Per-epoch stop/continue for tuning trials: rank 0 reads the gate and shares the answer. Keras' loop uses it too."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from phalanx.observe.gate import Gate
from phalanx.world.env import read_rank_env

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

_LOOK_SECONDS = 0.02


class EpochGate:
    """Decides after epochs whether a tuning trial continues."""

    def __init__(
        self,
        store: dist.Store | None,
        *,
        asks: bool,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`store`: shares the answer of the rank that `asks` (None: one rank); `given_up`: the run ends anyway."""
        self._gate = Gate.from_environment()
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
