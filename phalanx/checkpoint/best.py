"""The best checkpoint of a run: marked by a small file inside it, so that other tools find it without the events."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.find import list_checkpoints
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


def mark_best(best: Best, previous: Path | None = None) -> None:
    """Write the mark into a published checkpoint, then remove that of the previous best one."""
    body = {"metric": best.metric, "mode": best.mode, "value": best.value, "step": best.step, "time": time.time()}
    try:
        replace_file(best.path / MARK, json.dumps(body) + "\n")
        if previous is not None and previous != best.path:
            (previous / MARK).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{best.path} cannot be marked as the best checkpoint: {error}") from error


def is_marked(path: Path) -> bool:
    """Whether a checkpoint has the mark."""
    return (path / MARK).exists()


def find_best(directory: Path | str) -> Best | None:
    """Return the best checkpoint in a directory, of the run that saved last and those it continues; None without one.

    Where several are marked, as a resumed run leaves the mark of the run that it continues, the later mark counts.
    """
    found = list_checkpoints(directory)
    if not found:
        return None
    newest = found[0].manifest
    through = {run["run_id"]: run["step"] for run in newest.lineage} | {newest.run_id: newest.step}
    own = [one.path for one in found if one.step <= through.get(one.manifest.run_id, -1)]
    marks = [mark for path in own if (mark := _read(path)) is not None]
    return max(marks, key=lambda mark: mark[0], default=(0.0, None))[1]


def _read(path: Path) -> tuple[float, Best] | None:
    try:
        body = json.loads((path / MARK).read_text(encoding="utf-8"))
        best = Best(path, int(body["step"]), str(body["metric"]), str(body["mode"]), float(body["value"]))
        return float(body["time"]), best
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path / MARK} cannot be read: {error}", hint="Remove it: it only marks the best checkpoint."
        ) from error
