"""The page of the dashboard: as the server gives it out, or as one file with its data, which needs no server."""

from __future__ import annotations

import json
import re
from pathlib import Path

from phalanx.run.facts import defaults
from phalanx.run.stored import StoredRun
from phalanx.tools.ui.catalog import Catalog

STATIC = Path(__file__).parent / "static"
_WIDTH = 1000
ALONE = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""The policy of a page that loads nothing."""


def page() -> str:
    """Return the page that loads its parts and data from the server."""
    return (STATIC / "index.html").read_text(encoding="utf-8")


def page_of(runs: list[StoredRun]) -> str:
    """Return the page as one file that shows these runs, and loads nothing."""
    catalog = Catalog(Path(), runs)
    summaries = catalog.summaries()
    names = [run["id"] for run in summaries if run["status"] != "unreadable"]
    data = {
        "runs": summaries,
        "defaults": defaults(),
        "detail": {name: catalog.detail(name) for name in names},
        "curves": {name: catalog.events(name).curves(_WIDTH) for name in names},
    }
    text = re.sub(r'<link rel="stylesheet" href="/(static/[^"]+)">', _style, page())
    text = re.sub(r'<script src="/(static/[^"]+)"></script>', _script, text)
    inside = json.dumps(data).replace("<", "\\u003c")  # a name with </script> in it ends no script
    policy = f'<meta http-equiv="Content-Security-Policy" content="{ALONE}">'
    return text.replace("<!-- data -->", f'{policy}\n<script type="application/json" id="data">{inside}</script>')


def _style(match: re.Match[str]) -> str:
    return f"<style>\n{(STATIC.parent / match[1]).read_text(encoding='utf-8')}</style>"


def _script(match: re.Match[str]) -> str:
    return f"<script>\n{(STATIC.parent / match[1]).read_text(encoding='utf-8')}</script>"
