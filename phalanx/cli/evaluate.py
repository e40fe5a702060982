"""`phalanx evaluate`: measure a trained model on data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from phalanx.cli.flags import FlagParser, add_config_flags, given_flags, write_json

_HELP = "Measure the best checkpoint of a run on its validation data, or on other data."


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a trained model."""
    parser.add_argument("run", metavar="RUN", help="a run (name, beginning of one, tag, folder, last) or a checkpoint")
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best, last, a step or a path [best]")
    parser.add_argument("--model", metavar="MODEL", help="the model, where the run was not trained from a recipe")
    parser.add_argument("--data", metavar="DATA", help="other data: my_package.data:load, a folder of files, or digits")


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    usage = "phalanx evaluate RUN|CHECKPOINT [--data DATA] [options]"
    parser = FlagParser(prog="phalanx evaluate", usage=usage, description=_HELP)
    add_run_flags(parser)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON (default: to the terminal)")
    add_config_flags(parser)
    namespace = parser.parse_all(arguments)
    from phalanx.trainers.saved_run import open_run

    found, data = open_run(namespace.run, namespace.checkpoint, namespace.model, namespace.data)
    metrics = found.evaluate(data, **given_flags(namespace))
    if namespace.json:
        write_json({"run": found.name, "checkpoint": str(found.checkpoint), "metrics": metrics}, namespace.json)
        return 0
    print(f"{found.checkpoint}")
    for name, value in metrics.items():
        print(f"  {name:<12} {value:.6g}")
    return 0
