"""`phalanx jobs`: the jobs that were submitted from here, with what their schedulers say of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_json_flag, print_json
from phalanx.cli.submit import target_of
from phalanx.errors import PhalanxError
from phalanx.observe.format import table
from phalanx.tools.submit.job import ENDED, JobRecord, records, write_record
from phalanx.tools.submit.target import Status


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parser = FlagParser(prog="phalanx jobs", usage="phalanx jobs [--json]", description="List submitted jobs.")
    add_json_flag(parser, "them")
    namespace = parser.parse_all(arguments)
    found = [(record, refresh(record)) for record in records()]
    if namespace.json:
        print_json([{**dataclasses.asdict(record), **dataclasses.asdict(status)} for record, status in found])
        return 0
    if not found:
        print("no jobs were submitted from here yet; submit one with: phalanx submit slurm digits")
        return 0
    rows = [("name", "target", "id", "submitted", "state", "")]
    for record, status in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.submitted))
        rows.append((record.name, record.target, record.id, when, status.state, status.detail))
    print(table(rows))
    return 0


def refresh(record: JobRecord) -> Status:
    """Ask the scheduler about a job that has not ended, and keep its state; a scheduler that is away is said so."""
    if record.state in ENDED and record.state != "lost":  # a scheduler that was away may know it again
        return Status(record.state)
    try:
        status = target_of(record).status(record)
    except PhalanxError as error:
        return Status(record.state, f"not known now: {error.message}")
    if status.state != record.state:
        write_record(dataclasses.replace(record, state=status.state))
    return status
