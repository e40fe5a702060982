"""Names of the form `package.module:attribute`: check them without running the module, and load them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from phalanx.errors import UsageError, unknown_name

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_import_path(text: str) -> bool:
    """Whether a text has the form `package.module:attribute`."""
    return _IMPORT_PATH.fullmatch(text) is not None


def extend_path(folders: Iterable[str]) -> None:
    """Put folders with modules of the user first on the import path of this process."""
    for folder in reversed(list(folders)):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def check_import(text: str, part: str) -> None:
    """Raise where the module does not exist or does not define the name.

    Only the parent packages are imported: the module itself may import torch for seconds, so its source is read.
    """
    module, _, attribute = text.partition(":")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and module.startswith(error.name):
            raise _no_module(text, part, error.name) from None
        raise _failed(text, part, error) from error
    if spec is None:
        raise _no_module(text, part, module)
    names = _defined_names(spec.origin)
    if names is not None and attribute.split(".")[0] not in names:
        load_import(text, part)  # the module may define it in another way


def _no_module(text: str, part: str, module: str) -> UsageError:
    return UsageError(
        f"{part} = '{text}': there is no module '{module}'",
        hint="Modules are found next to the recipe's file, in the current folder and in installed packages.",
    )


def _failed(text: str, part: str, error: BaseException) -> UsageError:
    return UsageError(f"{part} = '{text}' cannot be imported: {type(error).__name__}: {error}")


def _defined_names(origin: str | None) -> set[str] | None:
    """Return the names that a source file defines at its top level; None where that cannot be seen."""
    if origin is None or not origin.endswith(".py"):
        return None

    with open(origin, "rb") as file:
        source = file.read()
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return set()  # the import reports it
    names: set[str] = set()
    for statement in statements:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
            names.add(statement.name)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def load_import(text: str, part: str) -> Any:
    """Import `package.module:attribute` and return the attribute."""
    module, _, attribute = text.partition(":")
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            raise _no_module(text, part, error.name) from None
        raise _failed(text, part, error) from error
    except Exception as error:  # a module of the user may fail in any way
        raise _failed(text, part, error) from error
    for name in attribute.split("."):
        if not hasattr(value, name):
            names = [name_in_module for name_in_module in vars(value) if not name_in_module.startswith("_")]
            raise UsageError(f"{part} = '{text}': {unknown_name(f'name in {module}', name, names)}")
        value = getattr(value, name)
    return value


def import_path_of(value: Any, part: str) -> str:
    """Return the import path of a function or class, so that ranks can find it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not callable(value) or module is None or "<" in name or module == "__main__":
        raise UsageError(
            f"{part} is {value!r}: ranks cannot import it",
            hint="Give a function or class that a module defines at its top level, or its path 'package.module:name'.",
        )
    return f"{module}:{name}"


def unknown_option(owner: str, option: str, allowed: Sequence[str]) -> UsageError:
    """Return the error about an unknown option, with the name that was meant."""
    from phalanx.config.names import like_option  # ranks, whose recipes are correct, need no guesses

    return UsageError(unknown_name("option", option, allowed, of=owner, close=like_option(option, allowed)))


def check_number(owner: str, option: str, value: Any, kind: Any) -> None:
    """Refuse a text for an option whose annotation, a type or its name, is that of a number."""
    expected = {"int": "a whole number", "float": "a number"}.get(str(getattr(kind, "__name__", kind)))
    if expected and isinstance(value, str):
        raise UsageError(f"{owner}: {option} = {value!r}: expected {expected}")


def call_with(make: Callable[..., Any], options: Mapping[str, Any], owner: str, **fixed: Any) -> Any:
    """Call a function with options by keyword; unknown and missing ones are reported with the nearest name.

    `fixed`: arguments that are not options of the user.
    """
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # a function in C has no signature
        return make(**fixed, **options)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [name for name, parameter in parameters.items() if parameter.kind in by_name and name not in fixed]
    for option in options:
        if option not in named and not takes_any:
            if not named:
                raise UsageError(f"{owner} takes no options; got '{option}'")
            raise unknown_option(owner, option, named)
        check_number(owner, option, options[option], getattr(parameters.get(option), "annotation", None))
    missing = [name for name in named if parameters[name].default is inspect.Parameter.empty and name not in options]
    if missing:
        raise UsageError(f"{owner} needs the option{'s' * (len(missing) > 1)} {', '.join(missing)}")
    return make(**fixed, **options)
