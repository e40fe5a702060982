"""The built site: every public name, setting, event and recipe is in it, and nothing is loaded from other hosts."""

from __future__ import annotations

import json
import re
import runpy
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path

import pytest
from browser import browser
from command import ROOT

from phalanx.config.aliases import NAMES
from phalanx.observe.events import KINDS
from phalanx.recipes import recipe_names

PUBLIC = ("phalanx", "phalanx.data", "phalanx.zoo.models", "phalanx.tools.tune", "phalanx.checkpoint")


def test_every_public_name_is_in_the_reference(site):
    pages = "".join(page.read_text() for page in (site / "reference").rglob("*.html"))
    public = [
        f"{module}.{name}"
        for module in PUBLIC
        for name in import_module(module).__all__
        if name not in ("__version__", "plan", "tune")  # the last two are packages with pages of their own
    ]
    public += [f"phalanx.observe.events.{event.__name__}" for event in KINDS.values()]
    missing = [name for name in public if f'id="{name}"' not in pages]
    assert not missing


def test_every_picture_can_be_enlarged(site):
    pages = [page.read_text() for page in site.rglob("*.html")]
    pictures = [match for page in pages for match in re.findall(r'(<a [^>]*>)?<img[^>]*src="([^"]+)"', page)]
    assert len(pictures) > 5
    assert not [source for link, source in pictures if f'href="{source}"' not in link and "/logo" not in source]


def rendered(site: Path, page: str) -> str:
    return (site / page / "index.html").read_text()


def test_every_setting_is_on_the_configuration_page(site):
    page = rendered(site, "configuration")
    missing = [name for name in NAMES if f"<td><code>{name}</code></td>" not in page]
    assert not missing


def test_every_event_and_recipe_has_its_row(site):
    monitoring, quickstart = rendered(site, "monitoring"), rendered(site, "quickstart")
    assert not [kind for kind in KINDS if f"<td><code>{kind}</code></td>" not in monitoring]
    assert not [name for name in recipe_names() if f"<td><code>{name}</code></td>" not in quickstart]


def test_the_site_loads_nothing_from_other_hosts(site):
    loaded = re.compile(r'<(?:script|img|iframe)[^>]+src="?(?:https?:)?//|<link[^>]+href="?(?:https?:)?//')
    for page in site.rglob("*.html"):
        assert not loaded.search(page.read_text()), page
    for picture in (ROOT / "docs" / "assets").glob("*.svg"):
        hosts = set(re.findall(r"https?://([^/\"']+)", picture.read_text()))
        assert hosts <= {"www.w3.org"}, f"{picture}: {hosts}"


@pytest.mark.parametrize(
    ("remote", "page"),
    [
        ("https://user:secret@example.org/team/phalanx.git", "https://example.org/team/phalanx"),
        ("git@example.org:team/phalanx.git", "https://example.org/team/phalanx"),
        ("ssh://git@example.org:2222/team/phalanx", "https://example.org/team/phalanx"),
        ("/srv/repositories/phalanx.git", None),
        ("", None),
    ],
)
def test_the_repository_link_is_the_origin_without_its_password(remote, page):
    assert runpy.run_path(str(ROOT / "docs" / "hooks.py"))["web_address"](remote) == page


QUESTIONS = {  # what new users type, and the page of the manual that answers it
    "fsdp": "strategies",
    "early stopping": "trainer",
    "multi node": "scripts",
    "custom dataset": "recipes",
    "predict on new data": "runs",
    "resume training": "checkpoints",
    "disable progress bar": "monitoring",
    "freeze layers": "how-to",
    "mixed precision": "precision",
    "out of memory": "troubleshooting",
}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        """Print nothing."""


def test_the_search_finds_the_manual_before_the_course(site):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    first = "document.querySelector('.md-search-result__item a')"
    try:
        with browser() as page:
            page.resize(1280)
            page.open(f"http://127.0.0.1:{server.server_port}/")
            found = {}
            for question in QUESTIONS:
                # Each question begins with an empty list, so that no answer is that of the question before.
                for text in ("", question):
                    page.run(
                        "(() => { document.querySelector('#__search').checked = true; const box = "
                        f"document.querySelector('.md-search__input'); box.focus(); box.value = {json.dumps(text)};"
                        "for (const kind of ['keyup', 'change']) box.dispatchEvent(new Event(kind, {bubbles: true}))"
                        "})()"
                    )
                    page.wait(f"({first} !== null) === {'true' if text else 'false'}")
                found[question] = page.run(f"new URL({first}.href).pathname.split('/')[1]")
            page.leave()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert found == QUESTIONS
