"""`--json` of a verb that trains: what it shows goes to standard error, and one JSON value to standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from phalanx.cli.flags import print_json
from phalanx.errors import PhalanxError


@contextmanager
def json_at_end(summary: Callable[[], dict[str, Any]], *, wanted: bool = True) -> Iterator[None]:
    """Send what is shown to standard error; at the end print the summary, with status and error of one that failed."""
    if not wanted:
        yield
        return
    failure: dict[str, Any] = {}
    try:
        with redirect_stdout(sys.stderr):
            yield
    except PhalanxError as error:
        failure = {"status": "failed", "error": str(error)}
        raise
    except KeyboardInterrupt:
        failure = {"status": "interrupted"}
        raise
    finally:
        found = summary()
        print_json({**failure, **found, "status": found.get("status") or failure.get("status", "finished")})


def run_summary(run_dir: Path) -> dict[str, Any]:
    """Return what the events of a run say about its end: status, steps, speed, the last metrics, the checkpoint."""
    path = run_dir / "events.jsonl"
    ended: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            continue
        if event["event"] == "run_started":  # of a resumed run the last part counts
            ended, measured = {}, {}
        elif event["event"] == "run_ended":
            ended = event
        elif event["event"] == "metrics":
            measured |= {f"{event['split']}/{name}": value for name, value in event["values"].items()}
    rest = {name: value for name, value in ended.items() if name not in ("event", "time", "rank", "next_commands")}
    return {"run_dir": str(run_dir), **rest, "metrics": measured}
