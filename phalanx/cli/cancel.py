"""`phalanx cancel JOB`: end a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from phalanx.cli.flags import FlagParser
from phalanx.cli.jobs import refresh
from phalanx.cli.submit import target_of
from phalanx.tools.submit.job import ENDED, find_record, write_record


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parser = FlagParser(prog="phalanx cancel", usage="phalanx cancel JOB", description="End a job.")
    parser.add_argument("job", metavar="JOB", help="a name, the beginning of one, the scheduler's id, or last")
    record = find_record(parser.parse_all(arguments).job)
    status = refresh(record)
    if status.state in ENDED:
        print(f"{record.name} has ended already: {status.state}")
        return 0
    target_of(record).cancel(record)
    write_record(dataclasses.replace(record, state="cancelled"))
    print(f"cancelled {record.name} ({record.target} job {record.id})")
    return 0
