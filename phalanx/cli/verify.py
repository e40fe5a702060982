"""`phalanx verify`: prove that a layout gives the result of one process, or that a run survives faults."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.flags import FlagParser, add_config_flags, add_target_flags, read_target, resolve_flags, split_own
from phalanx.cli.json_output import add_json_flag, check_json_path, print_json, write_json
from phalanx.cli.parsers import is_about_faults, verify_parser
from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.launch import prestart
from phalanx.recipes import Recipe, load_recipe
from phalanx.reliability import AT_RANDOM, KINDS, LINKS, Fault, draw_faults, read_faults
from phalanx.runs.spec import elastic_sizes
from phalanx.tools.verify.subject import RecipeSubject, Subject, find_subject

_STEPS, _FAULT_STEPS = 5, 12
_FAULTS_HELP = """Train while faults happen, and report for each: detected after, recovered in, steps lost.

Faults come from --fault, from a file (--fault-plan), or are drawn from a seed (--faults N). Each happens once, after
the step it names or a part of a step later. Everything else is as with phalanx train. Exit code 1 where the run failed,
where processes or files are left behind, and where the weights differ from those of a quiet run (--no-compare: there
is none): with --strategy ring --fixed-order in any bit, otherwise beyond rounding."""
_EPILOG = "kinds of faults:\n" + "\n".join(f"  {name:<11} {text}" for name, text in KINDS.items())
_HINT = "Write: phalanx verify digits --num-workers 4 --max-steps 200 --faults 10"
_EVERY = "10 steps"


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    if is_about_faults(arguments):
        return run_under_faults(arguments)
    namespace = verify_parser().parse_all(arguments)
    check_json_path(namespace.json)
    subject = find_subject(namespace.subject, namespace.script, namespace.preset)
    resolved = resolve_flags(namespace, _defaults(subject, _FAULT_STEPS if namespace.faults else _STEPS))
    prestart()
    from phalanx.tools.verify.proofs import prove

    asked = {name: getattr(namespace, name) for name in ("resume", "reshard", "faults", "own_loop")}
    verdict = prove(subject, resolved.config, **asked)
    print(verdict)
    if namespace.json:
        write_json(verdict.to_dict(), namespace.json)
    return 0 if verdict.agrees else 1


def _defaults(subject: Subject, steps: int) -> Recipe:
    """Return the settings of a recipe with few steps; for other subjects two ranks."""
    known = load_recipe(subject.name) if isinstance(subject, RecipeSubject) else None
    settings = {"num_workers": 2, **(known.settings if known is not None else {}), "max_steps": steps}
    return Recipe(subject.name, "", {}, {}, settings)


def faults_parser() -> FlagParser:
    """Return the parser for a run under faults."""
    usage = (
        "phalanx verify <recipe> | --script FILE | -m MODULE --faults N | --fault F ... | --fault-plan FILE [options]"
    )
    parser = FlagParser(prog="phalanx verify", usage=usage, description=_FAULTS_HELP, epilog=_EPILOG)
    add_target_flags(parser)
    _add_own(parser)
    add_config_flags(parser)
    return parser


def _add_own(parser: FlagParser) -> None:
    add = parser.add_argument
    add("--faults", type=int, metavar="N", help="draw this many faults at random, by --seed")
    add("--kinds", metavar="NAMES", help=f"kinds of the random faults, separated by commas [{','.join(AT_RANDOM)}]")
    add("--fault", action="append", default=[], metavar="FAULT", help="such as kill:rank=2,step=50; may be repeated")
    add("--fault-plan", metavar="FILE", help="a TOML file of faults, a table [[fault]] for each")
    add("--no-compare", action="store_true", help="do not train a second time without faults to compare the weights")
    add("--own-objects", action="store_true", help="train with an optimizer and a scheduler object, as in Python")
    add("--no-checkpoints", action="store_true", help="add no checkpoints to a run that has none: only memory is left")
    add("--out", metavar="DIR", help="folder for the run, the quiet run and their output [runs/faults-<name>-<time>]")
    add_json_flag(parser, "the report")


def run_under_faults(arguments: Sequence[str]) -> int:
    """Train under faults, and report what became of them."""
    words, own = split_own(arguments)
    namespace = faults_parser().parse_all(words)
    target = read_target(namespace, own, "train", _HINT)
    recipe = target if isinstance(target, Recipe) else None
    config = resolve_flags(namespace, recipe).config
    faults = _faults(namespace, config)
    _check(namespace, config, faults)
    name = recipe.name if recipe is not None else Path(namespace.script or namespace.module).stem
    folder = Path(namespace.out or f"runs/faults-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.exists():
        raise UsageError(f"--out {folder}: exists already", hint="Name a new folder, or remove it.")
    from phalanx.tools.verify.faults import train_under_faults

    checkpoints = not namespace.no_checkpoints
    train = [*_train_words(words), *_added(config, faults, checkpoints), *(["--", *own] if own else [])]
    report = train_under_faults(
        train,
        faults,
        folder,
        nodes=config.num_nodes,
        exact=config.fixed_order,
        compare=not namespace.no_compare,
        checkpoints=checkpoints,
        objects=namespace.own_objects,
    )
    if namespace.json:
        print_json(report.to_dict())
    else:
        print(report)
    return 1 if report.problems else 0


def _faults(namespace: argparse.Namespace, config: DistributedConfig) -> list[Fault]:
    """Return the faults of all three sources, in the order of their steps."""
    faults = [Fault.parse(text) for text in namespace.fault]
    if namespace.fault_plan is not None:
        faults += read_faults(Path(namespace.fault_plan))
    if namespace.faults is not None:
        if namespace.faults < 1:
            raise UsageError(f"--faults {namespace.faults}: draw 1 or more.")
        if config.max_steps is None:
            raise UsageError("random faults need to know how many steps there are", hint="Add --max-steps 200.")
        kinds = AT_RANDOM if namespace.kinds is None else [kind.strip() for kind in namespace.kinds.split(",")]
        ranks, seed = config.total_ranks or 1, config.seed or 0
        sizes, steps = elastic_sizes(config, ranks), config.max_steps
        faults += draw_faults(namespace.faults, ranks=ranks, steps=steps, seed=seed, kinds=kinds, sizes=sizes)
    elif namespace.kinds is not None:
        raise UsageError("--kinds is for random faults", hint="Add --faults 20.")
    if not faults:
        raise UsageError("no fault was named", hint=_HINT)
    return sorted(faults, key=lambda fault: fault.step)


def _check(namespace: argparse.Namespace, config: DistributedConfig, faults: Sequence[Fault]) -> None:
    """Refuse faults that cannot happen."""
    if config.run_dir is not None or config.resume_from_checkpoint:
        raise UsageError("verify makes new runs in a folder of its own", hint="Use --out DIR.")
    if namespace.own_objects and (namespace.script or namespace.module):
        raise UsageError(
            "--own-objects is for recipes: a script makes its optimizer itself", hint="Remove --own-objects."
        )
    for fault in faults:
        if config.total_ranks is not None and fault.rank >= config.total_ranks:
            raise UsageError(f"the fault {fault}: the run has ranks 0 to {config.total_ranks - 1}")
        if config.max_steps is not None and fault.step >= config.max_steps:
            raise UsageError(f"the fault {fault}: the run has {config.max_steps} steps")
        if fault.kind in LINKS and config.num_nodes == 1:
            raise UsageError(
                f"the fault {fault}: links are between hosts, and the run has one",
                hint="Add --num-nodes 2: each host becomes a network namespace of this machine, which needs root.",
            )
        if fault.kind in ("launcher", "store") and config.num_nodes > 1:
            raise UsageError(f"the fault {fault} is for a run on one host")


def _train_words(words: Sequence[str]) -> list[str]:
    """Return the words for `phalanx train`: all but the flags of this verb, and how many hosts there are."""
    own = FlagParser(prog="phalanx verify")
    _add_own(own)
    own.add_argument("--num-nodes")
    return own.parse_known_args(list(words))[1]


def _added(config: DistributedConfig, faults: Sequence[Fault], checkpoints: bool) -> list[str]:
    """Return flags that a run under faults needs where the command does not set them."""
    added = [] if config.max_restarts else ["--max-restarts", str(2 * len(faults))]
    if not checkpoints:
        return added
    restarts = any(fault.kind in ("disk", "corrupt", "launcher", "store") for fault in faults)
    if config.checkpoint_frequency is None or (restarts and config.checkpoint_frequency == 1):
        added += ["--checkpoint-frequency", _EVERY if restarts else "1"]
    return added
