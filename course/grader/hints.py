"""The hints of a template. They stand in its TODO blocks; nothing is loaded to read them."""

from __future__ import annotations

import re
from pathlib import Path


def hints(template: Path, name: str) -> list[str]:
    """Return the hints that stand below `# TODO NAME:` in a template."""
    block = re.search(
        rf"^ *# TODO {re.escape(name)}:.*\n((?: *#(?! TODO).*\n)+)", template.read_text(errors="replace"), re.MULTILINE
    )
    if block is None:
        return []
    text = " ".join(line.strip().lstrip("#").strip() for line in block[1].splitlines())
    return [part.strip() for part in re.split(r"Hint \d: ", text)[1:]]


def first_hint(template: Path, name: str) -> str:
    """Return the first hint as a sentence, or nothing where the block has been replaced."""
    found = hints(template, name)
    return f"Hint 1: {found[0]}" if found else ""
