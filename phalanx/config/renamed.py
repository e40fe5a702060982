"""Names that are not fields: aliases, which still work, and removed settings, with what to write instead.

Arguments, flags, files, environment variables and the settings of earlier runs are all read by this one table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.config.option import option, plain, problem
from phalanx.config.settings import FIELDS


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Aliases:
    """Other spellings of the settings above."""

    mlflow_tracking: bool = option(False, "mlflow")
    mlflow_experiment: str | None = option(None, "mlflow=NAME")
    tensorboard_dir: str | None = option(None, "tensorboard=FOLDER", scope="place")


ALIASES: dict[str, dataclasses.Field[Any]] = Aliases.__dataclass_fields__

NAMES = {**FIELDS, **ALIASES}
"""All names that are accepted."""

_MEANINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "mlflow_tracking": lambda on: {"mlflow": on},
    "mlflow_experiment": lambda name: {"mlflow": name},
    "tensorboard_dir": lambda folder: {"tensorboard": folder},
}
"""The settings that a value of an alias means; of two aliases of one setting the later row wins."""

REMOVED: dict[str, str] = {}
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
            values |= meaning(value)
    return values, mistakes


def of_earlier_run(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a run's files hold as those of this version; removed ones are left out."""
    at_default = {name for name, field in ALIASES.items() if given.get(name) == field.default}
    kept = {name: value for name, value in given.items() if name not in REMOVED and name not in at_default}
    return rename(kept)[0]


def removed(name: str, as_written: str) -> str:
    """Return the message about a removed setting; empty for another name."""
    return f"{as_written} {REMOVED[name]}" if name in REMOVED else ""
