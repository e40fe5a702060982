"""A failure report: which rank failed first, why, and how the user reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """The first guilty rank and its cause. `str(failure)` is the report to show the user."""

    cause: str
    """One sentence: what happened to the rank."""
    exit_code: int
    """What the launcher exits with: the guilty rank's own code, or 128 + the signal that killed it."""
    rank: int | None = None
    """The guilty global rank; None when no single rank is to blame."""
    label: str = ""
    host: str = ""
    step: int | None = None
    """The last step the rank gave a heartbeat for."""
    details: tuple[str, ...] = ()
    """The last lines of its traceback, stack or log."""
    hint: str = ""
    others_stopped: int = 0
    """How many ranks were stopped because of it."""
    logs: str = ""
    """Where to read more."""
    was_killed: bool = False
    """Whether a signal from outside ended it: a restart would not meet the same error."""

    def __str__(self) -> str:
        """Return the report: rank, host, step and cause; then the evidence; then hint and logs."""
        lines = [self._headline(), *(f"  {line}" for line in self.details)]
        if self.hint:
            lines.append(f"  {self.hint}")
        if self.others_stopped:
            ranks = "1 other rank" if self.others_stopped == 1 else f"{self.others_stopped} other ranks"
            lines.append(f"{ranks} stopped because of it.")
        if self.logs:
            lines.append(f"Logs: {self.logs}")
        return "\n".join(lines)

    def _headline(self) -> str:
        if self.rank is None:
            return self.cause
        label = "" if self.label in ("", f"r{self.rank}") else f" [{self.label}]"
        host = f" on {self.host}" if self.host else ""
        step = "" if self.step is None else f" at step {self.step}"
        return f"rank {self.rank}{label}{host}{step} {self.cause}"

    def to_message(self) -> dict[str, Any]:
        """Return it as a message to another node."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> FailureReport:
        """Read back what `to_message` wrote."""
        return cls(**{**message, "details": tuple(message["details"])})
