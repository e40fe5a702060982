"""Virtual time, and a network between machines: delays, cuts in one or both directions, machines that stand still."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any


class Clock:
    """Virtual time: calls that are due, in their order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.handled = 0

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call something at a time."""
        self._count += 1
        heapq.heappush(self._due, (max(when, self.now), self._count, call))

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call something after some seconds."""
        self.at(self.now + seconds, call)

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Handle what is due, until a time or an end."""
        while self._due and self._due[0][0] <= until and not is_over():
            self.now, _, call = heapq.heappop(self._due)
            self.handled += 1
            call()
        self.now = max(self.now, until) if not is_over() else self.now


class Network:
    """Links between machines, which are numbers. What is sent in one direction arrives in its order, as over TCP.

    While a direction is cut nothing arrives; what was sent meanwhile comes when the cut is mended.
    """

    def __init__(self, clock: Clock, rng: random.Random, delay: tuple[float, float]) -> None:
        self._clock, self._rng, self.delay = clock, rng, delay
        self.slowness = 1.0
        self._cut: dict[tuple[int, int], tuple[float, int]] = {}
        """The directions that are cut: since when, and by how many faults."""
        self._held: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._arrives: dict[tuple[Any, Any], float] = {}

    def one_way(self) -> float:
        """Return a delay."""
        return self._rng.uniform(*self.delay) * self.slowness

    def send(self, source: int, target: int, arrive: Callable[[], None], stream: tuple[Any, Any]) -> None:
        """Let something arrive later; within a stream in order."""
        when = max(self._clock.now + self.one_way(), self._arrives.get(stream, 0.0))
        self._arrives[stream] = when
        self._clock.at(when, lambda: self._arrive(source, target, arrive))

    def _arrive(self, source: int, target: int, arrive: Callable[[], None]) -> None:
        held = self._held.get((source, target))
        if (source, target) in self._cut or held:
            self._held.setdefault((source, target), []).append(arrive)
        else:
            arrive()

    def cut(self, source: int, target: int) -> None:
        """Cut one direction."""
        since, faults = self._cut.get((source, target), (self._clock.now, 0))
        self._cut[source, target] = (since, faults + 1)

    def mend(self, source: int, target: int) -> None:
        """Undo a cut."""
        since, faults = self._cut[source, target]
        if faults > 1:
            self._cut[source, target] = (since, faults - 1)
            return
        del self._cut[source, target]
        self._clock.later(self.one_way(), lambda: self._release(source, target))

    def _release(self, source: int, target: int) -> None:
        if (source, target) not in self._cut:
            for arrive in self._held.pop((source, target), []):
                arrive()

    @property
    def is_cut(self) -> bool:
        """Whether any direction is cut."""
        return bool(self._cut)

    def connected(self, one: int, other: int) -> bool:
        """Whether two machines can exchange something, which takes both directions."""
        return (one, other) not in self._cut and (other, one) not in self._cut

    def cut_since(self, one: int, other: int) -> float:
        """Return since when two machines cannot exchange anything; now if they can."""
        return min(self._cut.get(pair, (self._clock.now, 0))[0] for pair in ((one, other), (other, one)))
