"""Other spellings of settings, and settings of several sources.

An alias means values of settings, at every door (argument, flag, file, variable): another word for one setting, or a
mode (`fast`, `memory`), one name for several. Ranks, whose settings are checked, do not load this.
"""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from phalanx.config.option import option, plain, problem
from phalanx.config.settings import FIELDS


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Aliases:
    """Other spellings of the settings above."""

    num_gpus: int | None = option(None, "num_workers=N with device=cuda, unless another device is given", minimum=1)
    gpus_per_node: int | None = option(None, "num_workers=N x num_nodes with device=cuda", minimum=1)
    mlflow_tracking: bool = option(False, "mlflow")
    mlflow_experiment: str | None = option(None, "mlflow=NAME")
    tensorboard_dir: str | None = option(None, "tensorboard=FOLDER", scope="place")
    fast: bool = option(False, "mixed_precision=fp8 and compile=true, unless these are given")
    memory: bool = option(
        False,
        "compile=true, activation_checkpointing='budget 0.4' (without compile: true), optimizer=adamw8bit, "
        "capture=false, unless given",
    )


ALIASES: dict[str, dataclasses.Field[Any]] = Aliases.__dataclass_fields__

NAMES: Mapping[str, dataclasses.Field[Any]] = ChainMap(FIELDS, ALIASES)
"""All names that are accepted."""
TRACKERS = ("tensorboard", "mlflow", "wandb")
"""Settings that are false, true or a name."""
MODES: dict[str, dict[str, Any]] = {
    "memory": {
        "compile": True,
        "activation_checkpointing": "budget 0.4",
        "optimizer": "adamw8bit",
        "capture": False,  # a graph has its own memory
    },
    "fast": {"mixed_precision": "fp8", "compile": True},
}
"""Aliases of several settings; each of these may be given beside one, and then wins. Of two modes the first wins."""


def mode_settings(name: str, on: bool) -> dict[str, Any]:
    """Return the settings of a mode; turned off, in a later source than the one that has turned it on, the defaults."""
    return MODES[name] if on else {setting: FIELDS[setting].default for setting in MODES[name]}


def without_compile(values: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """Return how the memory mode recomputes activations beside compile = false: a budget is for compiled blocks."""
    return {"activation_checkpointing": True} if mode == "memory" and values.get("compile") is False else {}


_MEANINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "mlflow_tracking": lambda on: {"mlflow": on},
    "mlflow_experiment": lambda name: {"mlflow": name},
    "tensorboard_dir": lambda folder: {"tensorboard": folder},
    **{mode: partial(mode_settings, mode) for mode in MODES},
}
"""The settings that a value of an alias means; of two aliases of one setting the later row wins."""


def rename(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return settings without aliases, and (name, message) for each alias that is wrong, which is left out."""
    values = {name: value for name, value in settings.items() if name not in _MEANINGS}
    mistakes = []
    for name, meaning in _MEANINGS.items():
        value = plain(settings.get(name))
        if wrong := problem(ALIASES[name], value) if value is not None else None:
            mistakes.append((name, wrong))
        elif value is not None:  # None: not given
            meant = meaning(value)
            mistakes += [(name, f"{name} = {value!r} with {text}") for text in _contradicted(values, meant)]
            values = {**meant, **without_compile(values, name), **values} if name in MODES else merge(values, meant)
    return values, mistakes


def _contradicted(values: Mapping[str, Any], meant: Mapping[str, Any]) -> list[str]:
    """Return what of one source turns a tracker off that an alias turns on, or the other way round."""
    opposite = [n for n, v in meant.items() if n in TRACKERS and n in values and bool(values[n]) != bool(v)]
    return [f"{name} = {values[name]!r}: leave one of them out." for name in opposite]


def given_names(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that are given, by whatever spelling, and are not at their defaults."""
    values, _ = rename(settings)
    named = [name for name, value in values.items() if name in FIELDS and value != FIELDS[name].default]
    counted = ["num_workers"] if any(values.get(name) is not None for name in ("num_gpus", "gpus_per_node")) else []
    return list(dict.fromkeys([*named, *counted]))


def merge(values: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of a later source, which win; a tracker that is turned on keeps an earlier name."""
    named = {name: values[name] for name in TRACKERS if later.get(name) is True and isinstance(values.get(name), str)}
    return {**values, **later, **named}
