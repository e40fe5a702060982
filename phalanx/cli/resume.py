"""`phalanx resume RUN`: continue a run from its last checkpoint, in its folder; or submit a job again."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.flags import FlagParser, add_config_flags, resolve_flags
from phalanx.cli.json_output import add_json_flag
from phalanx.errors import UsageError
from phalanx.launch import ModuleTarget, ScriptTarget
from phalanx.recipes import Recipe
from phalanx.runs.resume import note_end, resume_settings
from phalanx.runs.stored import StoredRun, find_run
from phalanx.tools.submit.job import JobRecord, find_record, records

_HELP = (
    "Continue a run from its last checkpoint, in its folder and with its settings; flags change them. The name of a "
    "submitted job submits it again, as it was; its run is continued here by its folder: phalanx resume runs/NAME."
)


def parser() -> FlagParser:
    """Return the parser of the verb."""
    parser = FlagParser(prog="phalanx resume", usage="phalanx resume RUN [options]", description=_HELP)
    parser.add_argument("run", metavar="RUN", help="a name, the beginning of one, a tag, a folder, last, or a job")
    add_json_flag(parser, "the summary of the run")
    add_config_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    if any(namespace.run in (record.name, record.id) for record in records()):
        return resume_job(find_record(namespace.run), [word for word in arguments if word != namespace.run])
    return resume_run(namespace.run, namespace)


def resume_job(record: JobRecord, words: Sequence[str]) -> int:
    """Submit a job again with its arguments and options, so that it continues from its last checkpoint."""
    from phalanx.cli.jobs import refresh
    from phalanx.cli.submit import describe_job, describe_search, hand_over, target_of, variables

    if others := [word for word in words if word != "--json"]:
        raise UsageError(
            f"{record.name} is a submitted job, which is submitted again as it was; got: {shlex.join(others)}",
            hint=f"For other settings: {record.command}",
        )
    status = refresh(record)
    if status.state in ("queued", "running"):
        raise UsageError(f"{record.name} is {status.state}", hint=f"End it first: phalanx jobs cancel {record.name}")
    if not Path(record.directory).is_dir():
        raise UsageError(f"the folder {record.directory}, where {record.name} was submitted, is missing")
    os.chdir(record.directory)
    stored = StoredRun(Path(record.run_dir))
    if status.state != "lost" and stored.record is not None:
        note_end(stored)  # as its scheduler knows, also if its machine was lost and it has not reported its end
    describe = describe_search if record.verb == "tune" else describe_job
    job, _, _ = describe(record.arguments, _next_name(record.name))
    target = target_of(record)
    target.options = dataclasses.replace(target.options, name=job.name)
    job = dataclasses.replace(job, environment={**job.environment, **variables(target.options.env)})
    given = argparse.Namespace(render=False, dry_run=False, follow=False, json="--json" in words)
    return hand_over(record.target, target, job, given, resumes=record.name)


def _next_name(name: str) -> str:
    """Return the first free name of a job that continues another: train-2, train-3, ..."""
    stem, _, number = name.rpartition("-")
    base = stem if stem and number.isdecimal() and len(number) < 4 else name
    taken = {record.name for record in records()}
    return next(found for n in itertools.count(2) if (found := f"{base}-{n}") not in taken)


def resume_run(name: str, namespace: argparse.Namespace) -> int:
    """Continue a run with the flags of a command; return the exit code."""
    from phalanx.cli.train import start_run

    stored = StoredRun(find_run(name).path.resolve())
    stored.require_trust("names the program that would run")
    recipe, target = _started(stored)
    assert stored.record is not None, "checked with the target"
    if Path(stored.record.directory).is_dir():
        os.chdir(stored.record.directory)  # paths in its settings and arguments are relative to that folder
    shorter = os.path.relpath(stored.path)
    settings = resume_settings(stored if shorter.startswith("..") else StoredRun(Path(shorter)))
    # The settings of the run take the place of a recipe's, so that files, variables and flags win over them.
    base, given = recipe or Recipe(stored.name, "", {}, {}), stored.record.settings
    resolved = resolve_flags(namespace, dataclasses.replace(base, settings=given), settings)
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
    again = f"Run your program again with resume_from_checkpoint='{run.checkpoint_dir}'."
    raise UsageError(
        f"{run.path} was not started by phalanx train, so the command cannot be repeated",
        hint=again if run.checkpoints else "It has saved no checkpoint: give checkpoint_dir= in your program.",
    )
