"""`phalanx status JOB`: what the scheduler says of a job, and what its run has reached."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.flags import FlagParser
from phalanx.cli.jobs import refresh
from phalanx.cli.json_output import add_json_flag, print_json
from phalanx.observe.format import of_total, table
from phalanx.runs.stored import StoredRun, is_run
from phalanx.tools.submit.job import find_record


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parser = FlagParser(prog="phalanx status", usage="phalanx status JOB [--json]", description="Show one job.")
    parser.add_argument("job", metavar="JOB", help="a name, the beginning of one, the scheduler's id, or last")
    add_json_flag(parser, "it")
    namespace = parser.parse_all(arguments)
    record = find_record(namespace.job)
    status = refresh(record)
    folder = Path(record.directory) / record.run_dir
    stored = StoredRun(folder) if is_run(folder) else None
    if namespace.json:
        print_json({**dataclasses.asdict(record), **dataclasses.asdict(status)})
        return 0
    rows = [
        ("job", f"{record.name} ({record.target} job {record.id})"),
        ("state", f"{status.state}{f' ({status.detail})' if status.detail else ''}"),
        ("nodes", ", ".join(status.nodes)),
        ("submitted", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.submitted))),
        ("command", record.command),
        (
            "run",
            f"{folder}: {stored.status}, step {of_total(*stored.steps)}" if stored else f"{folder} (not begun here)",
        ),
        ("files", record.folder),
    ]
    print(table([row for row in rows if row[1]]))
    return 0
