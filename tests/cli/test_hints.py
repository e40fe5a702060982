"""What messages ask the user to write exists: each `--flag` is a verb's, each `name=value` a setting or an argument."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
from collections.abc import Iterator

from package_tree import modules, parsed

import phalanx
from phalanx.cli import VERBS
from phalanx.cli.completion import actions_of, parser_of
from phalanx.config.aliases import NAMES

OF_OTHERS = {
    *("--cap-add", "--target"),  # docker
    *("--network-interfaces", "--gloo", "--mpi"),  # horovodrun
    *("--head", "--dashboard-host", "--bare"),  # ray start, uv init
}
NAMES_OF_OTHERS = {
    *("lr", "sparse", "reduction", "create_graph"),  # torch
    *("train_batch_size", "rope_type", "architectures", "bias"),  # a JSON of DeepSpeed, transformers and peft
    "seq_len",  # models
    *("ranks", "slots", "pool", "partition", "big_memory", "uniform"),  # inside of a value or a line of a file
}
OWN_ARGUMENTS = ("bench", "data", "models", "pack", "plan", "tune")
"""Parts of the package with functions for users, whose messages name the arguments of these functions."""

FLAG = re.compile(r"(?<![\w.-])--[a-z][a-z0-9-]*[a-z0-9]")
NAMED = re.compile(r"(?<![\w.\-\[{\"'])([a-z][a-z0-9_]*) ?= ?(?=['\"\d\[({}]|True|False|None|\.\.\.|[a-z])")


def texts() -> Iterator[tuple[str, str]]:
    """Every text that the package shows as a hint or in an error, with its place; `{}` for what is filled in."""
    for name in modules():
        for node in ast.walk(parsed(name)):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            shown = [word.value for word in node.keywords if word.arg == "hint"]
            if called.endswith("Error") or called in ("mistake", "MemoryChange"):
                shown += node.args
            yield from ((f"{name}:{part.lineno}", text) for part in shown for text in strings(part))


def strings(node: ast.AST) -> Iterator[str]:
    """The strings of an expression; parts that follow each other are one."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from strings(child)


def flags() -> set[str]:
    """The flags of all verbs."""
    found: set[str] = set()
    for verb in VERBS:
        actions = actions_of(verb)
        made = [make() for make in actions.values()] if actions else [parser_of(verb)]
        found |= {option for parser in made if parser is not None for option in options(parser)}
    return found


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def part_arguments(name: str) -> set[str]:
    """The arguments of functions and the fields of classes in the part of the package that a module belongs to."""
    part = ".".join(name.split(".")[: 3 if name.startswith(("phalanx.tools.", "phalanx.zoo.")) else 2])
    nodes = [node for other in modules() if other.startswith(part) for node in ast.walk(parsed(other))]
    names = {node.arg for node in nodes if isinstance(node, ast.arg)}
    names |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return names if part.split(".")[-1] in OWN_ARGUMENTS else set()


def arguments() -> set[str]:
    """The settings, and the arguments of all that the package exports."""
    found = {*NAMES, *NAMES_OF_OTHERS}
    for name in phalanx.__all__:
        kind = getattr(phalanx, name)
        bases = [base for base in getattr(kind, "__mro__", ()) if base.__module__.startswith("phalanx.")]
        for function in [kind, *(method for base in bases for method in vars(base).values())]:
            if callable(function):
                try:
                    found |= inspect.signature(function).parameters.keys()
                except ValueError:
                    continue
    return found


def test_flags_in_messages_are_flags_of_a_verb():
    known, found = flags() | OF_OTHERS, list(texts())
    assert len(found) > 500, "the messages of the package"
    wrong = [f"{at}: {flag} in {text!r}" for at, text in found for flag in FLAG.findall(text) if flag not in known]
    assert not wrong, "\n".join(wrong)


def test_names_with_values_in_messages_are_settings_or_arguments():
    known, of_part = arguments(), functools.cache(part_arguments)
    named = ((at, name, text) for at, text in texts() for name in NAMED.findall(text) if name not in known)
    wrong = [f"{at}: {name} in {text!r}" for at, name, text in named if name not in of_part(at.partition(":")[0])]
    assert not wrong, "\n".join(wrong)
