"""Settings of several sources: a later one wins, and of a setting with parts it replaces those that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from phalanx.config.option import as_text, join_options, split_options
from phalanx.config.settings import CONSOLE_WORDS, parse_console

TRACKERS = ("tensorboard", "mlflow", "wandb")
"""Settings that are false, true or a name."""


def merge(values: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of a later source, which win; of a setting with parts it replaces those it names.

    For example `console = "quiet all-ranks"` in a file and `-v` is `verbose all-ranks`.
    """
    joined: dict[str, Any] = {}
    for name, value in later.items():
        before = values.get(name)
        if name in PARTS and before and isinstance(value, str):
            joined[name] = PARTS[name].join(before, value)
        elif name in TRACKERS and value is True and isinstance(before, str):  # on, with the name given before
            joined[name] = before
    return {**values, **later, **joined}


def join_words(text: str, more: str = "") -> str:
    """Return the words of `console`, of each kind the last, without those that say the default."""
    order = dict.fromkeys(CONSOLE_WORDS.values(), "normal")
    words = {**order, **{CONSOLE_WORDS.get(word, word): word for word in f"{text} {more}".split()}}
    return " ".join(word for word in words.values() if word not in ("normal", "progress", "rank-0")) or "normal"


def _read_options(given: Any) -> str | None:
    """Return `engine_options` as text, None where it is empty; ValueError says what to write."""
    text = as_text(given) if isinstance(given, Mapping) else given
    if not isinstance(text, str | None):
        raise ValueError("expected 'name=value,name=value', or a table {'name': value}.")
    split_options(text)
    return text or None


def _read_console(given: Any) -> str:
    """Return `console`; ValueError says what to write."""
    parse_console(given if isinstance(given, str) else "")
    return str(given)


class _Parts(NamedTuple):
    """How a setting with parts is read, and how a later source's value changes an earlier one's."""

    read: Callable[[Any], str | None]
    join: Callable[[str, str], str]


PARTS = {"console": _Parts(_read_console, join_words), "engine_options": _Parts(_read_options, join_options)}
"""The settings with parts."""
