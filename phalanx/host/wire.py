"""Typed messages: dataclasses that travel as JSON objects, with one encoding for every channel.

`{"kind": "RankReady", "step": 17, "why": "new"}` is `RankReady(step=17, why="new")`. A field may hold messages, also in
a tuple or as values of a dict.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

_KINDS: dict[str, type[Wire]] = {}


class Wire:
    """A message: a frozen dataclass that inherits from this; its name is its kind.

    After `class Post(Wire, sealed=("message",))` decoding leaves that field as it was encoded, to be passed on.
    """

    _sealed: ClassVar[Collection[str]] = ()

    def __init_subclass__(cls, sealed: Collection[str] = ()) -> None:
        assert cls.__name__ not in _KINDS, "two kinds of messages with one name"
        cls._sealed = sealed
        _KINDS[cls.__name__] = cls


def encode(message: Wire) -> dict[str, Any]:
    """Return a message as a JSON object."""
    return {"kind": type(message).__name__, **{name: _plain(value) for name, value in vars(message).items()}}


def decode(encoded: Mapping[str, Any]) -> Any:
    """Return what `encode` has written."""
    kind = _KINDS[encoded["kind"]]
    fields = ((name, value) for name, value in encoded.items() if name != "kind")
    return kind(**{name: value if name in kind._sealed else _typed(value) for name, value in fields})


def kind_of(encoded: Mapping[str, Any]) -> type[Wire]:
    """Return the type of what `encode` has written; `Wire` if its module is not loaded here."""
    return _KINDS.get(encoded["kind"], Wire)


def _plain(value: Any) -> Any:
    if isinstance(value, Wire):
        return encode(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        return decode(value) if "kind" in value else {name: _typed(item) for name, item in value.items()}
    return tuple(_typed(item) for item in value) if isinstance(value, list) else value
