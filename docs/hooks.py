"""What MkDocs calls while it builds the site.

Every picture becomes a link to itself at full size. The repository link is the origin of the clone, or the project's. The texts and
pictures of `course/` are pages below `learn/`.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_REPOSITORY = "https://github.com/phalanx-train/phalanx"
"""The repository of the project, for a copy without an origin."""
_PICTURE = re.compile(r'<img\b[^>]*\bsrc="([^"]+)"[^>]*>')
_REMOTE = re.compile(r"(?:(?:https?|ssh|git)://(?:[^@/]+@)?|git@)([\w.-]+)(?::\d+/|[:/])(.+?)(?:\.git)?/?$")
_COURSE, _LEARN = Path(__file__).resolve().parents[1] / "course", "learn/"
_BOOSTS = {
    "how-to.md": 10.0,
    **dict.fromkeys(("learn/", "start-here.md", "course.md"), 0.02),
    **dict.fromkeys(("reference/", "tested.md", "benchmarks.md", "design/"), 0.1),
    **dict.fromkeys(("coming-from.md", "examples.md", "applications/", "install.md"), 0.4),
    "faq.md": 0.001,
}
"""How much pages weigh in the search, by the beginning of their path: who asks wants the manual, not the course.

A word in a title counts a thousand times as much as one in the text, so weights near 1 change little.
"""
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_DOCS = re.compile(r"(?<=\.\./)docs/")


def on_files(files: Files, config: Any) -> Files:
    """Add the texts and pictures of the course."""
    for path in sorted(_COURSE.rglob("*")):
        if path.suffix in (".md", ".svg"):
            place = f"{_LEARN}{path.relative_to(_COURSE).as_posix()}"
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to the course, and those of the course, lead to the pages of this site; give the search its weights."""
    boost = next((boost for place, boost in _BOOSTS.items() if page.file.src_uri.startswith(place)), 1.0)
    page.meta.setdefault("search", {}).setdefault("boost", boost)
    if page.file.src_uri.startswith(_LEARN):
        return _LINK.sub(_of_site, markdown)
    for above in ("../", ""):  # of a page in a folder of docs/, and of one in docs/ itself
        markdown = markdown.replace(f"]({above}../course/", f"]({above}{_LEARN}")
    return markdown


def _of_site(link: re.Match[str]) -> str:
    """Return a link of the course for this site, which has its texts and pictures, but no code."""
    text, target = link.groups()
    if target.startswith(("http", "#")):
        return link[0]
    if not target.partition("#")[0].endswith((".md", ".svg")):
        return text
    return f"[{text}]({_DOCS.sub('', target)})"


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Make every picture a link to itself, so that a click enlarges it; let long lines of the course's code wrap."""
    if page.file.src_uri.startswith(_LEARN):
        html = html.replace("<pre>", '<pre class="wraps">')
    return _PICTURE.sub(r'<a class="picture" href="\1" title="Enlarge">\g<0></a>', html)


def on_config(config: Any) -> Any:
    """Link the repository that the site is built from, where mkdocs.yml names none; else the project's."""
    if not config.repo_url:
        git = ["git", "-C", str(Path(__file__).parent), "remote", "get-url", "origin"]
        remote = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        config.repo_url = web_address(remote) or _REPOSITORY
        config.repo_name = "Source"
    return config


def web_address(remote: str) -> str | None:
    """Return the page of a remote repository, without user and password; None for a folder."""
    match = _REMOTE.match(remote)
    return f"https://{match[1]}/{match[2]}" if match else None
