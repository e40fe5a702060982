"""Names that are not fields: aliases, which still work, and removed settings, with what to write instead.

Arguments, flags, files, environment variables and the settings of earlier runs are all read by this one table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.config.option import option, plain, problem
from phalanx.config.settings import CONSOLE_WORDS, FIELDS


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Aliases:
    """Other spellings of the settings above."""

    progress: bool = option(True, "console=plain: without the progress bar or lines")
    verbosity: str = option("normal", "console=quiet|verbose, also -q and -v", choices=("quiet", "normal", "verbose"))
    console_ranks: str = option("0", "console=all-ranks: the output of every rank", choices=("0", "all"))
    mlflow_tracking: bool = option(False, "mlflow")
    mlflow_experiment: str | None = option(None, "mlflow=NAME")
    tensorboard_dir: str | None = option(None, "tensorboard=FOLDER", scope="place")


ALIASES: dict[str, dataclasses.Field[Any]] = Aliases.__dataclass_fields__

NAMES = {**FIELDS, **ALIASES}
"""All names that are accepted."""

_MEANINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "progress": lambda on: {"console": "progress" if on else "plain"},
    "verbosity": lambda word: {"console": word},
    "console_ranks": lambda ranks: {"console": "all-ranks" if ranks == "all" else "rank-0"},
    "mlflow_tracking": lambda on: {"mlflow": on},
    "mlflow_experiment": lambda name: {"mlflow": name},
    "tensorboard_dir": lambda folder: {"tensorboard": folder},
}
"""The settings that a value of an alias means; of two aliases of one setting the later row wins."""

REMOVED: dict[str, str] = {
    "metrics_host": "is part of metrics_port: write metrics_port = '0.0.0.0:9400'.",
}
"""What a message about a removed setting says after its name."""


def rename(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return settings without aliases, and (alias, message) for each alias with a wrong value."""
    values = {name: value for name, value in given.items() if name not in _MEANINGS}
    mistakes = []
    for name, meaning in _MEANINGS.items():
        value = plain(given.get(name))
        if wrong := problem(ALIASES[name], value) if value is not None else None:
            mistakes.append((name, wrong))
        elif value is not None:  # None: not given
            values = merge(values, meaning(value))
    return values, mistakes


def merge(values: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of a later source, which win; of a setting with parts it replaces those it names.

    For example `console = "quiet all-ranks"` in a file and `-v` is `verbose all-ranks`.
    """
    both = {name: value for name, value in later.items() if isinstance(value, str) and values.get(name)}
    joined = {name: _PARTS[name](values[name], value) for name, value in both.items() if name in _PARTS}
    return {**values, **later, **joined}


def _add_words(text: str, more: str) -> str:
    """Return the words of `console`, of each kind the last, without those that say the default."""
    words = {CONSOLE_WORDS.get(word, word): word for word in f"{text} {more}".split()}
    return " ".join(word for word in words.values() if word not in ("normal", "progress", "rank-0")) or "normal"


_PARTS: dict[str, Callable[[str, str], str]] = {"console": _add_words}
"""Settings with parts, and how a later source's value changes an earlier one's."""


def of_earlier_run(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a run's files hold as those of this version; removed ones are left out."""
    at_default = {name for name, field in ALIASES.items() if given.get(name) == field.default}
    kept = {name: value for name, value in given.items() if name not in REMOVED and name not in at_default}
    return rename(kept)[0]


def removed(name: str, as_written: str) -> str:
    """Return the message about a removed setting; empty for another name."""
    return f"{as_written} {REMOVED[name]}" if name in REMOVED else ""
