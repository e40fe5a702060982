"""Completion of commands, flags, values, recipes, runs and jobs in a shell, by argcomplete. No torch.

A shell asks after `eval "$(register-python-argcomplete phalanx)"`: it runs `phalanx` with the line typed so far.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.cli.parsers import CKPT_ACTIONS, PARSERS, ckpt_parser
from phalanx.cli.verbs import VERBS
from phalanx.config.aliases import NAMES
from phalanx.recipes import TABLES, Recipe, load_recipe, recipe_names


def complete() -> None:
    """Answer a shell that asks, and end the process."""
    import argcomplete

    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    argcomplete.autocomplete(parser_for(line.split()[1:]), always_complete_options=False)


def parser_for(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the whole command line; only the verb that was typed has its flags."""
    root = argparse.ArgumentParser(prog="phalanx", add_help=False)
    verbs = root.add_subparsers()
    typed = words[0] if words else ""
    for verb, text in VERBS.items():
        if verb != typed:
            verbs.add_parser(verb, help=text, add_help=False)
            continue
        actions = actions_of(verb)
        if not actions:
            _add(verbs, verb, parser_of(verb))
            continue
        inner = verbs.add_parser(verb, help=text, add_help=False).add_subparsers()
        for name, make in actions.items():
            _add(inner, name, make() if name in words[1:] else None)
    return root


def _add(parsers: Any, name: str, own_parser: argparse.ArgumentParser | None) -> None:
    """Add a command with the flags of its own parser, each with what completes its value."""
    parents = [] if own_parser is None else [own_parser]
    added = parsers.add_parser(name, add_help=False, parents=parents, conflict_handler="resolve")
    for action in added._actions:
        if action.nargs == "?" and action.option_strings:
            action.nargs = None  # what follows such a flag is its value, not a recipe
        if action.choices is None:
            action.completer = _completer(action)


def actions_of(verb: str) -> dict[str, Callable[[], argparse.ArgumentParser | None]]:
    """Return the words that follow a verb, each with its parser; empty for a verb that takes none."""
    if verb == "ckpt":
        return {name: partial(ckpt_parser, name) for name in CKPT_ACTIONS}
    if verb == "submit":
        from phalanx.tools.submit.target import TARGETS

        return {name: partial(_submit_parser, name) for name in TARGETS}
    module: Any = import_module(f"phalanx.cli.{verb}")
    if verb in ("runs", "jobs", "bench", "data", "learn"):
        return {name: partial(module.parser, name) for name in (module.SUBJECTS if verb == "bench" else module.ACTIONS)}
    return {"show": partial(parser_of, verb)} if verb == "config" else {}


def _submit_parser(target: str) -> argparse.ArgumentParser:
    """Return a parser with the flags of a target and those of train."""
    from phalanx.cli.submit import submit_parser
    from phalanx.tools.submit.target import target_class

    parser = submit_parser(target, target_class(target).options_class)
    parser._actions += PARSERS["train"]()._actions
    return parser


def parser_of(verb: str) -> argparse.ArgumentParser | None:
    """Return the parser of a verb, where it has one."""
    make = PARSERS.get(verb) or getattr(import_module(f"phalanx.cli.{verb}"), "parser", None)
    return None if make is None else make()


def _completer(action: argparse.Action) -> Callable[..., list[str]] | None:
    """Return what completes an argument: that of its name, or the choices in its metavar; None: files."""
    if action.dest in _BY_NAME:
        return lambda **keywords: _BY_NAME[action.dest](keywords["parsed_args"])
    words = re.split(r"[|,]", str(action.metavar or "").strip("{}"))
    is_choice = len(words) > 1 and all(word.islower() or word.isdigit() for word in words)
    return (lambda **keywords: words) if is_choice else None


def run_names(parsed: Any) -> list[str]:
    """Return the folders in ./runs, the newest first."""
    folder = Path("runs")
    folders = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return [path.name for path in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)]


def _job_names(parsed: Any) -> list[str]:
    from phalanx.tools.submit.job import records

    return [record.name for record in records()]


def _presets(parsed: Any) -> list[str]:
    """Return the presets of the recipe that was named, or of all recipes."""
    named = [name for name in recipe_names() if name == getattr(parsed, "recipe", None)] or recipe_names()
    return list(dict.fromkeys(preset for name in named for preset in load_recipe(name).presets))


def _changes(parsed: Any) -> list[str]:
    """Return the values of the named recipe's tables, as --set takes them, and the settings."""
    named = [load_recipe(name) for name in recipe_names() if name == getattr(parsed, "recipe", None)]
    tables = {f"{table}.{key}=": None for recipe in named for table in TABLES for key in _keys(recipe, table)}
    return [*tables, *(f"{name}=" for name in NAMES)]


def _keys(recipe: Recipe, table: str) -> list[str]:
    values = getattr(recipe, table)
    return [key for key in values if key != "name"] if isinstance(values, dict) and "settings" not in table else []


def _planned(kind: str) -> Callable[[Any], list[str]]:
    def names(parsed: Any) -> list[str]:
        from phalanx.tools.plan.presets import names as preset_names

        return preset_names(kind)

    return names


_BY_NAME: dict[str, Callable[[Any], list[str]]] = {
    "recipe": lambda parsed: recipe_names(),
    "subject": lambda parsed: recipe_names(),
    "preset": _presets,
    "changes": _changes,
    "run": run_names,
    "runs": run_names,
    "job": _job_names,
    "calibrate_from": run_names,
    "plan_model": _planned("models"),
    "gpu": _planned("gpus"),
    "instance": _planned("instances"),
    "intra_node": _planned("links"),
    "inter_node": _planned("links"),
}
"""What completes an argument, by its `dest`."""
