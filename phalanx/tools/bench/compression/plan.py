"""What the benchmark runs, as plain data. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from phalanx.config.strategies import COMPRESSORS
from phalanx.errors import UsageError, unknown_name

RECIPES = ("text", "digits")
LINKS = ("100Mb", "1Gb", "10Gb")
HERE = "here"
_RATE = re.compile(r"^(\d+(?:\.\d+)?)\s*(M|G)b(?:/s|it)?$", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """One training run: a recipe under a compressor."""

    recipe: str
    compressor: str

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.recipe}-{self.compressor}"


@dataclass(frozen=True)
class CompressionRequest:
    """What is sent to the ranks: the runs, and the rate of an emulated link."""

    cases: list[Case]
    steps: int
    settings: dict[str, Any] = field(default_factory=dict)
    """More settings, such as compression_ratio; each compressor uses its own."""
    emulated_bytes_per_second: float | None = None


def read_names(text: str, kind: str, allowed: tuple[str, ...]) -> list[str]:
    """Read names separated by commas; raise for an unknown one, with the nearest."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            raise UsageError(unknown_name(kind, name, allowed))
    if not names:
        raise UsageError(f"no {kind} was named", hint=f"Allowed, separated by commas: {', '.join(allowed)}")
    return names


def read_compressors(text: str) -> list[str]:
    """Read the names of compressors; 'none', the reference for the others, is always included."""
    names = read_names(text, "compressor", COMPRESSORS)
    return names if "none" in names else ["none", *names]


def read_link(text: str) -> float:
    """Return the bytes per second of a link such as `100Mb` or `1Gb`."""
    match = _RATE.match(text.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"'{text}' is not a link", hint="Write its bits per second: 100Mb, 1Gb or 2.5Gb.")
    return float(match[1]) * (1e6 if match[2].upper() == "M" else 1e9) / 8
