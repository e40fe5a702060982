"""The HTTP side of `TextService`: OpenAI's endpoints, streams as server-sent events, errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from phalanx.errors import PhalanxError
from phalanx.tools.serve.body import BadRequest, Query, read_body
from phalanx.tools.serve.service import TextPiece, TextService

_END = "data: [DONE]\n\n"
_LOOK_SECONDS = 0.5
"""Between two looks at whether the client of an answer that is not streamed is still there."""


def make_app(service: TextService, *, key: str = "", hosts: Sequence[str] = ("*",)) -> Starlette:
    """Return the application; with a key, completions must have it: Authorization: Bearer KEY.

    `hosts`: names under which it may be asked. A page of another site could make its own name mean this machine.
    """
    model = {"id": service.text.name, "object": "model", "created": int(time.time()), "owned_by": "phalanx"}

    async def health(request: Request) -> Response:
        state = {"model": service.text.name, **service.load_now}
        if service.is_failing:
            return JSONResponse({"status": "failing", **state}, status_code=503)
        return JSONResponse({"status": "ok", **state})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    def answers(chat: bool) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if key and not hmac.compare_digest(
                request.headers.get("authorization", "").encode(), f"Bearer {key}".encode()
            ):
                raise BadRequest(
                    "the request needs the key: Authorization: Bearer KEY", code="invalid_api_key", status=401
                )
            query = read_body(await request.body(), service.text, chat=chat)
            answer = _Answers(service, query, chat=chat)
            if query.stream:
                return StreamingResponse(answer.events(), media_type="text/event-stream")
            return await _while_connected(request, answer)

        return endpoint

    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/completions", answers(chat=False), methods=["POST"]),
        Route("/v1/chat/completions", answers(chat=True), methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {BadRequest: _refused, PhalanxError: _unusable, HTTPException: _unknown}
    known_hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))
    return Starlette(routes=routes, exception_handlers=handlers, middleware=[known_hosts])


async def _while_connected(request: Request, answer: _Answers) -> Response:
    """Return the complete answer; where the client leaves before, it ends, and its rows are free."""
    whole = asyncio.ensure_future(answer.whole())
    try:
        while not (await asyncio.wait({whole}, timeout=_LOOK_SECONDS))[0]:
            if await request.is_disconnected():
                return Response(status_code=499)  # not sent: for the log
        return JSONResponse(whole.result())
    finally:
        whole.cancel()


def _error(message: str, status: int, param: str | None = None, code: str | None = None) -> Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status_code=status)


async def _refused(request: Request, error: BadRequest) -> Response:
    return _error(str(error), error.status, error.param, error.code)


async def _unusable(request: Request, error: PhalanxError) -> Response:
    return _error(str(error), 400)


async def _unknown(request: Request, error: HTTPException) -> Response:
    endpoints = "GET /health, GET /v1/models, POST /v1/completions, POST /v1/chat/completions"
    return _error(f"{request.method} {request.url.path}: {error.detail}. There is: {endpoints}.", error.status_code)


class _Answers:
    """The answers (choices) to one HTTP request."""

    def __init__(self, service: TextService, query: Query, *, chat: bool) -> None:
        self._query, self._chat = query, chat
        self._pieces: asyncio.Queue[tuple[int, TextPiece]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": service.text.name,
        }
        self._counts = [0] * len(query.requests)
        for number, request in enumerate(query.requests):
            request.emit = partial(self._emit, number)
            service.submit(request)

    def _emit(self, number: int, piece: TextPiece) -> None:
        """Take a piece in the service's thread; a loop that is closed has no client any more."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, (number, piece))

    async def _all(self) -> AsyncIterator[tuple[int, TextPiece]]:
        """Yield pieces until all choices have ended; cancel them where the client has left."""
        unfinished = len(self._query.requests)
        try:
            while unfinished:
                number, piece = await self._pieces.get()
                self._counts[number] = piece.tokens
                unfinished -= piece.finish is not None
                yield number, piece
        finally:
            for request in self._query.requests:
                request.cancelled = True

    async def whole(self) -> dict[str, Any]:
        """Return the answer when it is complete."""
        texts, ends = [""] * len(self._query.requests), [""] * len(self._query.requests)
        async for number, piece in self._all():
            if piece.finish == "error":
                raise BadRequest("the answer failed; the server's output says why", status=500)
            texts[number] += piece.text
            ends[number] = piece.finish or ""
        choices = [self._choice(number, texts[number], ends[number]) for number in range(len(texts))]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _choice(self, number: int, text: str, finish: str | None, *, part: bool = False) -> dict[str, Any]:
        content: Any = text
        if self._chat:
            content = {"content": text} if part else {"role": "assistant", "content": text}
        name = ("delta" if part else "message") if self._chat else "text"
        return {"index": number, name: content, "logprobs": None, "finish_reason": finish}

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(request.prompt) for request in self._query.requests[:: self._query.n])
        completion = sum(self._counts)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    async def events(self) -> AsyncIterator[str]:
        """Yield the answer as server-sent events, one for each piece."""
        head = {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head
        if self._chat:
            for number in range(len(self._query.requests)):
                first = {"index": number, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield _event({**head, "choices": [first]})
        async for number, piece in self._all():
            if piece.finish == "error":
                yield _event({"error": {"message": "the answer failed; the server's output says why"}})
                continue
            yield _event({**head, "choices": [self._choice(number, piece.text, piece.finish, part=True)]})
        if self._query.include_usage:
            yield _event({**head, "choices": [], "usage": self._usage()})
        yield _END


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
