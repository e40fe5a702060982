"""`phalanx resume RUN`: continue a run from its last checkpoint, in its folder, with its settings."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.flags import FlagParser, add_config_flags, resolve_flags
from phalanx.cli.json_output import add_json_flag
from phalanx.errors import UsageError
from phalanx.launch import ModuleTarget, ScriptTarget
from phalanx.recipes import Recipe
from phalanx.runs.resume import resume_settings
from phalanx.runs.stored import StoredRun, find_run

_HELP = "Continue a run from its last checkpoint, in its folder and with its settings; flags change them."


def parser() -> FlagParser:
    """Return the parser of the verb."""
    parser = FlagParser(prog="phalanx resume", usage="phalanx resume RUN [options]", description=_HELP)
    parser.add_argument("run", metavar="RUN", help="a name, the beginning of one, a tag, a folder, or last")
    add_json_flag(parser, "the summary of the run")
    add_config_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    return resume_run(namespace.run, namespace)


def resume_run(name: str, namespace: argparse.Namespace) -> int:
    """Continue a run with the flags of a command; return the exit code."""
    from phalanx.cli.train import start_run

    stored = StoredRun(find_run(name).path.resolve())
    recipe, target = _started(stored)
    assert stored.record is not None, "checked with the target"
    if Path(stored.record.directory).is_dir():
        os.chdir(stored.record.directory)  # paths in its settings and arguments are relative to that folder
    shorter = os.path.relpath(stored.path)
    settings = resume_settings(stored if shorter.startswith("..") else StoredRun(Path(shorter)))
    # The settings of the run take the place of a recipe's, so that files, variables and flags win over them.
    base = recipe or Recipe(stored.name, "", {}, {})
    resolved = resolve_flags(namespace, dataclasses.replace(base, settings=stored.record.settings), settings)
    return start_run(recipe, resolved, target, as_json=namespace.json)


def _started(run: StoredRun) -> tuple[Recipe | None, ScriptTarget | ModuleTarget | None]:
    """Return what a run trains; refuse one that the command line did not start."""
    recipe, record = run.recipe, run.record
    if recipe is not None:
        recipe.check()
        return recipe, None
    if record is not None and record.script:
        return None, ScriptTarget(record.script, tuple(record.arguments))
    if record is not None and record.module:
        return None, ModuleTarget(record.module, tuple(record.arguments))
    if run.damage:
        raise UsageError(run.damage, hint=f"Start it again with resume_from_checkpoint='{run.checkpoint_dir}'.")
    raise UsageError(
        f"{run.path} was not started by phalanx train, so the command cannot be repeated",
        hint=f"Run your program again with resume_from_checkpoint='{run.checkpoint_dir}'.",
    )
