"""The command line: one small file per verb, imported when it is used. Nothing here imports torch."""

from __future__ import annotations

import errno
import os
import re
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.verbs import GROUPS, VERBS, run_verb
from phalanx.errors import EXIT_INTERRUPTED, EXIT_USAGE, PhalanxError
from phalanx.host.processes import process_began
from phalanx.observe.guard import discard_output, say_to_user
from phalanx.version import __version__

_RUN_USERS_CODE = ("evaluate", "predict", "serve", "export")
"""Verbs that run the model and data of the user in this process: what these raise is shown without our frames."""


_began: float | None = None


def command_began() -> float:
    """Return when this command began, in seconds since the epoch: with its process, where it is a program."""
    return time.time() if _began is None else _began


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; errors of users are printed without a traceback."""
    global _began
    _began = process_began() if arguments is None else None
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what the line may become
        from phalanx.cli.completion import complete

        complete()
    if words and re.fullmatch(r"--local[-_]rank=\d+", words[0]):  # DeepSpeed's launcher puts it first
        words = words[1:]
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except PhalanxError as error:
        say_to_user(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.filename is not None:  # a path that cannot be read, written or removed
            say_to_user(f"{error.filename}: {error.strerror}")
            return EXIT_USAGE
        if not _is_about_output(error):
            if _shows_users_error(error, words):
                return 1
            raise
        discard_output(sys.stdout)
        if isinstance(error, BrokenPipeError):  # head or less has ended; a training run continues
            return 0
        say_to_user(f"standard output failed ({error.strerror}).")
        return 1
    except Exception as error:
        if not _shows_users_error(error, words):
            raise
        return 1
    return code


def _shows_users_error(error: Exception, words: Sequence[str]) -> bool:
    """Show what code of the user raised without our frames, where this command runs any; return whether it does."""
    if words[0] not in _RUN_USERS_CODE and "--dry-run" not in words:
        return False
    from phalanx.launch.error_file import users_traceback

    say_to_user("\n".join([f"{type(error).__name__}: {error}", *users_traceback(error)]))
    return True


def _is_about_output(error: OSError) -> bool:
    """Whether an error comes from a write to standard output, and not to another file or socket."""
    if error.filename is not None or sys.stdout is not sys.__stdout__:
        return False
    if isinstance(error, BrokenPipeError):
        poller = select.poll()
        poller.register(1, 0)
        return bool(poller.poll(0))  # the pipe of standard output has no reader
    return error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG)


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["help"] and len(words) > 1:
        words = [*words[1:], "--help"]
    if not words or words[0] in {"-h", "--help", "help"}:
        print(_help())
        return 0
    if words[0] in {"-V", "--version", "version"}:
        print(f"phalanx {__version__}")
        return 0
    if words[0] not in VERBS:
        from phalanx.cli.mistakes import unknown_verb

        say_to_user(unknown_verb(words[0], words[1:], VERBS))
        return EXIT_USAGE
    before = words[1 : words.index("--") if "--" in words else None]
    if {"-h", "--help", "--help-all"} & {*before}:
        print_help(words[0], before)
    return run_verb(words[0], words[1:])


def print_help(verb: str, words: list[str]) -> None:
    """Print the help of a verb whose parser is apart from it, and end; the others print it themselves.

    The verb itself would import what runs it, which takes three times as long.
    """
    from phalanx.cli.parsers import PARSERS

    if verb in PARSERS:
        PARSERS[verb]().parse_known_args(words)


def _help() -> str:
    verbs = "\n\n".join(
        f"{title}:\n" + "\n".join(f"  {name:<11} {text}" for name, text in group.items())
        for title, group in GROUPS.items()
    )
    return (
        "Phalanx: one trainer, every parallelism, from a laptop to a cluster.\n\n"
        "usage: phalanx <command> [options]\n\n"
        f"{verbs}\n\n"
        "next:\n" + "\n".join(f"  {command:<49} {meaning}" for command, meaning in _next(Path()))
    )


def _next(folder: Path) -> list[tuple[str, str]]:
    """Return what to type in a folder: what continues the work that is there, else how to begin."""
    suggestions = [
        (f"phalanx train {path.name}", "the recipe of this folder") for path in sorted(folder.glob("recipe*.toml"))
    ]
    suggestions = suggestions[:1] or [("phalanx train digits", "train a real model on two ranks, in seconds")]
    if any(folder.glob("runs/*/run.json")):
        suggestions += [
            ("phalanx runs", "the runs of this folder"),
            ("phalanx resume last", "continue the last one"),
            ("phalanx ui", "all of them in the browser"),
        ]
    else:
        suggestions.append(("phalanx train --script train.py --num-workers 2", "run any torchrun script"))
    return [*suggestions, ("phalanx <command> --help", "show the options of a command")]
