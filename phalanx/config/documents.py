"""Settings as text: TOML and YAML files are read, and TOML is written."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

from phalanx.config.settings import FIELDS, Settings
from phalanx.errors import UsageError

RECORD_HEADER = "# The resolved settings of this run."
"""The beginning of the file that each run writes."""


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


def write_toml(config: Settings, *, as_comments: Container[str] = ()) -> str:
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
