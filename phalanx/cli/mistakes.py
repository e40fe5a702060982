"""Error messages for unknown or missing words of a command line. No torch.

An option of a recipe's model given as a flag is the one exception: the model's module says whether it has it.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence

from phalanx.config.names import is_known_elsewhere, like_flag, like_option, like_verb
from phalanx.errors import PhalanxError, nearest, unknown_name
from phalanx.recipes import TABLES, find_recipe, recipe_names

_EXAMPLES = {
    "RUN": ("last", "digits"),
    "PATH": ("last", "last@best"),
    "DIR": ("kept",),
    "FOLDER": ("photos",),
    "INPUT": ("texts",),
    "SET": ("shapes",),
    "TAG": ("baseline",),
    "TEXT": ("'a larger batch'",),
    "JOB": ("last",),
    "PHASE": ("phase1",),
    "EXERCISE": ("average-gradients",),
    "N": ("4",),
}
"""Values of required arguments, by their metavars: of the first such argument, and of the second."""

PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {}
"""The parsers of the verbs with many flags, which `parsers.py` adds: it is above this file."""


def unknown_verb(word: str, rest: Sequence[str], verbs: Iterable[str]) -> str:
    """Return the message for a command that does not exist."""
    if (meant := like_verb(word)) is None:
        return unknown_name("command", word, verbs)
    argument = rest[0] if rest and not rest[0].startswith("-") else ""
    ours, _, metavar = meant.rpartition(" ")
    fits = argument.endswith(".py") == (metavar == "FILE")
    return (
        f"unknown command '{word}'. Write: phalanx {f'{ours} {shlex.quote(argument)}' if argument and fits else meant}"
    )


_PLAIN = {
    r"expected (?:one|at least one) argument": "{flag} needs a value: {flag} {metavar}",
    r"invalid int value: '(.*)'": "{flag} {value}: expected a whole number",
    r"invalid float value: '(.*)'": "{flag} {value}: expected a number",
    r"not allowed with argument (.*)": "{flag} and {value} exclude each other",
}
"""Messages of argparse about one argument, and ours."""


def explained(parser: argparse.ArgumentParser, message: str) -> tuple[str, str]:
    """Return a message of argparse in our words, and a whole command as an example where arguments are missing."""
    if names := message.partition("the following arguments are required: ")[2]:
        return _missing_arguments(parser, names)
    argument, _, problem = message.removeprefix("argument ").partition(": ")
    flag = next((name for name in argument.split("/") if name.startswith("--")), argument)
    action = parser._option_string_actions.get(flag)
    for pattern, ours in _PLAIN.items():
        if match := re.fullmatch(pattern, problem):
            metavar = str(action.metavar if action is not None and action.metavar else "VALUE")
            value = match[1] if match.groups() else ""
            example = f"Write: {parser.prog} {value} ... {flag}" if value in recipe_names() else ""
            return ours.format(flag=flag, value=value, metavar=metavar), example
    return message, ""


def _missing_arguments(parser: argparse.ArgumentParser, names: str) -> tuple[str, str]:
    words, counts = [parser.prog], dict.fromkeys(_EXAMPLES, 0)
    for action in parser._actions:
        if not action.required or action.nargs == "*":
            continue
        values = _EXAMPLES.get(metavar := str(action.metavar), (metavar,))
        first = counts.get(metavar, 0)
        counts[metavar] = first + 1
        words += [*action.option_strings[:1], *values[first : first + (action.nargs if action.nargs == 2 else 1)]]
    return f"{parser.prog.removeprefix('phalanx ')} needs {names}", f"For example: {' '.join(words)}"


def unknown_words(
    parser: argparse.ArgumentParser, words: Sequence[str], namespace: argparse.Namespace | None = None
) -> list[str]:
    """Return what is wrong with each word that no flag takes; `namespace`: what the other words mean."""
    # By the name without dashes, which all flags have in common.
    flags = {flag.lstrip("-"): flag for action in parser._actions for flag in action.option_strings}
    mistakes = []
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        name, _, value = word.partition("=")
        argument = value or ("" if after.startswith("-") else after)
        if word.startswith("-"):
            mistakes.append(f"unknown flag '{name}'. {_meant_flag(name, argument, flags, namespace)}".rstrip())
        elif not before.startswith("--") or "=" in before:  # else the value of an unknown flag
            advice = " A script's own arguments go after --." if "script" in flags else ""
            mistakes.append(f"unexpected argument '{word}'.{advice}")
    return mistakes


def _meant_flag(name: str, argument: str, flags: Mapping[str, str], namespace: argparse.Namespace | None) -> str:
    """Return what to write instead of an unknown flag; empty where that is not known."""
    plain = name.lstrip("-")
    if option := _recipe_option(plain.replace("-", "_"), getattr(namespace, "recipe", None), flags):
        change = f"--set {option}={shlex.quote(argument or '...')}"
        if "set" in flags:
            return f"Write: {change}"
        return f"A run keeps its model; a new one takes it: phalanx train RECIPE {change}"
    close = like_flag(plain, flags)
    if close is None:
        return f"{other} has it." if (other := _verb_with(name)) else ""
    return f"Did you mean {close}?"


def _recipe_option(name: str, recipe: str | None, flags: Iterable[str]) -> str:
    """Return the value of a recipe that a flag means, such as model.dropout; empty where it means none."""
    table, dot, _ = name.partition(".")
    if dot:
        return name if table in TABLES else ""
    is_misspelt = nearest(name.replace("_", "-"), flags, 0.8) is not None
    if recipe is None or is_misspelt or is_known_elsewhere(name):
        return ""
    from phalanx.zoo.models.registry import build_options  # it imports torch for most models

    try:
        named = find_recipe(recipe)
        close = None if named is None else like_option(name, build_options(str(named.model["name"])), 0.75)
        return f"model.{close}" if close else ""
    except PhalanxError:  # of the recipe, which is reported where it is used
        return ""


def _verb_with(flag: str) -> str:
    """Return the command that has a flag which another one lacks, or an empty text."""
    verbs = (verb for verb, make in PARSERS.items() if any(flag in action.option_strings for action in make()._actions))
    return f"phalanx {verb}" if (verb := next(verbs, "")) else ""
