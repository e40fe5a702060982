"""`phalanx evaluate`: measure a trained model on data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import pairwise
from typing import Any

from phalanx.cli.flags import FlagParser, add_config_flags, given_flags
from phalanx.cli.json_output import add_json_flag, print_json
from phalanx.config.aliases import NAMES
from phalanx.errors import UsageError
from phalanx.recipes import read_changes

_HELP = "Measure the best checkpoint of a run on its validation data, or on other data."


def add_run_flags(parser: argparse.ArgumentParser, data: str) -> None:
    """Add the flags that tell what of a run is used, and on which data; `data`: what these are for."""
    add = parser.add_argument
    add("--checkpoint", default="best", metavar="WHICH", help="best, last, a step or a path [best]")
    add("--model", metavar="MODEL", help="the model, if the run was not trained from a recipe")
    add("--data", metavar="DATA", help=f"{data}: a file, a folder, a pattern ('a/*.jpg'), digits, my_package.data:load")
    add(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="data.KEY=VALUE",
        help="change how the run's data are read: --set data.target=price",
    )


class DataParser(FlagParser):
    """The parser of a verb that takes files as arguments, in the place of --data, before and after its flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_argument(
            "run", metavar="RUN", help="a run (name, beginning of one, tag, folder, last) or a checkpoint"
        )
        self.add_argument("files", nargs="*", metavar="DATA", help="files, as --data")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, which takes no files after a flag."""
        parsed, unknown = super().parse_known_args(args, namespace)
        # A word after an unknown flag is its value.
        is_file = [not word.startswith("-") and not before.startswith("-") for before, word in pairwise(["", *unknown])]
        parsed.files += [word for word, is_one in zip(unknown, is_file, strict=True) if is_one]
        return parsed, [word for word, is_one in zip(unknown, is_file, strict=True) if not is_one]


def asked_of(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return what a command says about a trained model and its data, as arguments of `open_run`."""
    # A shell makes several words of: --data shots/*.jpg
    files = [*([namespace.data] if namespace.data is not None else []), *getattr(namespace, "files", [])]
    settings, changes = read_changes(namespace.changes, NAMES.__contains__)
    if settings:
        raise UsageError(
            f"--set {next(iter(settings))}: a setting is a flag here, --{next(iter(settings)).replace('_', '-')}"
        )
    data = (files[0] if len(files) == 1 else files) if files else None
    named = {"name": namespace.run, "checkpoint": namespace.checkpoint, "model": namespace.model}
    return {**named, "data": data, "changes": changes}


def parser() -> FlagParser:
    """Return the parser of the verb."""
    usage = "phalanx evaluate RUN|CHECKPOINT [DATA ... | --data DATA] [options]"
    parser = DataParser(prog="phalanx evaluate", usage=usage, description=_HELP)
    add_run_flags(parser, "other data to measure")
    add_json_flag(parser, "the metrics")
    add_config_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    from phalanx.zoo.saved_run import open_run

    with redirect_stdout(sys.stderr):
        saved, data = open_run(**asked_of(namespace))
        metrics = saved.evaluate(data, **given_flags(namespace))
    if namespace.json:
        print_json({"run": saved.name, "checkpoint": str(saved.checkpoint), "metrics": metrics})
        return 0
    print(f"{saved.checkpoint}")
    for name, value in metrics.items():
        print(f"  {name:<12} {value:.6g}")
    return 0
