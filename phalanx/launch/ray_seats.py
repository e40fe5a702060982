"""Where each rank on Ray sits and which step it was last at: what is left to tell of one that was killed."""

from __future__ import annotations

import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.observe.board import HeartbeatBoard


@dataclass
class Seat:
    """One rank's machine, its heartbeats there, and the last step that it told of."""

    host: str
    board: Path
    step: int | None = None


class Seats:
    """Kept by the launcher from the letters of the ranks."""

    def __init__(self) -> None:
        self._seats: dict[int, Seat] = {}

    def take(self, letter: dict[str, Any]) -> None:
        """Take note of where a rank sits (`seat`) or of the step it is at (`at`)."""
        if "seat" in letter:
            self._seats[letter["seat"]] = Seat(letter["host"], Path(letter["board"]))
        elif letter["rank"] in self._seats:
            self._seats[letter["rank"]].step = letter["at"]

    def host(self, rank: int) -> str:
        """Return the machine of a rank, or nothing where it never came to tell."""
        seat = self._seats.get(rank)
        return seat.host if seat else ""

    def step(self, rank: int) -> int | None:
        """Return the last step of a rank: by its heartbeats where they can be read here, else by its last letter."""
        seat = self._seats.get(rank)
        if seat is None:
            return None
        if not _is_here(seat):
            return seat.step
        board = HeartbeatBoard(seat.board)
        try:
            beat = board.read(rank)
        finally:
            board.close()
        return beat.step if beat else seat.step

    def tidy(self) -> None:
        """Remove what killed ranks of this machine left behind, and forget all."""
        for seat in self._seats.values():
            if _is_here(seat):
                shutil.rmtree(seat.board.parent.parent, ignore_errors=True)
        self._seats.clear()


def _is_here(seat: Seat) -> bool:
    return seat.host == socket.gethostname() and seat.board.exists()
