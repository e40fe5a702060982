"""`phalanx scale RUN N`: change the number of ranks of a run in progress, at a step's boundary."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli.flags import FlagParser
from phalanx.errors import UsageError
from phalanx.launch.elastic import request_ranks
from phalanx.runs.stored import find_run

_HELP = """Change the number of ranks of a run in progress, at the next step's boundary.

The run must have been started elastic, such as with --num-workers 2:8, which sets the numbers that are possible. The
global batch and the order of the samples stay the same: each rank accumulates more or fewer micro-batches."""


def parser() -> FlagParser:
    """Return the parser of the verb."""
    parser = FlagParser(prog="phalanx scale", usage="phalanx scale RUN N", description=_HELP)
    parser.add_argument("run", metavar="RUN", help="a name, the beginning of one, a tag, a folder, or last")
    parser.add_argument("ranks", metavar="N", type=int, help="how many ranks the run shall have")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    stored = find_run(namespace.run)
    if stored.status != "running":
        raise UsageError(f"{stored.path} is not in progress: its status is {stored.status}.")
    request_ranks(stored.path / "logs", namespace.ranks)
    print(f"{stored.name} goes on with {namespace.ranks} ranks at the next step")
    return 0
