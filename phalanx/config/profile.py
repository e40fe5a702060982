"""The setting `profile`: which steps of which ranks are recorded, and what; read from words such as `steps=10:15`."""

from __future__ import annotations

import re
from typing import NamedTuple

from phalanx.errors import nearest

DEFAULT_STEPS = (3, 5)
"""After the first steps, which allocate, connect and compile."""
_FLAGS = ("memory", "nvtx")
_WORDS = ("steps", "ranks", *_FLAGS)
_STEPS = re.compile(r"(\d+)(?::(\d+))?")
_RANKS = re.compile(r"\d+(,\d+)*")


class Profiling(NamedTuple):
    """What is recorded: steps `first` to `last`, both included, of `ranks` (None: all); 0: no trace is written."""

    first: int = DEFAULT_STEPS[0]
    last: int = DEFAULT_STEPS[1]
    ranks: tuple[int, ...] | None = None
    memory: bool = False
    nvtx: bool = False

    def covers(self, rank: int) -> bool:
        """Whether a trace of this rank is written."""
        return self.last > 0 and (self.ranks is None or rank in self.ranks)


def parse_profile(setting: bool | str) -> Profiling | None:
    """Read the words of `profile`; None where it is off. ValueError says what to write."""
    if setting is False:
        return None
    parts: dict[str, str] = {}
    for word in [] if setting is True else str(setting).split():
        name, equals, value = word.partition("=")
        if name not in _WORDS or bool(equals) == (name in _FLAGS):
            raise ValueError(_unknown(word, name))
        if name in parts:
            raise ValueError(f"{name} is given twice: leave one of them out.")
        parts[name] = value
    if parts.keys() == {"nvtx"}:
        return Profiling(0, 0, nvtx=True)
    first, last = _steps(parts["steps"]) if "steps" in parts else DEFAULT_STEPS
    ranks = _ranks(parts.get("ranks", "all"))
    return Profiling(first, last, ranks, "memory" in parts, "nvtx" in parts)


def _unknown(word: str, name: str) -> str:
    if name in _FLAGS:
        return f"{name} takes no value: write {name}."
    if name in _WORDS:
        return f"{name} needs a value: write {'steps=10:15' if name == 'steps' else 'ranks=0,3'}."
    if _STEPS.fullmatch(word):
        return f"steps are written steps={word}."
    close = nearest(name, _WORDS)
    guess = f" Did you mean {close}?" if close else ""
    return f"unknown word {word!r}.{guess} Allowed: steps=10:15, ranks=all or ranks=0,3, memory, nvtx."


def _steps(text: str) -> tuple[int, int]:
    match = _STEPS.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < first <= last:
        raise ValueError(
            f"steps={text} is not a range of steps, which count from 1: write steps=10:15 (10 to 15) or steps=10."
        )
    return first, last


def _ranks(text: str) -> tuple[int, ...] | None:
    if text == "all":
        return None
    if not _RANKS.fullmatch(text):
        raise ValueError(f"ranks={text} is not a list of ranks: write ranks=all, ranks=0 or ranks=0,3.")
    return tuple(sorted({int(part) for part in text.split(",")}))
