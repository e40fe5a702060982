"""Before the first rank runs: what the launch is waiting for, and when to tell the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.host.reminders import MOMENTS, Reminder, in_words
from phalanx.launch.preload import extra_modules

if TYPE_CHECKING:
    from phalanx.launch.spec import LaunchSpec

IMPORT_MOMENTS = (15.0, *MOMENTS)
"""torch takes a few seconds from a local disk; a cold network disk is worth a word."""
MACHINES_MOMENTS = (2.0, *MOMENTS)
"""Somebody has to start the other machines: say at once who is missing."""


class Prelude:
    """First torch is imported, then the machines gather, then the ranks are forked. Each has a clock of its own."""

    def __init__(self, spec: LaunchSpec, now: float, *, serving: bool) -> None:
        self._endpoint = spec.rdzv_endpoint
        self._machines = spec.num_nodes
        self._imports = " and ".join(["torch", *extra_modules(spec.env)[:1]])
        # Node 0 is at the endpoint itself.
        self._arrived = 1 if spec.node_rank == 0 else 0
        self._serving = False
        self._reminder: Reminder | None = Reminder(now, IMPORT_MOMENTS)
        if serving:
            self.take_serving(now)

    def take_serving(self, now: float) -> None:
        """Note that the warm process has answered: torch is imported."""
        if not self._serving:
            self._serving = True
            self._reminder = Reminder(now, MACHINES_MOMENTS if self._machines > 1 else MOMENTS)

    def take_arrived(self, machines: int, now: float) -> None:
        """Note how many machines have come to the endpoint, this one included; the user hears of it soon."""
        changed = 1 < machines != self._arrived
        self._arrived = machines
        if changed:
            self._reminder = Reminder(now, MACHINES_MOMENTS)

    def take_place(self, now: float) -> None:
        """Note that all machines are here."""
        self._arrived = self._machines
        if self._serving:
            self._reminder = Reminder(now)

    def end(self) -> None:
        """Note that the ranks run: from here on they speak for themselves."""
        self._reminder = None

    @property
    def activity(self) -> str:
        """What goes on, as the end of a sentence: "importing torch", "waiting for 1 of 2 machines at node0:29400"."""
        if not self._serving:
            return f"importing {self._imports}"
        missing = self._machines - max(self._arrived, 1)
        if self._machines == 1 or missing <= 0:
            return "starting the ranks"
        silence = "" if self._arrived else " (nobody answers there yet)"
        return f"waiting for {missing} of {self._machines} machines at {self._endpoint}{silence}"

    @property
    def next_deadline(self) -> float | None:
        """When `take_notice` may next have something to say."""
        return None if self._reminder is None else self._reminder.next_moment

    def take_notice(self, now: float) -> str | None:
        """Return what to tell the user now, if anything."""
        if self._reminder is None or not self._reminder.is_due(now):
            return None
        waited = now - self._reminder.began
        if self.activity.startswith("waiting"):
            return self.activity
        return f"still {self.activity} after {in_words(waited)}"
