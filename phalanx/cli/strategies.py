"""`phalanx strategies`: how ranks can share the work, and when to choose which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.cli.flags import FlagParser
from phalanx.strategies.catalog import CATALOG

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parser = FlagParser(prog="phalanx strategies", description="How ranks can share the work (--strategy NAME).")
    parser.parse_all(arguments)
    for entry in CATALOG:
        print(f"{entry.name}\n  what      {entry.summary}\n  choose    {entry.choose}\n  combines  {entry.combines}")
    return 0
