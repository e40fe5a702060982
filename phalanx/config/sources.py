"""Merge the sources of settings: default, recipe, TOML file, environment, flag or argument; a later one wins."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config import deepspeed
from phalanx.config.distributed import DistributedConfig, check, translate, unknown_field
from phalanx.config.option import kinds, parse_text
from phalanx.config.settings import FIELDS
from phalanx.errors import ConfigError, UsageError

ENV_PREFIX = "PHALANX_"
RANK_COUNTS = {"num_workers", "num_gpus", "gpus_per_node"}


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
    file: str | Path | None = None,
    recipe: Mapping[str, Any] | None = None,
    recipe_name: str = "",
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Merge all sources into one checked config; every mistake of every source is reported together."""
    environ = os.environ if environ is None else environ
    variables = {name: ENV_PREFIX + name.upper() for name in FIELDS}  # other PHALANX_ variables are the launcher's
    layers = [
        (f"recipe {recipe_name}", dict(recipe or {})),
        (f"file {file}", read_toml(file) if file is not None else {}),
        ("environment", {n: parse_text(FIELDS[n], environ[v]) for n, v in variables.items() if v in environ}),
        (given_as, dict(given)),
    ]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(FIELDS, "default")
    mistakes: list[str] = []
    for origin, layer in layers:
        if layer.keys() & RANK_COUNTS:  # one source's number of ranks replaces another's, under any name
            values = {name: value for name, value in values.items() if name not in RANK_COUNTS}
        for name, value in layer.items():
            if name not in FIELDS:
                mistakes.append(f"{unknown_field(name)} ({origin})")
                continue
            values[name] = value
            origins[name] = f"environment {variables[name]}" if origin == "environment" else origin
    for name in deepspeed.settled(values.get("deepspeed_config"), values.get("mixed_precision", False)):
        if origins[name].startswith("recipe "):  # the user gave the JSON, so it wins over the recipe
            del values[name]
            origins[name] = "default"
    values = translate(values)
    complete, wrong = check(values)
    config = DistributedConfig.trusted(complete)
    if not wrong:
        wrong = [(name, text) for name, text in config.unused.items() if origins[name] == given_as]
    mistakes += [text if origins[name] == "default" else f"{text} ({origins[name]})" for name, text in wrong]
    if mistakes:
        missing = [f"{deepspeed.MISSING}. {deepspeed.INSTALL}"] if deepspeed.is_missing(values) else []
        raise ConfigError(missing + mistakes)
    filled = {name for name, field in FIELDS.items() if getattr(config, name) != values.get(name, field.default)}
    origins |= dict.fromkeys(filled - {"deepspeed_config"}, "deepspeed_config")
    return Resolved(config, origins)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a run's TOML file: flat keys, or keys under any table (tables only group them)."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"no such config file: {path}", hint="Write one with: phalanx config show --toml > run.toml"
        ) from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a directory, not a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    flat: dict[str, Any] = {}
    for key, value in document.items():
        table = value if isinstance(value, dict) else {key: value}
        repeated = flat.keys() & table.keys()
        if repeated:
            raise ConfigError([f"{name} is set twice, in different tables" for name in repeated], source=str(path))
        flat.update(table)
    named = {key.replace("-", "_"): value for key, value in flat.items()}
    # TOML has no null: the text "none" stands for it where a field can be unset.
    unset = {
        name for name, value in named.items() if value == "none" and name in FIELDS and "None" in kinds(FIELDS[name])
    }
    return {name: None if name in unset else value for name, value in named.items()}


def write_toml(config: DistributedConfig, *, as_comments: Container[str] = ()) -> str:
    """Return the config as TOML that `--config` reads back; unset values and those in `as_comments` become comments."""
    lines = []
    for name, field in FIELDS.items():
        value = getattr(config, name)
        lines.append(f"# {field.metadata['help']}")
        if value is None and field.default is None:
            lines.append(f"# {name} = (unset)")
        else:
            lines.append(f"{'# ' if name in as_comments else ''}{name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Return a value as TOML."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return repr(value)
