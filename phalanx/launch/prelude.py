"""Notices before the first rank runs: what the launch waits for, and when to report it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.host.reminders import MOMENTS, Reminder, in_words
from phalanx.launch.preload import extra_modules

if TYPE_CHECKING:
    from phalanx.launch.spec import LaunchSpec

IMPORT_MOMENTS = (15.0, *MOMENTS)
"""torch takes a few seconds from a local disk; from a cold network disk, far more."""
MACHINES_MOMENTS = (2.0, *MOMENTS)
"""The user has to start the other machines: report early which are missing."""


class Prelude:
    """First torch is imported, then the machines gather, then the ranks are forked. Each phase has its own clock."""

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
        """Note how many machines have come to the endpoint, this one included; a notice follows soon."""
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
        """Note that the ranks run: from here on they report progress."""
        self._reminder = None

    @property
    def activity(self) -> str:
        """The phase, as the end of a sentence: "importing torch", "waiting for 1 of 2 machines at node0:29400"."""
        if not self._serving:
            return f"importing {self._imports}"
        missing = self._machines - max(self._arrived, 1)
        if self._machines == 1 or missing <= 0:
            return "starting the ranks"
        silent = "" if self._arrived else " (no answer there yet)"
        return f"waiting for {missing} of {self._machines} machines at {self._endpoint}{silent}"

    @property
    def next_deadline(self) -> float | None:
        """When `take_notice` may next return a notice."""
        return None if self._reminder is None else self._reminder.next_moment

    def take_notice(self, now: float) -> str | None:
        """Return the notice that is due now, if any."""
        if self._reminder is None or not self._reminder.is_due(now):
            return None
        waited = now - self._reminder.began
        if self.activity.startswith("waiting"):
            return self.activity
        return f"still {self.activity} after {in_words(waited)}"
