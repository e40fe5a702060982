"""The web server of the dashboard: the page, runs as JSON, what is new as server-sent events, and changes by POST."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import math
import mimetypes
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from phalanx.errors import PhalanxError, UsageError
from phalanx.run.facts import defaults
from phalanx.run.resume import name_run, note_run, refuse_running, remove_run, tag_run
from phalanx.run.stored import StoredRun
from phalanx.tools.ui.catalog import Catalog
from phalanx.tools.ui.page import ALONE, STATIC, page

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


_FILE_POLICY = f"{ALONE}; sandbox allow-scripts"
"""A file of a run may hold any script: it runs, but not as a part of this page, so that it can change nothing."""
_POLL_SECONDS = 1.0
_WIDEST = 4000
_PIECE_BYTES = 1 << 18
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _AsciiJson(JSONResponse):
    """JSON with escapes: UTF-8 has no form for half of a surrogate pair, which a text or a folder's name may hold."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class Gate:
    """Refuses requests under a host name that is not this machine's (DNS rebinding), and those without the token."""

    def __init__(self, app: ASGIApp, token: str, port: int, names: set[str]) -> None:
        self._app, self._token, self._names = app, token, names
        self._cookie = f"phalanx_ui_{port}"  # cookies are shared between the ports of a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (self._refusal(Request(scope)) or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        host = _host_of(request.headers.get("host", ""))
        if host not in self._names and not _is_address(host):
            hosts = ", ".join(sorted(self._names))
            return PlainTextResponse(
                f"The host name {host!r} is not one of this dashboard ({hosts}).\n"
                "Open it by one of these or by address, or start it with --host and this name.\n",
                status_code=421,
            )
        if request.method not in ("GET", "HEAD") and not _is_own(request):
            return PlainTextResponse("Changes are taken from the page of this dashboard alone.\n", status_code=403)
        if not self._token or self._matches(request.cookies.get(self._cookie, "")):
            return None
        if self._matches(request.query_params.get("token", "")):
            answer = RedirectResponse(request.url.path, status_code=303)  # the token leaves the address bar
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
            return answer
        return PlainTextResponse("Open the address that phalanx ui printed: it ends in ?token=...\n", status_code=401)

    def _matches(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())


def _host_of(header: str) -> str:
    """Return the name or address in a Host header, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


def _is_own(request: Request) -> bool:
    """Whether the page itself asks: a form or script of another site has another origin, or sends no JSON."""
    origin, host = request.headers.get("origin", ""), request.headers.get("host", "")
    kind = request.headers.get("content-type", "").partition(";")[0]
    return origin in (f"http://{host}", f"https://{host}") and kind == "application/json"


def _is_address(host: str) -> bool:
    """Whether a host is an address, not a name: a foreign page cannot make its own name mean another address then."""
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def make_app(catalog: Catalog, *, token: str, port: int, names: set[str]) -> ASGIApp:
    """Return the application."""

    def answer(work: Callable[[Request], Any]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            try:
                return _AsciiJson(work(request))
            except KeyError as error:
                return _AsciiJson({"error": f"there is no run {error.args[0]}"}, status_code=404)
            except PhalanxError as error:
                return _AsciiJson({"error": f"{error.message}. {error.hint}".strip(" .") + "."}, status_code=400)
            except (OSError, ValueError) as error:
                code = 400 if isinstance(error, ValueError) else 403
                return _AsciiJson({"error": str(error)}, status_code=code)

        return endpoint

    async def live(request: Request) -> Response:
        return StreamingResponse(_changes(catalog, request), media_type="text/event-stream")

    def file(request: Request) -> Response:
        link = request.path_params["place"]
        if "/trials/" in link and link in catalog.paths():  # the page of a search links the folders of its trials
            return RedirectResponse(f"/#page=run&run={quote(link, safe='')}")
        try:
            opened = catalog.open(link)
        except (KeyError, OSError):
            return PlainTextResponse("There is no such file.\n", status_code=404)
        size = os.fstat(opened.fileno()).st_size
        headers = {"Content-Security-Policy": _FILE_POLICY, "Content-Length": str(size)}
        kind = mimetypes.guess_type(link)[0] or "text/plain"
        return StreamingResponse(_pieces(opened, size), headers=headers, media_type=kind)

    async def change(request: Request) -> Response:
        request.state.body = await request.body()
        return await run_in_threadpool(answer(lambda request: _change(catalog, request)), request)

    routes = [
        Route("/", lambda request: HTMLResponse(page())),
        Route("/api/runs", answer(lambda request: catalog.summaries())),
        Route("/api/defaults", answer(lambda request: defaults())),
        Route("/api/run/{name:path}", answer(lambda request: catalog.detail(request.path_params["name"]))),
        Route("/api/curves/{name:path}", answer(lambda request: _curves(catalog, request))),
        Route("/api/study/{name:path}", answer(lambda request: catalog.study(request.path_params["name"]))),
        Route("/api/log/{place:path}", answer(lambda request: _log(catalog, request))),
        Route("/api/change/{name:path}", change, methods=["POST"]),
        Route("/api/live", live),
        Route("/files/{place:path}", file),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Gate(Starlette(routes=routes), token, port, names)


def _pieces(opened: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file, to which a run may append meanwhile."""
    with opened:
        while size > 0 and (piece := opened.read(min(size, _PIECE_BYTES))):
            size -= len(piece)
            yield piece


def _curves(catalog: Catalog, request: Request) -> list[dict[str, Any]]:
    query = request.query_params
    width = min(_WIDEST, max(10, int(query.get("width", "600"))))
    low, high = float(query.get("from", "-inf")), float(query.get("to", "inf"))
    by = query.get("by", "step")
    if by not in ("step", "time") or math.isnan(low) or math.isnan(high):
        raise ValueError("by is step or time; from and to are numbers")
    first = min(width, int(query.get("preview", "0")))
    if first > 1 and (curves := catalog.preview(request.path_params["name"], first)):
        return curves
    return catalog.events(request.path_params["name"]).curves(width, low, high, by)


def _log(catalog: Catalog, request: Request) -> dict[str, Any]:
    return catalog.log(request.path_params["place"], int(request.query_params.get("from", "-1")))


def _change(catalog: Catalog, request: Request) -> dict[str, Any]:
    """Name or tag a run, write its note, or remove it, as `phalanx runs` does."""
    name = request.path_params["name"]
    run = StoredRun(catalog.path(name))
    change = json.loads(request.state.body)
    match change:
        case {"tag": str(tag)}:
            tag_run(run, tag.strip())
        case {"untag": str(tag)}:
            tag_run(run, tag, remove=True)
        case {"name": str(text)}:
            name_run(run, text.strip())
        case {"note": str(note)}:
            note_run(run, note)
        case {"remove": True}:
            if "/" in name:
                raise UsageError(f"{name} is a trial of a search, which needs it")
            refuse_running(run)
            remove_run(run, catalog.folder)
        case _:
            raise ValueError("a change is one of tag, untag, name, note, remove")
    return {}


async def _changes(catalog: Catalog, request: Request) -> AsyncIterator[str]:
    """Yield the runs that have changed since the last look, and the names of all, whenever something has."""
    sent: dict[str, Any] = {}
    yield "retry: 1000\n\n"
    while not await request.is_disconnected():
        runs = {run["id"]: run for run in await run_in_threadpool(catalog.summaries)}
        if runs != sent:
            changed = [run for name, run in runs.items() if run != sent.get(name)]
            yield f"data: {json.dumps({'changed': changed, 'all': list(runs)})}\n\n"
            sent = runs
        await asyncio.sleep(_POLL_SECONDS)
