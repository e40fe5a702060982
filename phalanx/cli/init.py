"""`phalanx init`: write a small project that trains at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from phalanx.cli.flags import FlagParser
from phalanx.errors import UsageError

_HELP = "Write a small project (model, data, recipe, test, Slurm file, .gitignore) that trains at once."


def parser() -> FlagParser:
    """Return the parser of the verb."""
    parser = FlagParser(prog="phalanx init", description=_HELP)
    parser.add_argument("name", nargs="?", metavar="NAME", help="the folder to create [the current one]")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    folder = Path(namespace.name or ".")
    name = folder.resolve().name
    if not re.fullmatch(r"[\w.-]+", name):
        raise UsageError(
            f"'{name}' is not a name for a project", hint="Use letters, digits, - and _: phalanx init my-net"
        )
    parts = [part for part in resources.files("phalanx.recipes").joinpath("project").iterdir() if part.is_file()]
    # setuptools packs no names that begin with a dot. A project's own .gitignore stays as it is.
    files = {folder / part.name.removesuffix(".in").replace("dot-", "."): part for part in parts}
    files = {path: part for path, part in files.items() if path.name != ".gitignore" or not path.exists()}
    existing = sorted(path.name for path in files if path.exists())
    if existing:
        raise UsageError(
            f"{folder.resolve()} already has {', '.join(existing)}", hint="Nothing was written. Choose another name."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, part in files.items():
            path.write_text(part.read_text(encoding="utf-8").replace("@NAME@", name), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from None
    print(f"wrote {', '.join(sorted(path.name for path in files))} to {folder}")
    print("train it with:\n  " + ("" if folder == Path() else f"cd {folder} && ") + "phalanx train recipe.toml")
    return 0
