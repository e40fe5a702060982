"""`phalanx verify`: prove that a layout gives the same result as one process."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli.flags import FlagParser, add_config_flags, resolve_flags, write_json
from phalanx.errors import UsageError
from phalanx.launch import prestart
from phalanx.recipes import Recipe, load_recipe, recipe_names
from phalanx.verification.subject import RecipeSubject, Subject, find_subject

_HELP = """Prove that a layout gives the same result as one process.

Runs the same global batches on one process and on the layout, in float64 and in float32, with dropout off, and
compares losses, gradient norms, and each module's outputs, gradients and weights. Exit code 1 when they differ
beyond rounding; the first module that differs is named."""

_STEPS = 5


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = _parser().parse_all(arguments)
    if namespace.resume and namespace.reshard:
        raise UsageError("--resume and --reshard are two proofs", hint="Run verify twice.")
    subject = find_subject(namespace.subject, namespace.script, namespace.preset)
    resolved = resolve_flags(namespace, _defaults(subject))
    prestart()
    from phalanx.verification.proofs import prove

    verdict = prove(subject, resolved.config, resume=namespace.resume, reshard=namespace.reshard)
    print(verdict)
    if namespace.json:
        write_json(verdict.to_dict(), namespace.json)
    return 0 if verdict.agrees else 1


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="phalanx verify",
        usage="phalanx verify <recipe or model> | --script FILE [--resume | --reshard LAYOUT] [options]",
        description=_HELP,
    )
    names = ", ".join(recipe_names())
    parser.add_argument("subject", nargs="?", help=f"a recipe ({names}) or a reference model (gpt, llama, ...)")
    parser.add_argument("--preset", metavar="NAME", help="which size of the reference model")
    parser.add_argument("--script", metavar="FILE", help="a script that defines build() -> (model, data set, loss_fn)")
    parser.add_argument("--resume", action="store_true", help="stop half-way, resume, and compare bits")
    parser.add_argument("--reshard", metavar="LAYOUT", help="save here, load on another layout: ddp:1, fsdp:4")
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured (- for standard output)")
    add_config_flags(parser)
    return parser


def _defaults(subject: Subject) -> Recipe:
    """Return the settings of a recipe with few steps; for other subjects two ranks."""
    known = load_recipe(subject.name) if isinstance(subject, RecipeSubject) else None
    settings = {"num_workers": 2, **(known.settings if known is not None else {}), "max_steps": _STEPS}
    return Recipe(subject.name, "", {}, {}, settings)
