"""Plain words: the turns of phrase that a reader has to translate stay out of code, messages and docs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TURNS = re.compile(
    r"\b(whoever|whomever|nobody|somebody|everybody)\b"
    r"|\b(be|is|are|was|were) gone\b"
    r"|(?<!there )\b(is|are|was|were) no [a-z]+[.,:;)]"
    r"|\b(is|are|was|were|be|been) told\b"
    r"|\b(once|twice|(bytes|tokens|steps|samples|batches|sequences|lines|stages|ms|(milli|micro)?seconds|operations)) "
    r"a (rank|step|node|machine|worker|second|sample|epoch)[.,:;)]"
    r"|\btakes? leave\b|\bowed\b|\ba word (about|of)\b|\bin the eyes of\b|\bby its own hands?\b"
    r"|\bwhat was trained\b|\b(every|least|of|from|for|after|about) so (many|few)\b|\bin the words of\b"
    r"|\bwhich (is|are) said\b"
    r"|\b(is|are) said (so|at|of|on|in|about|to)\b|\bfor want of\b",
    re.IGNORECASE,
)
"""People for processes, "is no X" for "is not an X", "a rank" for "per rank", clauses with "what" for nouns."""

ON_PAGES = re.compile(
    r"\bbeside\b(?! it:)|\b(is|are) said\b|\bso (many|few) [a-z]+s\b|\ba loop of its own\b|\b(go|goes|went) on where\b"
    r"|\bhas gone\b",
    re.IGNORECASE,
)
"""Also in the documentation: words that its readers know with another meaning, and passives without a subject."""


FOR_USERS = re.compile(
    r"\b[a-z]+ of (your|one's|its|their) own($|[.,:;)|`]| (that|which|and|or|on|in|with|without|for|is|are|has)\b)",
    re.IGNORECASE,
)
"""Also in texts and code that users read: "a loop of your own" for "your own loop"."""


def _is_page(name: str) -> bool:
    return name.endswith(".md") and (name == "README.md" or name.startswith("docs/"))


def test_files_speak_plain_english():
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py", "*.md", "*.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    found = []
    for name in names:
        if name == "tests/shape/test_language.py" or not (ROOT / name).exists():
            continue
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            match = TURNS.search(line)
            if _is_page(name):
                match = match or ON_PAGES.search(line)
            if not name.startswith(("tests/", "tools/")):
                match = match or FOR_USERS.search(line)
            if match:
                found.append(f"{name}:{number}: {match.group()!r} in: {line.strip()[:100]}")
    assert not found, f"{len(found)} lines:\n" + "\n".join(found[:40])
