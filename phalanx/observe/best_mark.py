"""The mark of the best checkpoint: a small file inside it, so that it is found without the events and without torch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from phalanx.errors import CheckpointError
from phalanx.host.files import replace_file

MARK = "best.json"


@dataclass(frozen=True)
class Best:
    """The best checkpoint, and the value that made it the best."""

    path: Path
    step: int
    metric: str
    """As dashboards name it: val/loss."""
    mode: str
    """Whether the lowest ("min") or the highest ("max") value is the best."""
    value: float
    time: float = field(default_factory=time.time)


def mark_best(best: Best, previous: Path | None = None) -> None:
    """Write the mark into a published checkpoint, then remove that of the previous best one in its directory."""
    body = {name: value for name, value in asdict(best).items() if name != "path"}
    try:
        replace_file(best.path / MARK, json.dumps(body) + "\n")
        if previous is not None and previous != best.path and previous.parent == best.path.parent:
            (previous / MARK).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{best.path} cannot be marked as the best checkpoint: {error}") from error


def read_mark(path: Path) -> Best | None:
    """Return what the mark of a checkpoint says; None without one."""
    try:
        body = json.loads((path / MARK).read_text(encoding="utf-8"))
        return Best(path, int(body["step"]), body["metric"], body["mode"], float(body["value"]), float(body["time"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path / MARK} cannot be read: {error}", hint="Remove it: it only marks the best checkpoint."
        ) from error


def latest_mark(paths: Iterable[Path]) -> Best | None:
    """Return the best of these checkpoints; a resumed run leaves the mark of the run it continues, the later counts."""
    return max(filter(None, map(read_mark, paths)), key=lambda best: best.time, default=None)
