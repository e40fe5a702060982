"""The loop at a gate: after an epoch the main rank asks, and every rank does as it was told."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from phalanx.observe.gate import Gate

if TYPE_CHECKING:
    from phalanx.loop.stopping import StopRequest
    from phalanx.world.world import World

_LOOK_SECONDS = 0.02


class EpochGate:
    """Asks after epochs whether the run goes on, where whoever started it wants to be asked."""

    def __init__(self, world: World, stop: StopRequest) -> None:
        self._gate = Gate.from_environment()
        self._world = world
        self._stop = stop

    def start_after(self, epochs: int) -> None:
        """Take note of the epochs that a resumed run has behind it."""
        if self._gate is not None:
            self._gate.start_after(epochs)

    def lets_pass(self, epochs: int) -> bool:
        """Whether training goes on after this many epochs; every rank calls this, and gets the same answer."""
        if self._gate is None or not self._gate.is_due(epochs):
            return True
        if self._world.world_size == 1:
            return self._ask(epochs)
        return self._agree(epochs)

    def _ask(self, epochs: int) -> bool:
        assert self._gate is not None, "asked for only where there is a gate"
        return self._gate.wait(epochs, given_up=lambda: self._stop.heard)

    def _agree(self, epochs: int) -> bool:
        store, key = self._world.store, f"gate/{self._world.env.attempt}/{epochs}"
        assert store is not None, "ranks that are several have a store"
        if self._world.is_main:
            passes = self._ask(epochs)
            store.set(key, "on" if passes else "stop")
            return passes
        # Not store.get: the word may be hours away, when other trials must come this far first.
        while not store.check([key]):
            time.sleep(_LOOK_SECONDS)
        return bool(store.get(key) == b"on")
