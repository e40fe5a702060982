"""`engine_options`: settings that one engine alone has, as text `name=value,name=value`; in Python and TOML a table.

An engine declares its own in `rules.py`, as the fields of a class `Options`, by `option` like every setting.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from phalanx.config.option import option, parse_text

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class TorchOptions:
    """Options of torch, for every engine that trains its models."""

    bucket_cap_mb: float = option(25.0, "size of a gradient bucket in MB", above=0)
    scaler_init_scale: float = option(65536.0, "first loss scale of fp16", above=0)
    scaler_growth_interval: int = option(2000, "steps without overflow before the loss scale doubles", minimum=1)


def as_text(given: Mapping[str, Any], prefix: str = "") -> str:
    """Return a table as text; a table in it becomes names with a dot, {"resources": {"GPU": 1}} resources.GPU=1."""
    parts = []
    for name, value in given.items():
        if isinstance(value, Mapping):
            parts.append(as_text(value, f"{prefix}{name}."))
        elif value is not None:
            plain = os.fspath(value) if isinstance(value, os.PathLike) else value
            parts.append(f"{prefix}{name}={str(plain).lower() if isinstance(plain, bool) else plain}")
    return ",".join(filter(None, parts))


def split_options(text: str | None) -> dict[str, str]:
    """Return the values by name, those of names with a dot together: {"resources": "GPU=0.5,big=1"}.

    ValueError for a part that is not name=value.
    """
    found: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in (text or "").split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ValueError(part)
        group, dot, inner = name.strip().partition(".")
        own = f"{inner}={value.strip()}" if dot else value.strip()
        found[group] = f"{found[group]},{own}" if dot and group in found else own
    return found


def join_options(text: str, later: str) -> str:
    """Return the options of both, of those with the same name the later."""
    pairs = {part.partition("=")[0].strip(): part.strip() for part in f"{text},{later}".split(",") if part.strip()}
    return ",".join(pairs.values())


def without_options(kind: type[Any], text: str) -> str:
    """Return the options that are not those of one engine."""
    own = kind.__dataclass_fields__
    return ",".join(part for part in text.split(",") if part.partition("=")[0].partition(".")[0].strip() not in own)


def read_options(kind: type[Options], text: str | None) -> Options:
    """Return the options of one engine, checked before; those of others are left out."""
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
    given = split_options(text)
    return kind(**{name: parse_text(field, given[name]) for name, field in fields.items() if name in given})
