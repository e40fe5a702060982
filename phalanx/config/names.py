"""Suggestions for unknown names: by the words of other libraries (`names.toml`), else by the nearest spelling."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import nearest


@functools.cache
def table() -> dict[str, Any]:
    """Return `names.toml`, as it is written."""
    import tomllib  # 5 ms, which no correct command needs

    return tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))


def meant(word: str, rows: Mapping[str, str], allowed: Collection[str] | None = None) -> str | None:
    """Return the first row that has a word among its words; `allowed`: what may stand before its "="."""
    names = (ours for ours, words in rows.items() if word in words.split())
    return next((ours for ours in names if allowed is None or ours.partition("=")[0] in allowed), None)


def like(name: str, allowed: Collection[str]) -> str | None:
    """Return the allowed setting that a name means or is closest to; "setting=value" if the name says a value."""
    return meant(_plain(name), table()["settings"], allowed) or nearest(name, allowed)


def is_known_elsewhere(name: str) -> bool:
    """Whether other libraries call a setting by this name."""
    return meant(name, table()["settings"]) is not None


def like_flag(name: str, flags: Collection[str]) -> str | None:
    """Return the flag, as it is written, that a word without its dashes means or is closest to."""
    nearest = like(name, {*flags, *(flag.replace("-", "_") for flag in flags)})
    name, _, value = (nearest or "").partition("=")
    return " ".join(["--" + name.replace("_", "-"), *([shlex.quote(value)] if value else [])]) if nearest else None


def like_value(setting: str, value: str, allowed: Collection[str]) -> str | None:
    """Return the allowed value of a setting that a word means or is closest to."""
    return meant(value.lower(), table()["values"].get(setting, {})) or nearest(value, allowed)


def like_option(name: str, allowed: Collection[str], cutoff: float = 0.6) -> str | None:
    """Return the allowed option of a model or data set that a name means or is closest to."""
    return meant(_plain(name), table()["options"], allowed) or nearest(name, allowed, cutoff)


def like_verb(word: str) -> str | None:
    """Return the command, with what follows it, that other programs call by a word."""
    return meant(word, table()["verbs"])


def unknown_value(setting: str, kind: str, value: str, allowed: Collection[str]) -> str:
    """Return the message for an unknown value of a setting: the one that was meant, and all that are allowed."""
    close = like_value(setting, value, allowed)
    guess = f" Did you mean '{close}'?" if close else ""
    return f"unknown {kind} '{value}'.{guess} Allowed: {', '.join(sorted(allowed))}."


def _plain(name: str) -> str:
    return name.strip("-").replace("-", "_").lower()
