"""The machine and the last step of each rank on Ray: all that is known of one that was killed."""

from __future__ import annotations

import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.observe.board import HeartbeatBoard


@dataclass
class Seat:
    """One rank's machine, its heartbeat file there, and the last step that it reported."""

    host: str
    board: Path
    step: int | None = None


class Seats:
    """Filled by the launcher from the messages of the ranks."""

    def __init__(self) -> None:
        self._seats: dict[int, Seat] = {}

    def take(self, message: dict[str, Any]) -> None:
        """Note a rank's machine (`seat`) or its current step (`at`)."""
        if "seat" in message:
            self._seats[message["seat"]] = Seat(message["host"], Path(message["board"]))
        elif message["rank"] in self._seats:
            self._seats[message["rank"]].step = message["at"]

    def host(self, rank: int) -> str:
        """Return the machine of a rank, empty where it never reported."""
        seat = self._seats.get(rank)
        return seat.host if seat else ""

    def step(self, rank: int) -> int | None:
        """Return the last step of a rank: by its heartbeats where they can be read here, else by its last message."""
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
        """Remove the folders of killed ranks of this machine, and forget all ranks."""
        for seat in self._seats.values():
            if _is_here(seat):
                shutil.rmtree(seat.board.parent.parent, ignore_errors=True)
        self._seats.clear()


def _is_here(seat: Seat) -> bool:
    return seat.host == socket.gethostname() and seat.board.exists()
