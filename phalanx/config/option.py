"""`option` declares a setting with its help text and limits; `problem` checks a value against them.

The text of an annotation (`int | None`, `bool | str`) is the field's type for Python arguments, TOML keys,
environment variables and flags alike.

`engine_options` holds options as text, `name=value,name=value`: an engine declares its own in `rules.py`, as the fields
of a class, `OPTIONS`; `read_options` reads them.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from phalanx.errors import UsageError

Options = TypeVar("Options")

_URL = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*://")
_NO_URLS = (
    "files are written to folders of this machine or of a mounted file system, not to a URL. Give a path, and copy "
    "from there (or mount the bucket)."
)
_FREQUENCY = re.compile(r"^\s*(\d+)\s*(epochs?|steps?)?\s*$")
_SHARE = re.compile(r"^\s*(\d*\.\d+|\d+(?=\s*%))\s*(%)?\s*$")
_NO_COMMA = "a comma separates options, so their values have none"
_TRUE = {"true", "yes", "on"}
_FALSE = {"false", "no", "off"}
_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    entry_points: str | None = None,
    scope: str = "",
    backends: tuple[str, ...] = (),
    strategies: tuple[str, ...] = (),
    implies: str = "",
    needs: str = "",
    keras: str = "",
    engine: str = "",
    expects: str = "",
    used_by: str = "ranks",
    in_loop: str = "",
) -> Any:
    """Declare a configuration field: its default, its one help text, what it allows and where it is used.

    `entry_points`: a group of installed packages' entry points whose names are choices too. `scope`: any of "layout"
    (chooses how ranks share a model), "split" (has no meaning for one process), "machine" (may differ between the
    machines of a run), "place" (a name or a path). `backends`, `strategies`: the only ones that use it; empty: all.
    `implies`: the strategy that it chooses where none is named. `needs`: the setting without which it has no effect.
    `keras`: "used" by Keras models, "ignored" (allowed in a file for several backends), or refused. `engine`: its rules
    are asked where the setting is given. `expects`: what to write, where a text has a form of its own.

    `used_by`: any of "command" (`phalanx train` or the launcher, for scripts too), "recovery" (the launcher, for ranks
    of a trainer alone), "ranks" (what `Formation` prepares, so loops of the user's too), "trainer" (its loop alone) and
    "value" (a number that the user's code may read from a config). `ways` derives from it where a setting counts.
    `in_loop`: what to write in a loop of the user's instead.
    """
    allowed = {"choices": choices, "minimum": minimum, "above": above, "below": below, "entry_points": entry_points}
    users = {"scope": scope.split(), "backends": backends, "strategies": strategies, "implies": implies, "keras": keras}
    users |= {"needs": needs, "engine": engine, "expects": expects, "used_by": used_by.split(), "in_loop": in_loop}
    return dataclasses.field(default=default, metadata={"help": help, **allowed, **users})


def kinds(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return the member types of a field's annotation, such as ("int", "None")."""
    return tuple(part.strip() for part in str(field.type).split("|"))


def parse_text(field: dataclasses.Field[Any], text: str) -> Any:
    """Read a value that is given as text (flag, environment); `problem` reports what cannot be read and stays text."""
    members = kinds(field)
    lowered = text.strip().lower()
    if "None" in members and lowered in {"none", "null", ""}:
        return None
    if "bool" in members and lowered in _TRUE | _FALSE:
        return lowered in _TRUE
    for kind, read in (("int", int), ("float", float)):
        if kind in members:
            try:
                return read(text.replace("_", ""))
            except ValueError:
                continue
    return text


def parse_frequency(given: float | str, expects: str, *, shares: bool = False) -> tuple[int, str]:
    """Read a number of epochs or '500 steps'; with `shares` also 0.25 or '25%' of an epoch, as (4, "times").

    ValueError says what to write.
    """
    if shares and isinstance(given, str) and (share := _SHARE.match(given)):
        given = float(share[1]) / (100 if share[2] else 1)
    if shares and isinstance(given, float) and 0 < given <= 1:
        return round(1 / given), "times"
    match = _FREQUENCY.match(str(given))
    if match is None or int(match[1]) == 0:
        raise ValueError(f"expected {expects}.")
    return int(match[1]), "steps" if (match[2] or "").startswith("step") else "epochs"


def read_hosts(path: str) -> list[str]:
    """Return the lines of a file, `node1 slots=8`, each as node1:8; # begins a comment. Or ValueError."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    words = [line.partition("#")[0].split() for line in lines]
    if wrong := [" ".join(each) for each in words if len(each) > 2 or (each[1:] and not each[1].startswith("slots="))]:
        raise ValueError(f"{path}: {wrong[0]!r} is not a machine and its slots: write node1 slots=8.")
    if not any(words):
        raise ValueError(f"{path} names no machine: write a line for each, node1 slots=8.")
    return [":".join([each[0], *(word.removeprefix("slots=") for word in each[1:])]) for each in words if each]


def problem(field: dataclasses.Field[Any], value: Any) -> str | None:
    """Return what is wrong with `value` for this field, or None."""
    choices, minimum, above = (field.metadata[key] for key in ("choices", "minimum", "above"))
    if not any(_is_a(value, kind) for kind in kinds(field)):
        words = [_WORDS[kind] for kind in kinds(field) if kind != "None"]
        usual = " or ".join(words) if choices is None else "one of " + _listed(choices)
        return f"{field.name} = {value!r}: expected {field.metadata['expects'] or usual}."
    if value == "":
        return f"{field.name} = '': the text is empty: give a value, or leave {field.name} out."
    if choices is not None and not any(
        value is choice or (value == choice and type(value) is type(choice)) for choice in choices
    ):
        if (group := field.metadata["entry_points"]) is not None:
            from importlib.metadata import entry_points  # 30 ms to import

            if value in entry_points(group=group).names:
                return None
        from phalanx.config.names import like_value  # ranks, whose settings are correct, need no guesses

        names = [choice for choice in choices if isinstance(choice, str)]
        close = like_value(field.name, value, names) if isinstance(value, str) else None
        guess = f" Did you mean {close!r}?" if close else ""
        return f"{field.name} = {value!r}: not one of {_listed(choices)}.{guess}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            return f"{field.name} = {value!r}: must be a finite number."
        if minimum is not None and value < minimum:
            return f"{field.name} = {value!r}: must be {minimum} or more."
        if above is not None and value <= above:
            return f"{field.name} = {value!r}: must be greater than {above}."
        if (below := field.metadata["below"]) is not None and value >= below:
            return f"{field.name} = {value!r}: must be below {below}."
    return None


def plain(value: Any) -> Any:
    """Turn paths and numbers of other types (pathlib, NumPy) into plain ones."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def url_problem(name: str, value: Any) -> str | None:
    """Return what is wrong where a URL is given as a path, or None; used as a path it would make a folder "s3:"."""
    return f"{name} = {value!r}: {_NO_URLS}" if isinstance(value, str) and _URL.match(value) else None


def local_path(given: str | Path) -> Path:
    """Return the path that a user gave; raise for a URL."""
    wrong = url_problem("path", given)
    if wrong is not None:
        raise UsageError(wrong)
    return Path(given)


def check_folder(given: str, path: Path) -> None:
    """Refuse to write a file in a folder that does not exist; `given`: the call or flag that names it."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{given}: there is no folder {path.parent}", hint=f"Make it: mkdir -p {path.parent}")


def _is_a(value: Any, kind: str) -> bool:
    match kind:
        case "None":
            return value is None
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case "str":
            return isinstance(value, str)
    raise TypeError(f"a config field has the unsupported type {kind!r}")


def load_entry_point(group: str, name: str) -> Any:
    """Return what an installed package gives under a name in a group of entry points; None without such a name."""
    from importlib.metadata import entry_points

    for entry in entry_points(group=group, name=name):
        try:
            return entry.load()
        except Exception as error:
            raise UsageError(
                f"the entry point {name} = {entry.value} in the group {group} cannot be loaded: "
                f"{type(error).__name__}: {error}",
                hint="Fix or remove that package.",
            ) from error
    return None


def _listed(choices: tuple[Any, ...]) -> str:
    """Return the choices as text; None is written as it is in flags and files."""
    return ", ".join(
        "none" if choice is None else str(choice).lower() if isinstance(choice, bool) else repr(choice)
        for choice in choices
    )


def as_text(given: Mapping[str, Any], prefix: str = "") -> str:
    """Return a table as text; a table in it becomes names with a dot, {"resources": {"GPU": 1}} resources.GPU=1.

    ValueError for a value with a comma.
    """
    parts = []
    for name, value in given.items():
        if isinstance(value, Mapping):
            parts.append(as_text(value, f"{prefix}{name}."))
        elif value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if "," in text:
                raise ValueError(f"{prefix}{name} = {value!r}: {_NO_COMMA}.")
            parts.append(f"{prefix}{name}={text}")
    return ",".join(filter(None, parts))


def split_options(text: str | None) -> dict[str, str]:
    """Return the values by name, those of names with a dot together: {"resources": "GPU=0.5,big=1"}.

    ValueError for a part that is not name=value, and for a name that is given twice.
    """
    found: dict[str, str] = {}
    names: set[str] = set()
    for part in filter(None, (piece.strip() for piece in (text or "").split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"{part!r} is not name=value, as in 'adasum=true,timeline=a.json'; {_NO_COMMA}.")
        if name.strip() in names:
            raise ValueError(f"{name.strip()} is given twice: leave one of them out.")
        names.add(name.strip())
        group, dot, inner = name.strip().partition(".")
        own = f"{inner}={value.strip()}" if dot else value.strip()
        found[group] = f"{found[group]},{own}" if dot and group in found else own
    return found


def join_options(text: str, later: str) -> str:
    """Return the options of both, of those with the same name the later."""
    pairs = {part.partition("=")[0].strip(): part.strip() for part in f"{text},{later}".split(",") if part.strip()}
    return ",".join(pairs.values())


def without_options(kind: type[Any], text: str) -> str:
    """Return the options that are not those of one engine."""
    own = kind.__dataclass_fields__
    return ",".join(part for part in text.split(",") if part.partition("=")[0].partition(".")[0].strip() not in own)


def read_options(kind: type[Options], text: str | None) -> Options:
    """Return the options of one engine, checked before; those of others are left out."""
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
    given = split_options(text)
    return kind(**{name: parse_text(field, given[name]) for name, field in fields.items() if name in given})
