"""The pages about the structure are true: every file and folder that they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from package_tree import PACKAGE

PAGES = sorted((PACKAGE.parent / "docs/design").glob("*.md"))
ENGINES = sorted(path.parent.name for path in (PACKAGE / "engines").glob("*/declaration.py"))
PATH = re.compile(r"(?:[\w<>]+/)*(?:[\w<>]+/|\w+\.(?:py|toml))|tests/\w+")
"""A file, or a folder by its slash; `engines/<name>/` is one per engine, `cli/<verb>.py` any file of the folder."""
BESIDE = re.compile(r"^\| [^|]*\| `([\w/]+)/` \|")
"""The row of a package in the table of tiers, whose text names its own files and folders."""


def named_paths(page: Path) -> list[tuple[int, str, str]]:
    """Return the line, the package of its row, and the path for every path in code quotes of a page."""
    lines = page.read_text().splitlines()
    return [
        (number, match[1] if (match := BESIDE.match(line)) else "", quoted)
        for number, line in enumerate(lines, 1)
        for quoted in re.findall(r"`([^`\s]+)`", line)
        if PATH.fullmatch(quoted)
    ]


def exists(path: str, package: str) -> bool:
    """Whether a path is one of the package, of the repository, or of the package of its row."""
    roots = (PACKAGE, PACKAGE.parent, PACKAGE / package)
    if "<name>" in path:
        return all(exists(path.replace("<name>", engine), package) for engine in ENGINES)
    if "<" in path:
        return any(any(root.glob(re.sub(r"<\w+>", "*", path))) for root in roots)
    return any((root / path).exists() for root in roots)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_and_folder_that_a_page_names_exists(page: Path):
    paths = named_paths(page)
    assert paths, "a page about the structure names files"
    missing = [f"{page.name}:{number}: {path}" for number, package, path in paths if not exists(path, package)]
    assert not missing, "\n".join(missing)


def test_every_package_is_on_the_page_of_the_structure():
    text = (PACKAGE.parent / "docs/design/index.md").read_text()
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert not {name for name in packages if f"`{name}/" not in text}
