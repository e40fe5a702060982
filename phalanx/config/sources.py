"""Merge the sources of settings: default, recipe, files, environment, flag or argument; a later one wins."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config.aliases import NAMES, rename
from phalanx.config.backend_rules import engine_rules, missing_engine
from phalanx.config.checking import check, translate, unknown_field
from phalanx.config.distributed import DistributedConfig
from phalanx.config.merging import merge
from phalanx.config.names import like
from phalanx.config.option import kinds, parse_text, split_options
from phalanx.config.rank_counts import RANK_COUNTS, ranges
from phalanx.config.settings import ENV_PREFIX, FIELDS
from phalanx.errors import ConfigError, UsageError

_LIMITS = ("epochs", "max_steps")
"""How long a run is; where both are given, the first that is reached ends it."""
NOT_SETTINGS = {
    *("ALL_TESTS", "CONTROL_FD", "ENGINE", "EVENTS_FD", "FAILURES", "FAULTS", "FAULTS_LINK", "FAULTS_OBJECTS"),
    *("FAULTS_RUN", "GATE", "GENERATION", "HEARTBEATS", "JOB_FOLDER", "JOB_SECRET", "JOINS_LATE", "LAUNCHED_AT"),
    *("LOG_DIR", "PLANNED_RANKS", "PRELOAD", "RAY_FORK_SERVER", "RUN_ID", "SLOT", "SWITCH", "TF_ROLES", "TRIAL"),
    *("TRIAL_RESUMES_AFTER", "UNDER_RAY"),
}
"""The variables that launchers and engines set for their ranks, without the prefix."""
_OF_KUBERNETES = re.compile(r"(^|_)(SERVICE_(HOST|PORT)|PORT$|PORT_\d+_)")
"""Kubernetes describes a service with the name phalanx to every container by variables like these."""


@dataclass(frozen=True)
class Resolved:
    """A checked config and, for each field, where its value came from."""

    config: DistributedConfig
    origins: dict[str, str]

    @property
    def given(self) -> frozenset[str]:
        """The settings that some source set, also to their default."""
        return frozenset(name for name, origin in self.origins.items() if origin != "default")


def resolve(
    given: Mapping[str, Any],
    *,
    given_as: str = "argument",
    file: str | Path | Sequence[str | Path] | None = None,
    recipe: Mapping[str, Any] | None = None,
    recipe_name: str = "",
    gpu_settings: Mapping[str, Any] | None = None,
    on_gpus: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Merge all sources into one checked config; every mistake of every source is reported together.

    Of several files a later one wins. `gpu_settings`: those of the recipe for GPUs, and `on_gpus`: whether there are
    any. Each of them applies unless it contradicts what the user gives.
    """
    environ = os.environ if environ is None else environ
    if gpu_settings:
        resolve({}, recipe=gpu_settings, recipe_name=recipe_name, environ={})  # mistakes of the recipe itself
        sources: dict[str, Any] = {"given_as": given_as, "file": file, "recipe_name": recipe_name, "environ": environ}
        found, used = resolve(given, recipe=recipe, **sources), dict(recipe or {})
        wanted = found.config.device == "cuda" or (on_gpus and found.config.device != "cpu")
        for name, value in gpu_settings.items() if wanted else ():
            with suppress(ConfigError):
                found = resolve(given, recipe={**used, name: value}, **sources)
                used[name] = value
        return found
    variables = {name: ENV_PREFIX + name.upper() for name in NAMES}
    files = [file] if isinstance(file, (str, Path)) else list(file or ())
    layers = [
        (f"recipe {recipe_name}", dict(recipe or {})),
        *((f"file {path}", read_settings(path)) for path in files),
        ("environment", {n: parse_text(NAMES[n], environ[v]) for n, v in variables.items() if v in environ}),
        (given_as, dict(given)),
    ]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(FIELDS, "default")
    mistakes = misspelt_variables(environ)
    wrong_before: set[str] = set()
    for source, written in layers:
        layer, wrong = rename(written)
        origins |= _origins(source, written)
        mistakes += [f"{text} ({origins[name]})" for name, text in wrong]
        wrong_before |= {name for name, _ in wrong}
        # One source's number of ranks replaces another's, under any name; a list of hosts has its own.
        if layer.keys() & RANK_COUNTS or layer.get("hosts"):
            replaced = {*RANK_COUNTS, *(["min_workers"] if ranges(layer) else [])}
            values = {name: value for name, value in values.items() if name not in replaced}
        mistakes += [f"{unknown_field(name)} ({source})" for name in layer if name not in NAMES]
        values = merge(values, {name: value for name, value in layer.items() if name in NAMES})
    for engine in engine_rules(values):
        for name in engine.settled(values) if hasattr(engine, "settled") else ():
            if origins[name].startswith("recipe "):  # the user gave the engine's own file, so it wins over the recipe
                del values[name]
                origins[name] = "default"
    for limit, other in (_LIMITS, _LIMITS[::-1]):
        # The length that the user gives is the length: a recipe's own, in the other unit, would cut it short.
        is_given = values.get(limit) is not None and not origins[limit].startswith("recipe ")
        if is_given and origins[other].startswith("recipe "):
            del values[other]
            origins[other] = "default"
    if counted := [name for name in ("gpus_per_node", "num_gpus") if values.get(name) is not None]:
        chosen = ["num_workers", *(["device"] if values.get("device", "auto") == "auto" else [])]
        origins |= dict.fromkeys(chosen, origins[counted[-1]])
    values, contradictions = translate(values)
    complete, wrong = check(values, wrong_before)
    wrong = contradictions + wrong
    config = DistributedConfig.trusted(complete)
    if not wrong:
        wrong = [(name, text) for name, text in config.unused.items() if origins.get(name) == given_as]
    for name, text in wrong:
        origin = origins.get(name, "default")
        mistakes.append(text if origin == "default" else f"{text} ({origin})")
    if mistakes:
        missing = missing_engine(values)
        raise ConfigError([*([". ".join(missing)] if missing else []), *mistakes])
    filled = {name for name, field in FIELDS.items() if getattr(config, name) != values.get(name, field.default)}
    origins |= dict.fromkeys(filled - {"deepspeed_config"}, "deepspeed_config")
    return Resolved(config, {name: origins[name] for name in FIELDS})


def _origins(source: str, written: Mapping[str, Any]) -> dict[str, str]:
    """Return where a source has each setting and option: PHALANX_STOP_GRACE has stop_grace and engine_options."""
    found: dict[str, str] = {}
    for name, value in written.items():
        origin = f"environment {ENV_PREFIX}{name.upper()}" if source == "environment" else source
        meant = rename({name: value})[0]
        found |= dict.fromkeys((name, *meant, *split_options(meant.get("engine_options"))), origin)
    return found


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the message for each variable that looks like one of a setting, and is not."""
    found = []
    for variable in sorted(environ):
        name = variable.removeprefix(ENV_PREFIX)
        if name == variable or name in NOT_SETTINGS or name.lower() in NAMES or _OF_KUBERNETES.search(name):
            continue
        if (close := like(name.lower(), NAMES)) is not None:  # else it belongs to another program
            setting, _, value = close.partition("=")
            meant = f"{ENV_PREFIX}{setting.upper()}{f'={value}' if value else ''}"
            found.append(f"unknown environment variable {variable}. Did you mean {meant}?")
    return found


def read_settings(path: str | Path) -> dict[str, Any]:
    """Read a run's TOML or YAML file: flat keys, or keys under any table (tables only group them)."""
    document = read_document(path)
    if {"model", "data", "recipe"} & document.keys():
        raise UsageError(
            f"{path} is a recipe (it names a model or data), and --config takes a file of settings",
            hint=f"Write: phalanx train {path if os.path.dirname(path) else f'./{path}'}",
        )
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if key == "submit":  # options of phalanx submit
            continue
        is_group = isinstance(value, dict) and key.replace("-", "_") != "engine_options"
        table = value if is_group else {key: value}
        repeated = flat.keys() & table.keys()
        if repeated:
            raise ConfigError([f"{name} is set twice, in different tables" for name in repeated], source=str(path))
        flat.update(table)
    return {key.replace("-", "_"): _from_file(key.replace("-", "_"), value) for key, value in flat.items()}


def read_document(path: str | Path, what: str = "config file") -> dict[str, Any]:
    """Return what a TOML or YAML file holds; by its name's end, and TOML where that says nothing."""
    try:
        import tomllib  # 5 ms, which help and completion do not need

        text = Path(path).read_text(encoding="utf-8")
        document = _parse_yaml(text) if str(path).endswith((".yaml", ".yml")) else tomllib.loads(text)
    except FileNotFoundError:
        hint = "Write one with: phalanx config show --toml > run.toml" if what == "config file" else ""
        raise UsageError(f"no such {what}: {path}", hint=hint) from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a directory, not a TOML file") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        kind = "YAML" if str(path).endswith((".yaml", ".yml")) else "TOML"
        raise UsageError(f"{path} is not valid {kind}: {error}") from None
    return document


def _parse_yaml(text: str) -> dict[str, Any]:
    """Return a YAML document; ValueError where it is not one of names and values."""
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "reading YAML needs the package pyyaml, which is not installed",
            hint="Run: pip install pyyaml, or write the settings as TOML: learning_rate = 0.1",
        ) from None
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if document is not None and not isinstance(document, dict):
        raise ValueError(f"expected lines such as 'learning_rate: 0.1', found a {type(document).__name__}")
    return {str(key): value for key, value in (document or {}).items()}


def _from_file(name: str, value: Any) -> Any:
    """Return a value of a file as its setting reads it: TOML has no null, and to YAML 1e-3 is text."""
    if not isinstance(value, str) or name not in NAMES:
        return value
    members = kinds(NAMES[name])
    if value == "none" and "None" in members:
        return None
    numeric = {"int", "float"} & set(members) and "str" not in members
    return parse_text(NAMES[name], value) if numeric else value
