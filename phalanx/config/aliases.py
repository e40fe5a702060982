"""Other spellings of settings: an alias means values of settings, at every door (argument, flag, file, variable)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from phalanx.config.merging import PARTS, TRACKERS, merge
from phalanx.config.modes import MODES, mode_settings, without_compile
from phalanx.config.option import as_text, option, plain, problem, split_options
from phalanx.config.run_fields import OPTIONS
from phalanx.config.settings import FIELDS


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Aliases:
    """Other spellings of the settings above."""

    num_gpus: int | None = option(None, "num_workers=N with device=cuda, unless another device is given", minimum=1)
    gpus_per_node: int | None = option(None, "num_workers=N x num_nodes with device=cuda", minimum=1)
    progress: bool = option(True, "console=plain: without the progress bar or lines")
    cpus_per_worker: float = option(1.0, "engine_options cpus_per_worker (ray)", above=0)
    resources_per_worker: str | None = option(None, "engine_options resources.<name> (ray): 'GPU=0.5,big_memory=1'")
    placement: str = option("pack", "engine_options placement (ray)")
    host_discovery_script: str | None = option(None, "engine_options host_discovery_script (horovod)")
    adasum: bool = option(False, "engine_options adasum (horovod)")
    horovod_timeline: str | None = option(None, "engine_options timeline (horovod)")
    nvme_path: str | None = option(None, "engine_options nvme_path (deepspeed)")
    mlflow_tracking: bool = option(False, "mlflow")
    mlflow_experiment: str | None = option(None, "mlflow=NAME")
    tensorboard_dir: str | None = option(None, "tensorboard=FOLDER", scope="place")
    fast: bool = option(False, "mixed_precision=fp8 and compile=true, unless these are given")
    memory: bool = option(
        False,
        "compile=true, activation_checkpointing='budget 0.4' (without compile: true), optimizer=adamw8bit, "
        "capture=false, unless given",
    )


ALIASES: dict[str, dataclasses.Field[Any]] = {**Aliases.__dataclass_fields__, **OPTIONS}
"""The other spellings, and the options of every engine."""

NAMES = {**FIELDS, **ALIASES}
"""All names that are accepted."""


def _engine_option(name: str) -> Callable[[Any], dict[str, Any]]:
    """Return the meaning of an alias that is an option of an engine."""
    return lambda value: {"engine_options": as_text({name: value})}


_OPTIONS = ("cpus_per_worker", "placement", "host_discovery_script", "adasum", "nvme_path", *OPTIONS)
"""Aliases with the names of options."""

_MEANINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "progress": lambda on: {"console": "progress" if on else "plain"},
    "resources_per_worker": lambda text: {
        "engine_options": ",".join(f"resources.{part.strip()}" for part in text.split(","))
    },
    "horovod_timeline": lambda path: {"engine_options": as_text({"timeline": path})},
    **{name: _engine_option(name) for name in _OPTIONS},
    "mlflow_tracking": lambda on: {"mlflow": on},
    "mlflow_experiment": lambda name: {"mlflow": name},
    "tensorboard_dir": lambda folder: {"tensorboard": folder},
    **{mode: partial(mode_settings, mode) for mode in MODES},
}
"""The settings that a value of an alias means; of two aliases of one setting the later row wins."""


def rename(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return settings without aliases, and (name, message) for each alias and each setting with parts that is wrong.

    A wrong one is left out, so that it is not joined with those of other sources.
    """
    values = {name: value for name, value in given.items() if name not in _MEANINGS}
    mistakes = []
    for name in PARTS.keys() & values.keys():
        try:
            values[name] = PARTS[name].read(values[name])
        except ValueError as error:
            mistakes.append((name, f"{name} = {values.pop(name)!r}: {error}"))
    for name, meaning in _MEANINGS.items():
        value = plain(given.get(name))
        if wrong := problem(ALIASES[name], value) if value is not None else None:
            mistakes.append((name, wrong))
        elif value is not None:  # None: not given
            try:
                meant = meaning(value)
                split_options(meant.get("engine_options"))
            except ValueError as error:
                mistakes.append((name, f"{name} = {value!r}: {error}"))
                continue
            mistakes += [(name, f"{name} = {value!r} with {text}") for text in _contradicted(values, meant)]
            values = {**meant, **without_compile(values, name), **values} if name in MODES else merge(values, meant)
        elif name in given and name in OPTIONS and OPTIONS[name].default is None:  # set back what another source gave
            values = merge(values, {"engine_options": f"{name}=none"})
    return values, mistakes


def _contradicted(values: Mapping[str, Any], meant: Mapping[str, Any]) -> list[str]:
    """Return what of one source turns a tracker off that an alias turns on, or the other way round."""
    opposite = [n for n, v in meant.items() if n in TRACKERS and n in values and bool(values[n]) != bool(v)]
    return [f"{name} = {values[name]!r}: leave one of them out." for name in opposite]
