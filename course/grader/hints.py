"""The hints of the exercises. They stand apart from the templates, so that each is read when it is asked for."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path


@functools.cache
def _all() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def hints(name: str) -> list[str]:
    """Return the hints of an exercise, from a direction to nearly the algorithm."""
    return list(_all()[name]["hints"])


def first_hint(name: str) -> str:
    """Return the first hint as a sentence."""
    return f"Hint 1: {hints(name)[0]}"
