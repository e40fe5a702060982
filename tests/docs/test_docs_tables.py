"""The tables of the documentation that come from the code, as they are committed, and the command that writes them."""

from __future__ import annotations

import re
import runpy

import pytest
from command import ROOT

TOOL = runpy.run_path(str(ROOT / "tools" / "docs_tables.py"))
_ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([\d,]+) \| (\d+) \|$", re.MULTILINE)


@pytest.mark.parametrize("name", sorted(TOOL["PAGES"].keys() - {"lines"}))
def test_a_committed_table_is_what_the_code_gives(name):
    text = (ROOT / TOOL["PAGES"][name]).read_text()
    assert f"<!-- table: {name} -->" in text
    assert TOOL["written"](text) == text, "write it again: python tools/docs_tables.py"


def test_the_lines_of_the_rooms_are_nearly_right():
    """They change with every commit, so the page may be somewhat behind."""
    text = (ROOT / TOOL["PAGES"]["lines"]).read_text()
    kept, now = (
        {(tier, room): int(lines.replace(",", "")) for tier, room, lines, _ in _ROW.findall(page)}
        for page in (text, TOOL["written"](text))
    )
    assert kept.keys() == now.keys(), "write it again: python tools/docs_tables.py"
    far = {key: (kept[key], now[key]) for key in now if abs(kept[key] - now[key]) > 200 + 0.1 * now[key]}
    assert not far, "write it again: python tools/docs_tables.py"
