"""A wish to stop at the next step boundary, for ranks that no signal can reach: those that are threads of a process."""

from __future__ import annotations

_reason: str | None = None


def wish(reason: str) -> None:
    """Ask this process's rank to stop; `reason` is what it says of it, such as SIGTERM."""
    global _reason
    _reason = reason


def take() -> str | None:
    """Return why this rank is to stop, or None."""
    return _reason
