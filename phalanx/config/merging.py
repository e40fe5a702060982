"""Settings of several sources: a later one wins, and of the words of `console` it replaces those of the same kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.config.settings import CONSOLE_WORDS

TRACKERS = ("tensorboard", "mlflow", "wandb")
"""Settings that are false, true or a name."""


def merge(values: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of a later source, which win; of `console` it replaces words of the same kind.

    For example `console = "quiet all-ranks"` in a file and `-v` is `verbose all-ranks`.
    """
    joined: dict[str, Any] = {}
    for name, value in later.items():
        before = values.get(name)
        if name == "console" and before and isinstance(value, str):
            joined[name] = join_words(before, value)
        elif name in TRACKERS and value is True and isinstance(before, str):  # on, with the name given before
            joined[name] = before
    return {**values, **later, **joined}


def join_words(text: str, more: str = "") -> str:
    """Return the words of `console`, of each kind the last, without those that say the default."""
    order = dict.fromkeys(CONSOLE_WORDS.values(), "normal")
    words = {**order, **{CONSOLE_WORDS.get(word, word): word for word in f"{text} {more}".split()}}
    return " ".join(word for word in words.values() if word not in ("normal", "progress", "rank-0")) or "normal"
