"""Merge the sources of settings: default, recipe, files, environment, flag or argument; a later one wins."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.config.aliases import NAMES, merge, rename
from phalanx.config.backend_rules import missing_engine
from phalanx.config.checking import check, translate, unknown_field
from phalanx.config.distributed import RECORD_HEADER, DistributedConfig
from phalanx.config.names import like
from phalanx.config.option import kinds, parse_text, takes_table
from phalanx.config.rank_counts import RANK_COUNTS, ranges
from phalanx.config.rules import engine_rules
from phalanx.config.settings import ENV_PREFIX, FIELDS, add_engine
from phalanx.errors import ConfigError, UsageError, a_type

_LIMITS = ("epochs", "max_steps")
"""How long a run is; where both are given, the first that is reached ends it."""
NOT_SETTINGS = {
    *("ALL_TESTS", "CONTROL_FD", "ENGINE", "EVENTS_FD", "FAILURES", "FAULTS", "FAULTS_LINK", "FAULTS_OBJECTS"),
    *("FAULTS_RUN", "GENERATION", "HEARTBEATS", "JOB_FOLDER", "JOB_SECRET", "JOINS_LATE", "LAUNCHED_AT"),
    *("LOG_DIR", "PLANNED_RANKS", "PRELOAD", "RAY_FORK_SERVER", "RUN_ID", "SLOT", "SWITCH", "TERM", "TF_ROLES"),
    *("TRIAL", "TRIAL_CONTROL", "TRIAL_RESUMES_AFTER", "UNDER_RAY"),
}
"""The variables that launchers and engines set for their ranks, without the prefix."""
_OF_KUBERNETES = re.compile(r"(^|_)(SERVICE_(HOST|PORT)|PORT$|PORT_\d+_)")
"""Kubernetes describes a service with the name phalanx to every container by variables like these."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A checked config and, for each field, where its value came from."""

    config: DistributedConfig
    origins: dict[str, str]

    @property
    def given(self) -> frozenset[str]:
        """The settings that some source set, also to their default."""
        return frozenset(name for name, origin in self.origins.items() if origin != "default")


class _MergedConfig(NamedTuple):
    """What the sources say together: values of settings, where each came from, and mistakes of single sources."""

    values: dict[str, Any]
    origins: dict[str, str]
    mistakes: list[str]
    wrong: set[str]
    """The settings with such a mistake."""


class _CheckedConfig(NamedTuple):
    """A config, where its values came from, and every mistake."""

    config: DistributedConfig
    origins: dict[str, str]
    mistakes: list[str]


_Layers = Sequence[tuple[str, Mapping[str, Any]]]
"""(source, settings), each over those before it."""


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
) -> ResolvedConfig:
    """Merge all sources into one checked config; every mistake of every source is reported together.

    Of several files a later one wins. `gpu_settings`: those of the recipe for GPUs, and `on_gpus`: whether there are
    any. Each of them applies unless it contradicts what the user gives.
    """
    environ = os.environ if environ is None else environ
    files = [file] if isinstance(file, (str, Path)) else list(file or ())
    read = [(f"file {path}", read_settings(path)) for path in files]
    for settings in (recipe or {}, *(settings for _, settings in read), given):
        add_engine(settings.get("backend"))
    add_engine(environ.get(f"{ENV_PREFIX}BACKEND"))
    variables = {name: ENV_PREFIX + name.upper() for name in NAMES}
    of_environment = {n: parse_text(NAMES[n], environ[v]) for n, v in variables.items() if v in environ}
    of_recipe = f"recipe {recipe_name}"
    users = [*read, ("environment", of_environment), (given_as, dict(given))]
    merged = _check_all([(of_recipe, recipe or {}), *users], given_as)
    if gpu_settings and not merged.mistakes:
        merged = _with_gpu_settings(merged, (of_recipe, recipe or {}), gpu_settings, users, on_gpus=on_gpus)
    if mistakes := misspelt_variables(environ) + merged.mistakes:
        raise ConfigError(mistakes)
    return ResolvedConfig(merged.config, merged.origins)


def _with_gpu_settings(
    merged: _CheckedConfig,
    recipe: tuple[str, Mapping[str, Any]],
    gpu_settings: Mapping[str, Any],
    users: _Layers,
    *,
    on_gpus: bool,
) -> _CheckedConfig:
    """Return the config with the recipe's settings for GPUs, but for those that contradict what the user gives."""
    source, settings = recipe
    if alone := _check_all([(source, gpu_settings)], "").mistakes:
        raise ConfigError(alone)
    if not (merged.config.device == "cuda" or (on_gpus and merged.config.device != "cpu")):
        return merged
    together = _check_all([(source, {**settings, **gpu_settings}), *users], users[-1][0])
    if not together.mistakes:
        return together
    used = dict(settings)
    for name, value in gpu_settings.items():
        tried = _check_all([(source, {**used, name: value}), *users], users[-1][0])
        if not tried.mistakes:
            merged, used[name] = tried, value
    return merged


def _check_all(layers: _Layers, given_as: str) -> _CheckedConfig:
    """Merge layers of settings and check the result; `given_as`: the layer in which unused settings are refused."""
    values, origins, mistakes, wrong_before = _merge_layers(layers)
    values, contradictions = translate(values)
    complete, wrong = check(values, wrong_before)
    wrong = contradictions + wrong
    config = DistributedConfig.trusted(complete)
    if not wrong:
        wrong = [(name, text) for name, text in config.unused.items() if origins.get(name) == given_as]
    for name, text in wrong:
        origin = origins.get(name, "default")
        mistakes.append(text if origin == "default" else f"{text} ({origin})")
    if mistakes and (missing := missing_engine(values)):
        mistakes.insert(0, ". ".join(missing))
    for engine in engine_rules(values):
        if filler := getattr(engine, "FILLS_FROM", ""):
            filled = [n for n, field in FIELDS.items() if getattr(config, n) != values.get(n, field.default)]
            origins |= {name: filler for name in filled if name != filler}
    return _CheckedConfig(config, {name: origins.get(name, "default") for name in FIELDS}, mistakes)


def _merge_layers(layers: _Layers) -> _MergedConfig:
    """Merge settings of several sources; a later one wins."""
    merged = _MergedConfig({}, dict.fromkeys(FIELDS, "default"), [], set())
    values, origins = merged.values, merged.origins
    for source, written in layers:
        layer, wrong = rename(written)
        origins |= _origins(source, written)
        merged.mistakes.extend(f"{text} ({origins[name]})" for name, text in wrong)
        merged.wrong.update(name for name, _ in wrong)
        # One source's number of ranks replaces another's, under any name; a list of hosts has its own.
        if layer.keys() & RANK_COUNTS or layer.get("hosts"):
            replaced = {*RANK_COUNTS, *(["min_workers"] if ranges(layer) else [])}
            values = {name: value for name, value in values.items() if name not in replaced}
        merged.mistakes.extend(f"{unknown_field(name)} ({source})" for name in layer if name not in NAMES)
        values = merge(values, {name: value for name, value in layer.items() if name in NAMES})
    for name in _replaced_of_recipe(values, origins):
        del values[name]
        origins[name] = "default"
    if counted := [name for name in ("gpus_per_node", "num_gpus") if values.get(name) is not None]:
        chosen = ["num_workers", *(["device"] if values.get("device", "auto") == "auto" else [])]
        origins |= dict.fromkeys(chosen, origins[counted[-1]])
    return merged._replace(values=values)


def _replaced_of_recipe(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Return the settings of a recipe that give way to another one of the user's."""
    of_recipe = {name for name in values if origins[name].startswith("recipe ")}
    # The user gave the engine's own file, so it wins over the recipe.
    engines = [engine for engine in engine_rules(values) if hasattr(engine, "settled")]
    replaced = {name for engine in engines for name in engine.settled(values)}
    for limit, other in (_LIMITS, _LIMITS[::-1]):
        # The length that the user gives is the length: a recipe's own, in the other unit, would cut it short.
        if values.get(limit) is not None and limit not in of_recipe:
            replaced.add(other)
    return [name for name in replaced if name in of_recipe]


def _origins(source: str, written: Mapping[str, Any]) -> dict[str, str]:
    """Return where a source has each setting: PHALANX_NUM_GPUS has num_gpus and num_workers."""
    origins: dict[str, str] = {}
    for name, value in written.items():
        origin = f"environment {ENV_PREFIX}{name.upper()}" if source == "environment" else source
        origins |= dict.fromkeys((name, *rename({name: value})[0]), origin)
    return origins


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the message for each variable that looks like one of a setting, and is not."""
    messages = []
    for variable in sorted(environ):
        name = variable.removeprefix(ENV_PREFIX)
        if name == variable or name in NOT_SETTINGS or name.lower() in NAMES or _OF_KUBERNETES.search(name):
            continue
        if (close := like(name.lower(), NAMES)) is not None:  # else it belongs to another program
            setting, _, value = close.partition("=")
            meant = f"{ENV_PREFIX}{setting.upper()}{f'={value}' if value else ''}"
            messages.append(f"unknown environment variable {variable}. Did you mean {meant}?")
    return messages


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
        field = NAMES.get(key.replace("-", "_"))
        table = {key: value} if not isinstance(value, dict) or (field and takes_table(field)) else value
        repeated = flat.keys() & table.keys()
        if repeated:
            raise ConfigError([f"{name} is set twice, in different tables" for name in repeated], source=str(path))
        flat.update(table)
    settings = {key.replace("-", "_"): _from_file(key.replace("-", "_"), value) for key, value in flat.items()}
    return _without_option_texts(settings) if _is_record(path) else settings


def _is_record(path: str | Path) -> bool:
    """Whether a run has written this file."""
    return Path(path).read_text(encoding="utf-8").startswith(RECORD_HEADER)


def _without_option_texts(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a record; some records have those of `Advanced` and of engines as one text."""
    values = {name: value for name, value in recorded.items() if name != "engine_options"}
    text = recorded.get("engine_options")
    parts = [part.partition("=") for part in text.split(",")] if isinstance(text, str) and "=" in text else []
    resources = ",".join(f"{name.removeprefix('resources.')}={value}" for name, _, value in parts if "." in name)
    if resources:
        values["resources_per_worker"] = resources
    for name, _, value in parts:
        for named in (field for field in FIELDS if field == name or field.endswith(f"_{name}")):
            values[named] = parse_text(FIELDS[named], value)
    return values


def read_document(path: str | Path, content: str = "config file") -> dict[str, Any]:
    """Return what a TOML or YAML file holds; by its name's end, and TOML where that says nothing."""
    try:
        import tomllib  # 5 ms, which help and completion do not need

        text = Path(path).read_text(encoding="utf-8")
        document = _parse_yaml(text) if str(path).endswith((".yaml", ".yml")) else tomllib.loads(text)
    except FileNotFoundError:
        hint = "Write one with: phalanx config show --toml > run.toml" if content == "config file" else ""
        raise UsageError(f"no such {content}: {path}", hint=hint) from None
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
        raise ValueError(f"expected lines such as 'learning_rate: 0.1', found {a_type(document)}")
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
