"""`phalanx verify`: prove that a layout gives the same result as one process."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli.faults import is_about_faults
from phalanx.cli.faults import run as run_under_faults
from phalanx.cli.flags import resolve_flags
from phalanx.cli.json_output import check_json_path, write_json
from phalanx.cli.parsers import verify_parser
from phalanx.launch import prestart
from phalanx.recipes import Recipe, load_recipe
from phalanx.tools.verify.subject import RecipeSubject, Subject, find_subject

_STEPS, _FAULT_STEPS = 5, 12


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
