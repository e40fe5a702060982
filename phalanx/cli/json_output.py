"""`--json`: one JSON value on standard output, and all else that a verb shows on standard error."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError, UsageError


def add_json_flag(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --json, with which a verb prints one JSON value; all other output goes to standard error."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON, all else on standard error")


def print_json(value: Any) -> None:
    """Print a value as JSON on standard output; numbers that JSON lacks (nan, inf) become null."""
    print(json.dumps(_finite(value), indent=2, default=str))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_json_path(path: str | None) -> None:
    """Raise before the work begins where its result cannot be written."""
    if path is not None and path != "-" and not Path(path).absolute().parent.is_dir():
        raise UsageError(f"--json {path}: the folder {Path(path).parent} does not exist")


def write_json(value: Any, path: str) -> None:
    """Write a value where `--json` says; `-` is standard output."""
    text = json.dumps(value, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {path}: {error.strerror}") from None


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
