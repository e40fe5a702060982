"""Read the body of a request for a completion: types, limits, and what is not supported, each with its own message."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from phalanx.errors import unknown_name
from phalanx.tools.serve.service import TextRequest
from phalanx.zoo.models.generation import Sampling
from phalanx.zoo.text_model import TextModel

_MAX_CHOICES = 128
_DEFAULT_TOKENS = 16
"""Of a completion, as OpenAI has it; a chat may fill the context."""
_NUMBERS: dict[str, tuple[type, float, float]] = {
    "max_tokens": (int, 1, math.inf),
    "max_completion_tokens": (int, 1, math.inf),
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "top_k": (int, 1, math.inf),
    "n": (int, 1, _MAX_CHOICES),
    "seed": (int, -(2**63), 2**63 - 1),
}
"""Numbers with the lowest and highest value that is allowed."""
_OTHER = ("model", "prompt", "messages", "stop", "stream", "stream_options", "user", "metadata", "store")
_UNSUPPORTED = (
    *("best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "presence_penalty", "response_format"),
    *("suffix", "tool_choice", "tools", "top_logprobs"),
)
"""Fields of OpenAI's that may only ask for nothing: null, false, 0, empty, or as below."""
_ASKS_NOTHING: dict[str, Any] = {"best_of": 1, "response_format": {"type": "text"}, "tool_choice": "none"}


class BadRequest(Exception):
    """A request that cannot be answered, with the field that is wrong."""

    def __init__(self, message: str, param: str | None = None, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class Query(NamedTuple):
    """What a body asks for: `n` answers to each prompt, one after the other."""

    requests: list[TextRequest]
    n: int
    stream: bool
    include_usage: bool


def read_body(content: bytes, text: TextModel, *, chat: bool) -> Query:
    """Return what a body asks for; BadRequest says what is wrong with it."""
    body = _object(content)
    model = body.get("model", text.name)
    if model != text.name:
        message = f"model = {json.dumps(model)}: this server has {json.dumps(text.name)}"
        raise BadRequest(message, "model", code="model_not_found", status=404)
    numbers: dict[str, Any] = {name: _number(name, body[name]) for name in _NUMBERS if body.get(name) is not None}
    prompts = [_chat_prompt(body, text)] if chat else _prompts(body, text)
    n = numbers.get("n", 1)
    if len(prompts) * n > _MAX_CHOICES:
        raise BadRequest(f"{len(prompts)} prompts with n = {n}: at most {_MAX_CHOICES} answers at once", "n")
    max_tokens = numbers.get("max_completion_tokens", numbers.get("max_tokens"))
    room = _room(max(map(len, prompts)), max_tokens, text.model.config.seq_len, chat=chat)
    sampling, stop, seed = _sampling(numbers), _stops(body.get("stop")), numbers.get("seed")
    requests = [
        TextRequest(
            prompt=prompts[number // n],
            max_tokens=room,
            sampling=sampling,
            seed=None if seed is None else (seed + number) % 2**63,
            stop=stop,
        )
        for number in range(len(prompts) * n)
    ]
    return Query(requests, n, _flag("stream", body), _includes_usage(body.get("stream_options") or {}))


def _object(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the body is a JSON {type(body).__name__}; it must be an object with a prompt or messages")
    fields = (*_OTHER, *_NUMBERS)
    for name, value in body.items():
        if name in _UNSUPPORTED and value and value != _ASKS_NOTHING.get(name):
            raise BadRequest(f"{name} = {json.dumps(value)} is not supported here. Leave it out, or write null", name)
        if name not in (*fields, *_UNSUPPORTED):
            raise BadRequest(unknown_name("field", name, fields), name)
    return body


def _number(name: str, value: Any) -> float:
    kind, low, high = _NUMBERS[name]
    fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not fits or not low <= value <= high:  # NaN is in no range
        kind_words = "a whole number" if kind is int else "a number"
        limit = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise BadRequest(f"{name} = {json.dumps(value)}: it must be {kind_words} {limit}", name)
    number: float = value
    return number


def _flag(name: str, values: Mapping[str, Any]) -> bool:
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} = {json.dumps(value)}: it must be true or false", name)
    return bool(value)


def _includes_usage(options: Any) -> bool:
    if not isinstance(options, dict):
        raise BadRequest('stream_options: it must be an object such as {"include_usage": true}', "stream_options")
    for name in options:
        if name != "include_usage":
            raise BadRequest(unknown_name("field", name, ("include_usage",), of="stream_options"), "stream_options")
    return _flag("include_usage", options)


def _sampling(numbers: Mapping[str, Any]) -> Sampling:
    top_p, top_k = numbers.get("top_p", 1.0), numbers.get("top_k")
    if top_p == 0:  # the likeliest token alone reaches it
        top_p, top_k = 1.0, 1
    return Sampling(temperature=numbers.get("temperature", 1.0), top_p=top_p, top_k=top_k)


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(stop, str) and stop for stop in stops):
        rule = "it must be a text, or a list of at most 4 texts, none empty"
        raise BadRequest(f"stop = {json.dumps(value)}: {rule}", "stop")
    return stops


def _prompts(body: Mapping[str, Any], text: TextModel) -> list[list[int]]:
    """Return the prompts' tokens: of a text, a list of texts, a list of tokens, or a list of such lists."""
    prompts = body.get("prompt")
    if isinstance(prompts, str) or (isinstance(prompts, list) and prompts and not isinstance(prompts[0], str | list)):
        prompts = [prompts]
    if not isinstance(prompts, list) or not prompts:
        raise BadRequest("prompt: it must be a text, a list of texts, or a list of tokens", "prompt")
    return [_tokens(prompt, text) for prompt in prompts]


def _tokens(prompt: Any, text: TextModel) -> list[int]:
    vocabulary = text.model.config.vocab_size
    if isinstance(prompt, str):
        tokens = text.prompt(_encodable(prompt, "prompt"))
    elif isinstance(prompt, list) and all(type(token) is int and 0 <= token < vocabulary for token in prompt):
        tokens = prompt
    else:
        raise BadRequest(f"prompt: it has texts, or tokens from 0 to {vocabulary - 1}", "prompt")
    if not tokens:
        raise BadRequest("prompt: it needs at least one token to continue", "prompt")
    return tokens


def _encodable(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{param}: not text in Unicode: {error.reason}", param) from None
    return text


def _chat_prompt(body: Mapping[str, Any], text: TextModel) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest('messages: it must be a list such as [{"role": "user", "content": "Hello"}]', "messages")
    tokens = text.chat([_message(message, f"messages[{number}]") for number, message in enumerate(messages)])
    if not tokens:
        raise BadRequest("messages: the chat template makes an empty text of them", "messages")
    return tokens


def _message(message: Any, param: str) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{param}: it must have a role (such as system, user, assistant) and a content", param)
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
    if content is None and message["role"] == "assistant" and "content" in message and not message.get("tool_calls"):
        content = ""  # a turn that says nothing
    if not isinstance(content, str):
        raise BadRequest(f"{param}.content: it must be a text, or a list of parts of type text", param)
    return {"role": message["role"], "content": _encodable(content, param)}


def _room(prompt: int, max_tokens: int | None, context: int, *, chat: bool) -> int:
    """Return how many tokens an answer may have after the longest prompt."""
    room = context - prompt
    if room < 1 or (max_tokens is not None and max_tokens > room):
        request = f" and max_tokens = {max_tokens}" if max_tokens is not None else ""
        raise BadRequest(
            f"a prompt of {prompt} tokens{request} does not fit into the model's context of {context} tokens",
            "messages" if chat else "prompt",
            code="context_length_exceeded",
        )
    return max_tokens or (room if chat else min(room, _DEFAULT_TOKENS))
