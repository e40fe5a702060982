"""`phalanx strategies`: how ranks can share the work, and when to use each way."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Sequence

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_json_flag, print_json
from phalanx.config import FIELDS
from phalanx.config.aliases import NAMES
from phalanx.config.names import unknown_value
from phalanx.config.rows import StrategyRow
from phalanx.config.strategies import TABLE
from phalanx.errors import UsageError
from phalanx.strategies.registry import installed_strategies

_HELP = "How ranks can share the work, and when to use each way."


def parser() -> FlagParser:
    """Return the parser of the verb."""
    parser = FlagParser(
        prog="phalanx strategies", usage="phalanx strategies [NAME] [--guide] [--json]", description=_HELP
    )
    names = ",".join(row.name for row in TABLE)
    parser.add_argument(
        "strategy", nargs="?", metavar=f"{{{names}}}", help="show this one in detail, with its settings"
    )
    parser.add_argument("--guide", action="store_true", help="which strategy to choose, in one screen")
    add_json_flag(parser, "the table")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    if namespace.guide:
        from phalanx.tools.plan.guide import guide

        print(guide())
        return 0
    rows = _rows()
    if namespace.strategy is not None:
        if namespace.strategy not in rows:
            raise UsageError(unknown_value("strategy", "strategy", namespace.strategy, rows))
        rows = {namespace.strategy: rows[namespace.strategy]}
    if namespace.json:
        print_json([{**dataclasses.asdict(row), "settings": settings_of(row)} for row in rows.values()])
        return 0
    for row in rows.values():
        print(f"{row.name}\n  how       {row.flag}\n  what      {row.summary}")
        if row.choose:
            print(f"  choose    {row.choose}\n  combines  {row.combines}")
    if namespace.strategy is not None:
        _print_settings(next(iter(rows.values())))
        return 0
    print("\nAxes multiply: --num-workers 8 --pipeline-parallel 2 --tensor-parallel 2 --strategy fsdp is 2 x 2 x 2.")
    print("Each of them can be proved against one process: phalanx verify <recipe, model or --script> ...")
    return 0


def _rows() -> dict[str, StrategyRow]:
    """Return the strategies by name, with those of installed packages."""
    others = [
        StrategyRow(entry.name, f"--strategy {entry.name}", entry.value, "", "") for entry in installed_strategies()
    ]
    return {row.name: row for row in (*TABLE, *others)}


def settings_of(row: StrategyRow) -> list[str]:
    """Return the settings that concern a strategy: of its row, of it alone, and those whose help begins with it."""
    named = {*row.settings, *(flag[2:].replace("-", "_") for flag in re.findall(r"--[a-z-]+", row.flag))}
    for name, field in FIELDS.items():
        only = {*field.metadata["strategies"], *field.metadata["backends"]}
        if row.name in only or row.name in _subjects(field.metadata["help"]):
            named.add(name)
    return [name for name in NAMES if name in named]


def _subjects(text: str) -> list[str]:
    """Return the names before the first colon of a help text: "ddp, ring: compress gradients ..."."""
    before, colon, _ = text.partition(":")
    return [word.strip() for word in before.split(",")] if colon else []


def _print_settings(row: StrategyRow) -> None:
    print("  settings")
    for name in settings_of(row):
        field = NAMES[name]
        text = f"--{name.replace('_', '-'):<22} {field.metadata['help']} [{field.default}]"
        print(textwrap.fill(text, 116, initial_indent=" " * 4, subsequent_indent=" " * 29))
