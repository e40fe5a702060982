"""`phalanx logs JOB`: the output of a job, from wherever its target keeps it."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli.flags import FlagParser
from phalanx.cli.submit import target_of
from phalanx.tools.submit.job import find_record


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parser = FlagParser(prog="phalanx logs", usage="phalanx logs JOB [-f] [--rank N]", description="Show its output.")
    parser.add_argument("job", metavar="JOB", help="a name, the beginning of one, the scheduler's id, or last")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    parser.add_argument("--rank", type=int, metavar="N", help="of one rank only")
    namespace = parser.parse_all(arguments)
    record = find_record(namespace.job)
    for line in target_of(record).logs(record, follow=namespace.follow, rank=namespace.rank):
        print(line, flush=namespace.follow)
    return 0
