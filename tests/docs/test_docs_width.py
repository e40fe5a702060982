"""Every page of the site in headless Chromium: nothing is cut off, on a laptop (1280 px) and on a phone (390 px).

The rules:

- A page never scrolls sideways.
- At 1280 px each line of each code block is visible: no code block scrolls.
- On a phone a code block or a wide table may scroll in its own box, but what does not fit must be reachable: an element
  that hides its overflow must not have any.

One browser opens a page of ours, which loads every page of the site in frames of both widths and measures them.
"""

from __future__ import annotations

import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from browser import browser
from long_proofs import long_proof

WIDTHS = {"laptop": 1280, "phone": 390}
MEASURE = """<!doctype html><body><script>
const pages = PAGES, widths = WIDTHS, found = [];
function look(frame, page, screen) {
  const report = (rule, element) => found.push({page, screen, rule, element: `${element.tagName}.${element.className}`,
    text: element.textContent.trim().slice(0, 80), needs: element.scrollWidth, has: element.clientWidth});
  const root = frame.contentDocument.documentElement;
  if (root.scrollWidth > root.clientWidth) report("the page scrolls sideways", root);
  for (const element of frame.contentDocument.querySelectorAll("article, article *")) {
    if (element.scrollWidth <= element.clientWidth || element.clientWidth === 0) continue;  // inline: 0
    const overflow = frame.contentWindow.getComputedStyle(element).overflowX;
    if (screen === "laptop" && element.matches("pre, pre *")) report("code does not fit", element);
    else if (overflow === "hidden" || overflow === "clip") report("cut off without a scroll bar", element);
  }
  return frame.contentDocument.querySelectorAll("article pre code").length;
}
async function load(page, screen) {
  const frame = document.createElement("iframe");
  frame.width = widths[screen]; frame.height = 800; frame.src = "/" + page;
  const loaded = new Promise(done => frame.onload = done);
  document.body.append(frame);
  await loaded;
  await new Promise(done => setTimeout(done, 100));  // the theme's script puts tables into boxes that scroll
  const blocks = look(frame, page, screen);
  frame.remove();
  return blocks;
}
(async () => {
  let blocks = 0;
  while (pages.length) {
    const some = pages.splice(0, 4).flatMap(page => Object.keys(widths).map(screen => load(page, screen)));
    for (const count of await Promise.all(some)) blocks += count;
  }
  window.result = JSON.stringify({blocks, found});
})();
</script>"""


class _Server(ThreadingHTTPServer):
    """Serves the site and the measuring page."""

    def __init__(self, site: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(site)))
        pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html"))
        self.measure = MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))


class _Handler(SimpleHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if self.path == "/measure":
            self._answer(self.server.measure.encode())
        elif self.path.startswith("/search/"):
            self.send_error(404)  # a search index in each frame would take most of the time
        else:
            super().do_GET()

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests are not worth a line."""


def measured(site: Path) -> dict:
    """Return what the browser found on all pages of a folder of HTML files."""
    with browser() as page:
        server = _Server(site)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            page.resize(1700)
            page.open(f"http://127.0.0.1:{server.server_address[1]}/measure")
            return json.loads(page.wait("window.result", 300))
        finally:
            page.leave()
            server.shutdown()
            server.server_close()


@long_proof
def test_no_page_cuts_anything_off(site):
    result = measured(site)
    assert result["blocks"] > 200, "the pages were not rendered"
    lines = [
        f"{item['page']} ({item['screen']}): {item['rule']}: {item['element']} needs {item['needs']} px, "
        f"has {item['has']}: {item['text']!r}"
        for item in result["found"]
    ]
    assert not lines, f"{len(lines)}:\n" + "\n".join(lines)


FAULTS = {
    "the page scrolls sideways": "<article><div style='width: 3000px'>wide</div></article>",
    "code does not fit": f"<article><pre style='overflow: auto'><code>{'x' * 400}</code></pre></article>",
    "cut off without a scroll bar": f"<article><p style='overflow: hidden'>{'x' * 400}</p></article>",
}


def test_the_measurement_finds_each_fault(tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    for number, body in enumerate(FAULTS.values()):
        (folder / f"{number}.html").write_text(f"<!doctype html><body>{body}")
    found = {(item["page"], item["rule"]) for item in measured(folder)["found"]}
    assert {(f"{number}.html", rule) for number, rule in enumerate(FAULTS)} <= found
