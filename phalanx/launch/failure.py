"""What went wrong, as data: made by the node that saw it, shared between nodes, put into words by `report`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Failure:
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

    def __str__(self) -> str:
        from phalanx.launch.report import render

        return render(self)

    def to_message(self) -> dict[str, Any]:
        """Write it so that it can travel to another node."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Failure:
        """Read back what `to_message` wrote."""
        return cls(**{**message, "details": tuple(message["details"])})
