"""`phalanx resume RUN`: continue a run from its last checkpoint, in its folder; or submit a job again."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.flags import FlagParser, add_config_flags
from phalanx.cli.json_output import add_json_flag
from phalanx.cli.train import resume_run
from phalanx.errors import UsageError
from phalanx.run.resume import note_end
from phalanx.run.stored import StoredRun
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
        note_end(stored)  # as its scheduler knows, also if its node was lost and it has not reported its end
    describe = describe_search if record.verb == "tune" else describe_job
    job, _, _ = describe(record.arguments, _next_name(record.name))
    target = target_of(record)
    target.options = dataclasses.replace(target.options, name=job.name)
    job = dataclasses.replace(job, environment={**job.environment, **variables(target.options.env)})
    namespace = argparse.Namespace(render=False, dry_run=False, follow=False, json="--json" in words)
    return hand_over(record.target, target, job, namespace, resumes=record.name)


def _next_name(name: str) -> str:
    """Return the first free name of a job that continues another: train-2, train-3, ..."""
    stem, _, number = name.rpartition("-")
    base = stem if stem and number.isdecimal() and len(number) < 4 else name
    names = {record.name for record in records()}
    return next(candidate for n in itertools.count(2) if (candidate := f"{base}-{n}") not in names)
