"""What a verb gives to other programs: `--json`, one JSON value on standard output; and files, by one rule."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from phalanx.config.option import check_folder
from phalanx.errors import UsageError, unknown_name


class OutputAction(argparse._StoreAction):
    """A flag that names a file to write: see `check_outputs`."""

    endings: tuple[str, ...] = ()


def add_output_flag(parser: Any, *names: str, endings: tuple[str, ...], metavar: str = "FILE", help: str) -> None:
    """Add a flag that names a file to write, and --force; `endings`: those that the verb can write, empty for any.

    `parser`: also a group of arguments.
    """
    parser.add_argument(*names, action=OutputAction, metavar=metavar, help=help).endings = endings
    parser.add_argument("--force", action="store_true", help=f"replace the file of {names[-1]} if it exists")


def check_outputs(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> None:
    """Refuse, before any work is done, a file that cannot or must not be written; `-` is standard output."""
    for action in parser._actions:
        path = getattr(namespace, action.dest, None)
        if isinstance(action, OutputAction) and path not in (None, "-"):
            check_output(Path(path), action.option_strings[-1], action.endings, force=namespace.force)


def check_output(path: Path, flag: str, endings: tuple[str, ...] = (), *, force: bool) -> None:
    """Refuse a file in a missing folder, one with an ending that is not written, and one that exists."""
    if path.is_dir() and endings:
        raise UsageError(f"{flag} {path} is a folder", hint=f"Write: {flag} {path / ('out' + endings[0])}")
    if endings and path.suffix not in endings:
        ending = unknown_name("ending", path.suffix or "(none)", endings)
        raise UsageError(f"{flag} {path}: {ending}", hint=f"Write: {flag} {path.with_suffix(endings[0])}")
    check_folder(f"{flag} {path}", path)
    if path.exists() and not force:
        raise UsageError(f"{flag} {path}: it exists already", hint="Name another one, or add --force to replace it.")


def add_json_flag(parser: argparse.ArgumentParser, content: str) -> None:
    """Add --json, with which a verb prints one JSON value; all other output goes to standard error."""
    parser.add_argument("--json", action="store_true", help=f"print {content} as JSON, all else on standard error")


def print_json(value: Any) -> None:
    """Print a value as JSON on standard output; numbers that JSON lacks (nan, inf) become null."""
    print(json.dumps(_finite(value), indent=2, default=str))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def json_at_end(summary: Callable[[], dict[str, Any]], *, enabled: bool = True) -> Iterator[None]:
    """Send what is shown to standard error; at the end print the summary, with status and error of one that failed."""
    if not enabled:
        yield
        return
    failure: dict[str, Any] = {}
    try:
        with redirect_stdout(sys.stderr):
            yield
    except BaseException as error:
        was_stopped = isinstance(error, KeyboardInterrupt)
        failure = {"status": "interrupted"} if was_stopped else {"status": "failed", "error": str(error)}
        raise
    finally:
        print_json({"status": "finished", **failure, **summary()})


def run_summary(run_dir: Path, start: int = 0) -> dict[str, Any]:
    """Return how a run ended, and its last metrics, by its events after an offset in bytes: those of this command."""
    from phalanx.run.stored import StoredRun  # behind --help, which does not need it

    ended: dict[str, Any] = {}
    begun: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    for event in StoredRun(run_dir).events(start):
        if event["event"] == "run_started":  # of a restarted run the last part counts
            ended, measured, begun = {}, {}, {"ranks_per_gpu": event.get("ranks_per_gpu", 1)}
        elif event["event"] == "run_ended":
            ended = event
        elif event["event"] == "metrics":
            measured |= {f"{event['split']}/{name}": value for name, value in event["values"].items()}
    rest = {name: value for name, value in ended.items() if name not in ("event", "time", "rank", "next_commands")}
    return {"run_dir": str(run_dir), **begun, **rest, "metrics": measured}
