"""`option` declares a setting with its help text and limits; `problem` checks a value against them.

The text of an annotation (`int | None`, `bool | str`) is the field's type for Python arguments, TOML keys,
environment variables and flags alike.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack

from phalanx.errors import UsageError

Options = TypeVar("Options")
P = ParamSpec("P")
R = TypeVar("R")

_URL = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*://")
_NO_URLS = (
    "files are written to folders of this machine or of a mounted file system, not to a URL. Give a path, and copy "
    "from there (or mount the bucket)."
)
_FREQUENCY = re.compile(r"^\s*(\d+)\s*(epochs?|steps?)?\s*$")
_SHARE = re.compile(r"^\s*(\d*\.\d+|\d+(?=\s*%))\s*(%)?\s*$")
_TRUE = {"true", "yes", "on"}
_FALSE = {"false", "no", "off"}
_WORDS = {"Mapping": "a table", "bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}


class Limits(TypedDict, total=False):
    """What `option` allows of a value."""

    choices: tuple[Any, ...] | None
    minimum: float | None
    above: float | None
    maximum: float | None
    below: float | None


def option(
    default: Any,
    help: str,
    *,
    entry_points: str | None = None,
    scope: str = "",
    backends: tuple[str, ...] = (),
    strategies: tuple[str, ...] = (),
    needs: str = "",
    expects: str = "",
    used_by: str = "ranks",
    in_loop: str = "",
    **limits: Unpack[Limits],
) -> Any:
    """Declare a field: its default, its one help text, what it allows, and for a setting where it is used.

    `entry_points`: a group of installed packages' entry points whose names are choices too. `scope`: any of "layout"
    (chooses how ranks share a model), "split" (has no meaning for one process), "machine" (may differ between the
    nodes of a run), "place" (a name or a path). `backends`, `strategies`: the only ones that use it; empty: all.
    `needs`: the setting without which it has no effect. `expects`: what to write, where a text has its own form.

    `used_by`: any of "command" (`phalanx train` or the launcher, for scripts too), "recovery" (the launcher, for ranks
    of a trainer alone), "ranks" (what `Formation` prepares, so loops of the user's too), "trainer" (its loop alone) and
    "value" (a number that the user's code may read from a config). `ways` derives from it where a setting counts.
    `in_loop`: what to write in a loop of the user's instead.
    """
    allowed = {**dict.fromkeys(Limits.__annotations__), **limits, "entry_points": entry_points}
    users = {"scope": scope.split(), "backends": backends, "strategies": strategies, "needs": needs}
    users |= {"expects": expects, "used_by": used_by.split(), "in_loop": in_loop}
    return dataclasses.field(default=default, metadata={"help": help, **allowed, **users})


def limited(**limits: Limits) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare what a function's arguments may be, as `option` does of a setting; a wrong one raises UsageError."""

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        fields = {name: option(signature.parameters[name].default, "", **allowed) for name, allowed in limits.items()}
        for name, field in fields.items():
            field.name, field.type = name, signature.parameters[name].annotation

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            arguments = signature.bind_partial(*args, **kwargs).arguments
            wrong = [problem(fields[name], plain(value)) for name, value in arguments.items() if name in fields]
            if problems := [text.rstrip(".") for text in wrong if text]:
                raise UsageError("\n  ".join(problems))
            return function(*args, **kwargs)

        return checked

    return declare


def kinds(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return the member types of a field's annotation, such as ("int", "None")."""
    text = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    return tuple(part.strip() for part in text.split("|"))


def takes_table(field: dataclasses.Field[Any]) -> bool:
    """Whether a value may be a table: a dict in Python, `{GPU = 0.5}` in a file."""
    return any(kind.startswith("Mapping[") for kind in kinds(field))


def options_of(kind: type[Options], config: object) -> Options:
    """Return the settings of one class of fields, such as an engine's, with their types."""
    view = object.__new__(kind)
    view.__dict__.update({name: getattr(config, name) for name in kind.__dataclass_fields__})  # type: ignore[attr-defined]
    return view


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


def parse_frequency(value: float | str, expects: str, *, shares: bool = False) -> tuple[int, str]:
    """Read a number of epochs or '500 steps'; with `shares` also 0.25 or '25%' of an epoch, as (4, "times").

    ValueError says what to write.
    """
    if shares and isinstance(value, str) and (share := _SHARE.match(value)):
        value = float(share[1]) / (100 if share[2] else 1)
    if shares and isinstance(value, float) and 0 < value <= 1:
        return round(1 / value), "times"
    match = _FREQUENCY.match(str(value))
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
    if wrong := [
        " ".join(parts) for parts in words if len(parts) > 2 or (parts[1:] and not parts[1].startswith("slots="))
    ]:
        raise ValueError(f"{path}: {wrong[0]!r} is not a host and its slots: write node1 slots=8.")
    if not any(words):
        raise ValueError(f"{path} names no host: write a line for each, node1 slots=8.")
    return [":".join([parts[0], *(word.removeprefix("slots=") for word in parts[1:])]) for parts in words if parts]


def problem(field: dataclasses.Field[Any], value: Any) -> str | None:
    """Return what is wrong with `value` for this field, or None."""
    choices, minimum, above = (field.metadata[key] for key in ("choices", "minimum", "above"))
    if not any(_is_a(value, kind) for kind in kinds(field)):
        words = [
            *(["a table"] if takes_table(field) else []),
            *(_WORDS[kind] for kind in kinds(field) if kind in _WORDS),
        ]
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
        if (maximum := field.metadata["maximum"]) is not None and value > maximum:
            return f"{field.name} = {value!r}: must be {maximum} or less."
        if (below := field.metadata["below"]) is not None and value >= below:
            return f"{field.name} = {value!r}: must be below {below}."
    return None


def problems_of(values: Any) -> list[str]:
    """Return what is wrong with the values of a data class whose fields are declared by `option`."""
    declared = [field for field in dataclasses.fields(values) if "choices" in field.metadata]
    problems = (problem(field, plain(getattr(values, field.name))) for field in declared)
    return [text.rstrip(".") for text in problems if text]


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


def local_path(path: str | Path) -> Path:
    """Return the path that a user gave; raise for a URL."""
    wrong = url_problem("path", path)
    if wrong is not None:
        raise UsageError(wrong)
    return Path(path)


def check_folder(argument: str, path: Path) -> None:
    """Refuse to write a file in a folder that does not exist; `argument`: the call or flag that names it."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{argument}: there is no folder {path.parent}", hint=f"Make it: mkdir -p {path.parent}")


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
        case _ if kind.startswith("Mapping["):
            return isinstance(value, Mapping)
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
