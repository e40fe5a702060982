"""Compare the private torch APIs that Phalanx uses with those of the versions that were looked at.

`python tools/private_torch.py` prints what the installed torch has changed since the newest version in
`tests/data/private_torch.json`; `--write` adds the installed version, once each change was looked at.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from phalanx.torch_compat import PRIVATE

FILE = Path(__file__).resolve().parents[1] / "tests" / "data" / "private_torch.json"
VERSION = ".".join(torch.__version__.split(".")[:2])


def described(value: Any) -> str:
    """Return how a private name may be used: its arguments, an operator's schema, or its type."""
    if hasattr(value, "_qualified_op_name"):  # an operator, with one schema per overload
        return str(getattr(value, value.overloads()[0])._schema)
    if inspect.isclass(value) or not callable(value):
        return value.__qualname__ if inspect.isclass(value) else type(value).__name__
    try:
        text = str(inspect.signature(value))
    except ValueError:  # of C++: its first line of documentation is the signature, where there is one
        text = (value.__doc__ or "").strip().partition("\n")[0] or "undocumented"
    if text.startswith("Please use"):  # 2.15 has a public name as well
        return "undocumented"
    # Annotations and addresses say nothing about a call; annotations alone changed in most versions.
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return re.sub(r": [^,=()\[\]]*(\[[^\]]*\])*[^,=()]*(?=[,=)])| -> .*", "", text)


def installed() -> dict[str, str]:
    """Return the private names of the installed torch, described; those that it lacks are left out."""
    found = {}
    for name in PRIVATE:
        module, _, path = name.partition(":")
        try:
            found[name] = described(attrgetter(path)(import_module(module)))
        except (ImportError, AttributeError):
            continue
    return found


def read() -> dict[str, dict[str, str]]:
    """Return the versions that were looked at, oldest first, each with its described names."""
    versions: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return dict(sorted(versions.items(), key=lambda each: tuple(map(int, each[0].split(".")))))


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return a line for each name that differs; builds without CUDA have none of its functions."""
    names = [name for name in PRIVATE if before.get(name) != now.get(name)]
    names = [name for name in names if torch.version.cuda or not name.startswith("torch.cuda")]
    return [f"{name}: {before.get(name, 'absent')} -> {now.get(name, 'absent')}; for {PRIVATE[name]}" for name in names]


def main() -> None:
    """Print the changes, or note that they were looked at."""
    versions = read() if FILE.exists() else {}
    now = installed()
    if "--write" in sys.argv[1:]:
        FILE.write_text(json.dumps({**versions, VERSION: now}, indent=1, sort_keys=True) + "\n")
        return
    print("\n".join(changes(versions.get(VERSION) or list(versions.values())[-1], now)) or "nothing changed")


if __name__ == "__main__":
    main()
