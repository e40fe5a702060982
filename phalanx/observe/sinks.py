"""Sinks that need nothing but the standard library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.observe.folders import make_private

if TYPE_CHECKING:
    from phalanx.observe.events import Event


class JsonlSink:
    """Appends every event to a file, one JSON object a line; a resumed run goes on where the file ends."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        make_private(self.path.parent)
        torn = _ends_inside_a_line(self.path)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        if torn:
            self._file.write("\n")  # A killed writer's last line must not swallow our first.

    def handle(self, event: Event) -> None:
        """Write one line."""
        self._file.write(event.to_json() + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _ends_inside_a_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
