"""`phalanx tune`: search for the best hyperparameters of a recipe, a script or a module."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from phalanx.cli.flags import FlagParser, add_config_flags, add_target_flags, read_target, resolve_flags, split_own
from phalanx.errors import UsageError
from phalanx.recipes import Recipe
from phalanx.tune.trainable import Trainable

_HELP = """Search for the best hyperparameters.

Every trial is a run like that of `phalanx train`, on as many ranks as --num-workers says, in its own folder. The
space is a TOML file, such as

  learning_rate = { loguniform = [1e-4, 1e-1] }
  optimizer     = { choice = ["sgd", "adamw"] }
  momentum      = { uniform = [0.5, 0.99], when = { optimizer = "sgd" } }

Names of settings reach the trainer of the run, other names are arguments of the script (--name=value). All flags below
that are settings hold for every trial. With the same --seed a search gives the same trials and the same best again."""


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    words, own = split_own(arguments)
    namespace = _parser().parse_all(words)
    if namespace.space is None:
        raise UsageError("tune needs --space", hint="Write: phalanx tune digits --space space.toml")
    from phalanx.tune.search import SearchRequest, search
    from phalanx.tune.space import SearchSpace

    address = vars(namespace).pop("address", None)  # the cluster of the search, not of one run's ranks
    space = SearchSpace.read(namespace.space)
    subject = _subject(namespace, own)
    mutate = None if namespace.mutate is None else tuple(name.strip() for name in namespace.mutate.split(","))
    asked = SearchRequest(
        metric=namespace.metric, mode=namespace.mode, num_samples=namespace.num_samples,
        scheduler=namespace.scheduler, search=namespace.search, engine=namespace.engine, address=address,
        trials=namespace.trials,
        trials_per_gpu=namespace.trials_per_gpu, grace=namespace.grace, eta=namespace.eta,
        interval=namespace.interval, mutate=mutate, study_dir=namespace.study_dir, resume=namespace.resume,
    )  # fmt: skip
    search(subject, space, asked)
    return 0


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="phalanx tune",
        usage="phalanx tune <recipe> | --script FILE | -m MODULE --space FILE [options] [-- script's arguments]",
        description=_HELP,
    )
    add = parser.add_argument
    add_target_flags(parser)
    add("--space", metavar="FILE", help="the search space, a TOML file")
    add("--metric", default="val/loss", metavar="NAME", help="metric to optimize: val/accuracy, ... [val/loss]")
    add("--mode", metavar="min|max", help="whether less or more of it is better (default: by the metric's name)")
    add("--num-samples", type=int, metavar="N", help="how many trials [10; grid: every point]")
    add("--scheduler", default="none", metavar="asha|pbt|median|none", help="which trials are stopped early [none]")
    add("--search", default="random", metavar="random|grid|optuna", help="how points are chosen [random]")
    add("--trials", type=int, metavar="N", help="trials that run at once (default: as GPUs or cores allow)")
    add("--trials-per-gpu", type=int, default=1, metavar="N", help="trials that share a GPU [1]")
    add("--engine", default="auto", metavar="auto|local|ray", help="auto: ray where --address is given, else local")
    add("--grace", type=int, default=1, metavar="N", help="asha, median: iterations (epochs) that every trial gets [1]")
    add("--eta", type=int, default=3, metavar="N", help="asha: one of this many trials continues at each rung [3]")
    add("--interval", type=int, default=1, metavar="N", help="pbt: iterations between exchanges [1]")
    add("--mutate", metavar="NAMES", help="pbt: hyperparameters that change during a trial, separated by commas [all]")
    add("--study-dir", metavar="DIR", help="folder of the search [runs/tune-<name>-<time>]")
    add("--resume", action="store_true", help="continue the search in --study-dir")
    add_config_flags(parser)
    return parser


def _subject(namespace: argparse.Namespace, own: list[str]) -> Trainable:
    from phalanx.tune.trainable import RecipeTrainable, ScriptTrainable

    hint = "Write: phalanx tune digits --space space.toml, or phalanx tune --script train.py ..."
    named = read_target(namespace, own, "tune", hint)
    if isinstance(named, Recipe):
        return RecipeTrainable(resolve_flags(namespace, named), named)
    return ScriptTrainable(resolve_flags(namespace, None), named)
