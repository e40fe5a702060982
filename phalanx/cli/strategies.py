"""`phalanx strategies`: how ranks can share the work, and when to use each way."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli.flags import FlagParser
from phalanx.strategies.registry import TABLE, installed_strategies


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parser = FlagParser(
        prog="phalanx strategies", description="How ranks can share the work, and when to use each way."
    )
    parser.parse_all(arguments)
    for entry in TABLE:
        print(f"{entry.name}\n  how       {entry.flag}\n  what      {entry.summary}")
        print(f"  choose    {entry.choose}\n  combines  {entry.combines}")
    for entry_point in installed_strategies():
        print(f"{entry_point.name}\n  how       --strategy {entry_point.name}\n  what      {entry_point.value}")
    print("\nAxes multiply: --num-workers 8 --pipeline-parallel 2 --tensor-parallel 2 --strategy fsdp is 2 x 2 x 2.")
    print("Each of them can be proved against one process: phalanx verify <recipe, model or --script> ...")
    return 0
