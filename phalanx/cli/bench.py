"""`phalanx bench`: measurements, one file each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from phalanx.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Sequence

BENCHES = {"comm": "phalanx.cli.bench_comm", "compression": "phalanx.cli.bench_compression"}

_HELP = """usage: phalanx bench <what> [options]

  comm          collectives: time and bandwidth by algorithm and size
  compression   training under each gradient compressor over slow links; --advise: which of them pays here"""


def run(arguments: Sequence[str]) -> int:
    """Run the bench that the first word names."""
    words = list(arguments)
    if not words or words[0] in {"-h", "--help"}:
        print(_HELP)
        return 0
    if words[0] not in BENCHES:
        raise UsageError(unknown_name("bench", words[0], BENCHES))
    result: int = import_module(BENCHES[words[0]]).run(words[1:])
    return result
