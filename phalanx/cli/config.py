"""`phalanx config show`: every setting, its value, and where the value comes from."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from phalanx.cli.flags import FlagParser, add_config_flags, resolve_flags
from phalanx.cli.json_output import add_json_flag, print_json
from phalanx.config import FIELDS, GROUPS, ResolvedConfig, write_toml
from phalanx.config.settings import title_of
from phalanx.errors import UsageError, unknown_name
from phalanx.recipes import load_recipe

_HELP = "Show every setting, its value and where it comes from: default, recipe, file, environment or flag."


def parser() -> FlagParser:
    """Return the parser of the verb."""
    usage = "phalanx config show [RECIPE] [--changed | --toml | --json] [settings]"
    parser = FlagParser(prog="phalanx config show", usage=usage, description=_HELP)
    parser.add_argument("recipe", nargs="?", help="show the settings as this recipe would run")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--changed", action="store_true", help="show only what differs from the defaults")
    form.add_argument("--toml", action="store_true", help="write TOML that --config reads back")
    add_json_flag(parser, "each setting with its value and origin")
    add_config_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    words = list(arguments)
    if not words or words[0] in {"-h", "--help", "--help-all"}:
        parser().parse_all(words or ["--help"])
    if words[0] != "show":
        raise UsageError(
            unknown_name("action", words[0], ["show"], of="phalanx config"), hint="Write: phalanx config show"
        )
    namespace = parser().parse_all(words[1:])
    recipe = load_recipe(namespace.recipe) if namespace.recipe else None
    resolved = resolve_flags(namespace, recipe)
    values, every = resolved.config, resolved.origins.keys()
    names = [name for name in every if not namespace.changed or getattr(values, name) != FIELDS[name].default]
    if namespace.json:
        plain = values.to_dict()
        print_json({name: {"value": plain[name], "origin": resolved.origins[name]} for name in names})
    elif namespace.toml:  # defaults as comments: in a file they would win over a recipe's values
        defaults = {name for name, origin in resolved.origins.items() if origin == "default"}
        print(write_toml(values, as_comments=defaults), end="")
    else:
        _print_table(resolved, names)
    return 0


def _print_table(resolved: ResolvedConfig, settings: Collection[str]) -> None:
    if not settings:
        print("every setting has its default")
    for group in GROUPS:
        names = [name for name in group.__dataclass_fields__ if name in settings]
        if names:
            print(_bold(title_of(group)))
        for name in names:
            value, origin = getattr(resolved.config, name), resolved.origins[name]
            text = "-" if value is None else str(value)
            print(f"  {name:<28} {text:<24} {origin if origin == 'default' else _bold(origin)}")


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text
