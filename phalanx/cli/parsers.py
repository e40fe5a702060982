"""The parsers of the verbs with many flags, apart from the verbs: help and completion import nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from phalanx.cli.flags import FlagParser, add_config_flags, add_target_flags
from phalanx.cli.json_output import add_json_flag
from phalanx.recipes import load_recipe, recipe_names

_TUNE = """Search for the best hyperparameters.

Every trial is a run like that of `phalanx train`, on as many ranks as --num-workers says, in its own folder. The
space is a TOML file, such as

  learning_rate = { loguniform = [1e-4, 1e-1] }
  optimizer     = { choice = ["sgd", "adamw"] }
  momentum      = { uniform = [0.5, 0.99], when = { optimizer = "sgd" } }

Names of settings reach the trainer of the run, other names are arguments of the script (--name=value). All flags below
that are settings hold for every trial. With the same --seed a search gives the same trials and the same best again."""

_VERIFY = """Prove that a layout gives the same result as one process.

Runs the same global batches on one process and on the layout, in float64 and in float32, with dropout off, and
compares losses, gradient norms, and each module's outputs, gradients and weights. Exit code 1 when they differ
beyond rounding; the first module that differs is named.

With faults that are named, or a number of them, a recipe or a training script is run for real while they happen, and
each recovery is reported: phalanx verify --fault kill:rank=1,step=5 --help"""


def train_parser(*, with_recipes: bool = False) -> FlagParser:
    """Return the parser of `phalanx train`; `with_recipes`: its help lists them."""
    recipes = [f"  {name:<11} {load_recipe(name).summary}" for name in recipe_names()] if with_recipes else []
    parser = FlagParser(
        prog="phalanx train",
        usage="phalanx train <recipe> | --model M --data D | --script FILE | -m MODULE [options] [-- its arguments]",
        description="Train on N ranks.",
        epilog="\n".join(["recipes:", *recipes]),
    )
    add_target_flags(parser)
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="RUN", help="continue RUN, or the last run of this, in its folder"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the run that --run-dir holds")
    parser.add_argument("--dry-run", action="store_true", help="show what would run, and start nothing")
    add_json_flag(parser, "the summary of the run")
    add_config_flags(parser)
    return parser


def tune_parser() -> FlagParser:
    """Return the parser of `phalanx tune`."""
    parser = FlagParser(
        prog="phalanx tune",
        usage="phalanx tune <recipe> | --script FILE | -m MODULE --space FILE [options] [-- script's arguments]",
        description=_TUNE,
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
    add("--part", metavar="I/N", help="run every N-th trial from number I: a random or grid search split over N jobs")
    add("--study-dir", metavar="DIR", help="folder of the search [runs/tune-<name>-<time>]")
    add("--resume", action="store_true", help="continue the search in --study-dir")
    add_json_flag(parser, "the best trial and all others")
    add_config_flags(parser)
    return parser


def verify_parser() -> FlagParser:
    """Return the parser of `phalanx verify`."""
    parser = FlagParser(
        prog="phalanx verify",
        usage="phalanx verify <recipe or model> | --script FILE "
        "[--resume | --reshard LAYOUT | --faults | --own-loop] [options]",
        description=_VERIFY,
    )
    names = ", ".join(recipe_names())
    parser.add_argument("subject", nargs="?", help=f"a recipe ({names}) or a reference model (gpt, llama, ...)")
    parser.add_argument("--preset", metavar="NAME", help="which size of the reference model")
    parser.add_argument("--script", metavar="FILE", help="a script that defines build() -> (model, data set, loss_fn)")
    parser.add_argument("--resume", action="store_true", help="stop half-way, resume, and compare bits")
    parser.add_argument("--reshard", metavar="LAYOUT", help="save here, load on another layout: ddp:1, fsdp:4")
    parser.add_argument(
        "--faults",
        action="store_true",
        help="kill, remove and add ranks, and compare the weights; --faults 10: this many at random, in a real run",
    )
    parser.add_argument("--own-loop", action="store_true", help="train by loops of a Formation, as users write them")
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured (- for standard output)")
    add_config_flags(parser)
    return parser


CKPT_ACTIONS = {
    "ls": "list the checkpoints of a run or a directory, the newest first",
    "inspect": "show one checkpoint: step, settings, layout, versions, tensors, files and hashes",
    "check": "read every file and compare its hash; exit code 1 where one is damaged",
    "diff": "show which tensors and settings of two checkpoints differ, and by how much",
    "reshard": "write a checkpoint again with its tensors in N parts, which N ranks read at once",
    "prune": "remove old checkpoints; the newest complete ones and the best stay",
    "cp": "copy a checkpoint to another directory or URL; run again, it continues",
}
_CKPT_PATHS = """PATH is a run (name, beginning of one, tag, folder, last), a directory of checkpoints, one checkpoint,
or a URL such as s3://bucket/kept. PATH@200, PATH@best and PATH@last name one of several; else it is the newest."""
_CKPT_USAGE = {
    "diff": "PATH PATH",
    "reshard": "PATH DIR --ranks N",
    "prune": "PATH --keep-last N",
    "cp": "PATH DIR|URL",
}


def ckpt_parser(action: str = "ls") -> FlagParser:
    """Return the parser of one action of `phalanx ckpt`."""
    parser = FlagParser(
        prog=f"phalanx ckpt {action}",
        usage=f"phalanx ckpt {action} {_CKPT_USAGE.get(action, 'PATH')} [options]",
        description=f"{CKPT_ACTIONS[action]}.",
        epilog="actions:\n" + "\n".join(f"  {n:<8} {text}" for n, text in CKPT_ACTIONS.items()) + f"\n\n{_CKPT_PATHS}",
    )
    add = parser.add_argument
    add("run", metavar="PATH", help="see below")
    if action in ("diff", "reshard", "cp"):
        add(
            "target",
            metavar="PATH" if action == "diff" else "DIR",
            help="the second one" if action == "diff" else "where to",
        )
    if action in ("inspect", "diff"):
        add("--tensors", action="store_true", help="show every tensor")
    if action == "diff":
        add("--only", metavar="ENTRY", help="only tensors under this name: model, optimizer.state, ...")
    if action == "reshard":
        add("--ranks", type=int, required=True, metavar="N", help="how many parts")
    if action == "prune":
        add("--keep-last", type=int, required=True, metavar="N", help="how many complete ones of each run stay")
        add("--keep-every", type=int, metavar="M", help="those of every M-th step stay as well")
        add("--dry-run", action="store_true", help="show what would be removed, and remove nothing")
    if action == "cp":
        add("--all", action="store_true", help="copy all checkpoints, the oldest first")
    add_json_flag(parser, "it")
    return parser


def is_about_faults(words: Sequence[str]) -> bool:
    """Whether a command names faults, or a number of them; `--faults` alone is a proof of `phalanx verify`."""
    named = any(word.split("=")[0] in ("--fault", "--fault-plan", "--kinds") for word in words)
    numbers = (word == "--faults" and after.lstrip("-").isdecimal() for word, after in itertools.pairwise(words))
    return named or any(numbers) or any(word.startswith("--faults=") for word in words)


PARSERS: dict[str, Callable[[], FlagParser]] = {"train": train_parser, "tune": tune_parser, "verify": verify_parser}
"""By verb; the other verbs have a function `parser` in their own files."""
