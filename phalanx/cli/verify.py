"""`phalanx verify`: prove that a layout gives the result of one process, or that a run survives faults."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from phalanx.cli.flags import FlagParser, read_target, resolve_flags, split_own
from phalanx.cli.json_output import print_json
from phalanx.cli.parsers import add_fault_flags, verify_parser
from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.launch import prestart
from phalanx.recipes import Recipe, load_recipe
from phalanx.reliability import AT_RANDOM, LINKS, Fault, draw_faults, read_faults
from phalanx.run.spec import elastic_sizes
from phalanx.tools.verify.subject import RecipeSubject, Subject, default_settings, find_subject
from phalanx.tools.verify.verdict import Verdict

_HINT = "Write: phalanx verify digits --num-workers 4 --max-steps 200 --faults 10"
_EVERY = "10 steps"
_OF_PROOFS = ("resume", "reshard", "own_loop")
_OF_FAULTS = ("model", "changes", "module", "no_compare", "own_objects", "no_checkpoints", "out")


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    words, script_arguments = split_own(arguments)
    namespace = verify_parser().parse_all(words)
    is_drawn = namespace.faults is not None and namespace.faults is not True  # True: without a number
    if is_drawn or namespace.fault or namespace.fault_plan or namespace.kinds:
        _refuse(namespace, _OF_PROOFS, "cannot be combined with --fault, --fault-plan, --kinds or --faults N")
        return run_under_faults(namespace, words, script_arguments)
    _refuse(namespace, _OF_FAULTS, "is for a run under faults, such as --faults 10")
    if script_arguments:
        raise UsageError(
            f"a script's own arguments are for a run under faults; got: {shlex.join(script_arguments)}", hint=_HINT
        )
    return _prove(namespace)


def _refuse(namespace: argparse.Namespace, names: Sequence[str], why: str) -> None:
    if flags := [name for name in names if getattr(namespace, name)]:
        flag = "set" if flags[0] == "changes" else flags[0].replace("_", "-")
        raise UsageError(f"--{flag} {why}", hint="See phalanx verify --help")


def _prove(namespace: argparse.Namespace) -> int:
    faults = namespace.faults is not None
    if namespace.case is not None:
        return _prove_case(namespace)
    subject = find_subject(namespace.recipe, namespace.script, namespace.preset, namespace.data)
    resolved = resolve_flags(namespace, _defaults(subject, default_settings(faults=faults)))
    prestart()
    from phalanx.tools.verify.proofs import prove

    options = {name: getattr(namespace, name) for name in _OF_PROOFS}
    return _shown(lambda: prove(subject, resolved.config, faults=faults, **options), as_json=namespace.json)


def _prove_case(namespace: argparse.Namespace) -> int:
    """Prove one of the small cases that bring their own model and data."""
    why = "cannot be combined with --case, which brings its own model and data"
    if namespace.recipe is not None:
        raise UsageError(f"'{namespace.recipe}' {why}", hint="See phalanx verify --help")
    _refuse(namespace, ("script", "module", "model", "data", "preset", "faults", *_OF_PROOFS), why)
    resolved = resolve_flags(namespace, Recipe(namespace.case, "", {}, {}, default_settings()))
    prestart()
    from phalanx.tools.verify.cases import prove_case

    return _shown(lambda: prove_case(namespace.case, resolved.config), as_json=namespace.json)


def _shown(prove: Callable[[], Verdict], *, as_json: bool) -> int:
    """Run a proof, print its verdict, and return the exit code."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        verdict = prove()
        print(verdict)
    if as_json:
        print_json(verdict.to_dict())
    return 0 if verdict.agrees else 1


def _defaults(subject: Subject, usual: Mapping[str, int]) -> Recipe:
    """Return the settings of a recipe, or the usual ones of a proof for other subjects, with few steps."""
    of_recipe = load_recipe(subject.name).settings if isinstance(subject, RecipeSubject) else {}
    return Recipe(subject.name, "", {}, {}, {**usual, **of_recipe, "max_steps": usual["max_steps"]})


def run_under_faults(namespace: argparse.Namespace, words: Sequence[str], script_arguments: Sequence[str]) -> int:
    """Train under faults, and report what became of them; `script_arguments`: the script's own arguments."""
    target = read_target(namespace, script_arguments, "train", _HINT)
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
    train = [
        *_train_words(words),
        *_added(config, faults, checkpoints),
        *(["--", *script_arguments] if script_arguments else []),
    ]
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
    if namespace.faults is True:
        raise UsageError(
            "--faults without a number cannot be combined with --fault, --fault-plan or --kinds",
            hint="Add how many to draw, or leave it out.",
        )
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
        raise UsageError("verify creates new runs in its own folder", hint="Use --out DIR.")
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
    verify_parser = FlagParser(prog="phalanx verify")
    add_fault_flags(verify_parser)
    verify_parser.add_argument("--num-nodes")
    return verify_parser.parse_known_args(list(words))[1]


def _added(config: DistributedConfig, faults: Sequence[Fault], checkpoints: bool) -> list[str]:
    """Return flags that a run under faults needs where the command does not set them."""
    added = [] if config.max_restarts else ["--max-restarts", str(2 * len(faults))]
    if not checkpoints:
        return added
    restarts = any(fault.kind in ("disk", "corrupt", "launcher", "store") for fault in faults)
    if config.checkpoint_frequency is None or (restarts and config.checkpoint_frequency == 1):
        added += ["--checkpoint-frequency", _EVERY if restarts else "1"]
    return added
