"""`phalanx bench`: measurements, one file per subject."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from phalanx.errors import UsageError, unknown_name

SUBJECTS = {
    "comm": "collectives by algorithm and size, links between ranks",
    "machine": "this machine's kernels, memory and links, for phalanx plan --gpu measured",
    "compression": "training under each compressor over slow links; which one is worth it on yours",
}


def run(arguments: Sequence[str]) -> int:
    """Run the subject."""
    if not arguments or arguments[0] in {"-h", "--help"}:
        subjects = "\n".join(f"  {name:<12} {text}" for name, text in SUBJECTS.items())
        print(f"usage: phalanx bench <subject> [options]\n\nsubjects:\n{subjects}\n\nphalanx bench <subject> --help")
        return 0
    subject = arguments[0]
    if subject not in SUBJECTS:
        raise UsageError(unknown_name("subject of bench", subject, SUBJECTS))
    result: int = import_module(f"phalanx.cli.bench.{subject}").run(arguments[1:])
    return result
