"""The parsers of the verbs with many flags, apart from the verbs: help and completion import nothing else."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.cli import mistakes
from phalanx.cli.flags import SECTIONS, FlagParser, add_config_flags, add_target_flags
from phalanx.cli.json_output import add_json_flag, add_output_flag
from phalanx.recipes import load_recipe, recipe_names
from phalanx.reliability import AT_RANDOM, KINDS

_TUNE = """Search for the best hyperparameters.

Each trial is a run of `phalanx train` on --num-workers ranks, in its own folder. The
space is a TOML file, such as

  learning_rate = { loguniform = [1e-4, 1e-1] }
  optimizer     = { choice = ["sgd", "adamw"] }
  momentum      = { uniform = [0.5, 0.99], when = { optimizer = "sgd" } }

Names of settings reach the trainer of the run, other names are arguments of the script (--name=value). Settings
among the flags below apply to every trial. The same --seed gives the same trials and the same best one."""

_VERIFY = """Prove that a layout gives the same result as one process.

Runs the same global batches on one process and on the layout, in float64 and in float32, with dropout off, and
compares losses, gradient norms, and each module's outputs, gradients and weights. Exit code 1 if they differ beyond
rounding; names the first module that differs. Takes a recipe, a reference model (gpt, llama, ...), or a
--script that defines build() -> (model, data set, loss_fn).

With faults, given (--fault, --fault-plan) or random (--faults N), trains a recipe or a script while they happen,
and reports for each one when it was detected, how long the recovery took and how many steps were lost. Exit code 1
if the run failed, if processes or files are left behind, or if the weights differ from those of a run without
faults: in any bit with --strategy ring --fixed-order, otherwise beyond rounding."""


class TrainParser(FlagParser):
    """The parser of `phalanx train`, whose help lists the recipes, and tells about each."""

    def help_about(self, part: str, recipe: str | None) -> str:
        """Return the help of a recipe if one is named, before or after --help, or of one of its parts."""
        if recipe is None and part in recipe_names():
            recipe, part = part, ""
        if recipe is not None and part not in ("all", *SECTIONS):
            from phalanx.cli.recipe_help import recipe_help  # for this help alone

            return recipe_help(self.prog, recipe, part)
        return super().help_about(part, recipe)

    def format_help(self, part: str = "") -> str:
        """Return the help; the recipes are read for it alone."""
        self.epilog = "\n".join(
            [
                "recipes (phalanx train RECIPE --help has its options):",
                *(f"  {name:<11} {load_recipe(name).summary}" for name in recipe_names()),
            ]
        )
        return super().format_help(part)


def train_parser() -> FlagParser:
    """Return the parser of `phalanx train`."""
    parser = TrainParser(
        prog="phalanx train",
        usage="phalanx train <recipe> | --model M --data D | --script FILE | -m MODULE [options] [-- its arguments]",
        description="Train on N ranks.",
    )
    add_target_flags(parser)
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="RUN", help="continue RUN, or the last run of this, in its folder"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the run that --run-dir holds")
    parser.add_argument("--dry-run", action="store_true", help="show what would run, and start nothing")
    parser.add_argument(
        "--tags", metavar="NAMES", help="labels for the run, which other runs can share: --tags sweep1,wide"
    )
    parser.add_argument("--note", metavar="TEXT", default="", help="a note about the run")
    add_json_flag(parser, "the summary of the run")
    add_config_flags(parser)
    return parser


def tune_parser() -> FlagParser:
    """Return the parser of `phalanx tune`."""
    parser = FlagParser(
        prog="phalanx tune",
        usage="phalanx tune <recipe> | --script FILE | -m MODULE --space FILE [options] [-- script's arguments]\n"
        "       phalanx tune <recipe> --lr [--plot FILE] [options]",
        description=_TUNE,
    )
    add = parser.add_argument
    add_target_flags(parser)
    add("--space", metavar="FILE", help="the search space, a TOML file")
    add("--metric", default="val/loss", metavar="NAME", help="metric to optimize: val/accuracy, ... [val/loss]")
    add("--mode", metavar="min|max", help="whether lower or higher is better (default: by the metric's name)")
    add("--trials", "--num-samples", type=int, metavar="N", help="how many trials [10; grid: every point]")
    add("--parallel", type=int, metavar="N", help="how many of them run at once (default: as GPUs or cores allow)")
    add("--scheduler", default="none", metavar="asha|pbt|median|none", help="which trials are stopped early [none]")
    add("--search", default="random", metavar="random|grid|optuna", help="how points are chosen [random]")
    add("--trials-per-gpu", type=int, default=1, metavar="N", help="trials that share a GPU [1]")
    add("--engine", default="auto", metavar="auto|local|ray", help="auto: ray if --address is given, else local")
    add("--grace", type=int, default=1, metavar="N", help="asha, median: iterations (epochs) that every trial gets [1]")
    add("--eta", type=int, default=3, metavar="N", help="asha: one of this many trials continues at each rung [3]")
    add("--interval", type=int, default=1, metavar="N", help="pbt: iterations between exchanges [1]")
    add("--mutate", metavar="NAMES", help="pbt: hyperparameters that change during a trial, separated by commas [all]")
    add(
        "--lr",
        action="store_true",
        help="find a learning rate with one short training in which it grows; needs no --space",
    )
    text = "--lr: draw the losses over the rates into this file"
    add_output_flag(parser, "--plot", endings=(".svg",), help=text)
    add("--part", metavar="I/N", help="run every N-th trial from number I: a random or grid search split over N jobs")
    add("--study-dir", metavar="DIR", help="folder of the search [runs/tune-<name>-<time>]")
    add("--resume", action="store_true", help="continue the search in --study-dir")
    add_json_flag(parser, "the best trial and all others")
    add_config_flags(parser)
    return parser


def verify_parser() -> FlagParser:
    """Return the parser of `phalanx verify`."""
    kinds = "\n".join(f"  {name:<11} {text}" for name, text in KINDS.items())
    parser = FlagParser(
        prog="phalanx verify",
        usage="phalanx verify <recipe or model> | --script FILE | --case NAME "
        "[--resume | --reshard LAYOUT | --faults [N] | --fault F ... | --own-loop] [options]",
        description=_VERIFY,
        epilog=f"kinds of faults:\n{kinds}",
    )
    add_target_flags(parser)
    parser.add_argument("--resume", action="store_true", help="stop half-way, resume, and compare bits")
    parser.add_argument("--reshard", metavar="LAYOUT", help="save here, load on another layout: ddp:1, fsdp:4")
    parser.add_argument("--own-loop", action="store_true", help="train with a loop over a Formation, as users write it")
    parser.add_argument("--case", metavar="NAME", help="prove a small case: late-labels, changed-loss, data-schema")
    add_fault_flags(parser)
    add_config_flags(parser)
    return parser


def add_fault_flags(parser: FlagParser) -> None:
    """Add the flags of `phalanx verify` that a run under faults does not share with `phalanx train`, and --json."""
    add = parser.add_argument
    random = f"kinds of the random faults, separated by commas [{','.join(AT_RANDOM)}]"
    add("--faults", type=int, nargs="?", const=True, metavar="N", help="kill, remove and add ranks, and compare the "
        "weights; with a number: this many at random by --seed, in a real run")  # fmt: skip
    add("--kinds", metavar="NAMES", help=random)
    add("--fault", action="append", default=[], metavar="FAULT", help="such as kill:rank=2,step=50; may be repeated")
    add("--fault-plan", metavar="FILE", help="a TOML file of faults, a table [[fault]] for each")
    add("--no-compare", action="store_true", help="do not train a second time without faults to compare the weights")
    add("--own-objects", action="store_true", help="train with an optimizer and a scheduler object, as in Python")
    add("--no-checkpoints", action="store_true", help="add no checkpoints to a run that has none: only memory is left")
    add("--out", metavar="DIR", help="folder for the run, the quiet run and their output [runs/faults-<name>-<time>]")
    add_json_flag(parser, "all measurements")


CKPT_ACTIONS = {
    "ls": "list the checkpoints of a run or a directory, the newest first",
    "inspect": "show one checkpoint: step, settings, layout, versions, tensors, files and hashes",
    "check": "read every file and compare its hash; exit code 1 if one is damaged",
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
        add(
            "--keep-last",
            type=int,
            required=True,
            metavar="N",
            help="how many complete checkpoints of each run to keep",
        )
        add("--keep-every", type=int, metavar="M", help="also keep those of every M-th step")
        add("--dry-run", action="store_true", help="show what would be removed, and remove nothing")
    if action == "cp":
        add("--all", action="store_true", help="copy all checkpoints, the oldest first")
    add_json_flag(parser, "it")
    return parser


PARSERS: dict[str, Callable[[], FlagParser]] = {"train": train_parser, "tune": tune_parser, "verify": verify_parser}
"""By verb; the other verbs have a function `parser` in their own files."""
mistakes.PARSERS.update(PARSERS)
