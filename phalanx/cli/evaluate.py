"""`phalanx evaluate`: measure a trained model on data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from phalanx.cli.flags import FlagParser, add_config_flags, given_flags
from phalanx.cli.json_output import add_json_flag, print_json

_HELP = "Measure the best checkpoint of a run on its validation data, or on other data."


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a trained model."""
    parser.add_argument("run", metavar="RUN", help="a run (name, beginning of one, tag, folder, last) or a checkpoint")
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best, last, a step or a path [best]")
    parser.add_argument("--model", metavar="MODEL", help="the model, where the run was not trained from a recipe")
    parser.add_argument("--data", metavar="DATA", help="other data: my_package.data:load, a folder of files, or digits")


def parser() -> FlagParser:
    """Return the parser of the verb."""
    usage = "phalanx evaluate RUN|CHECKPOINT [--data DATA] [options]"
    parser = FlagParser(prog="phalanx evaluate", usage=usage, description=_HELP)
    add_run_flags(parser)
    add_json_flag(parser, "the metrics")
    add_config_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    from phalanx.trainers.saved_run import open_run

    settings = given_flags(namespace)
    named = (namespace.run, namespace.checkpoint, namespace.model, namespace.data)
    with redirect_stdout(sys.stderr):
        found, data = open_run(*named, data_dir=settings.get("data_dir"))
        metrics = found.evaluate(data, **settings)
    if namespace.json:
        print_json({"run": found.name, "checkpoint": str(found.checkpoint), "metrics": metrics})
        return 0
    print(f"{found.checkpoint}")
    for name, value in metrics.items():
        print(f"  {name:<12} {value:.6g}")
    return 0
