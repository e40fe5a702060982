"""Flags made from the config's fields, with the same help text, default and check as every other source; and the help.

The help of a verb has the settings used most, one group of settings, or all.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from phalanx.cli.json_output import check_outputs
from phalanx.cli.mistakes import explained, unknown_words
from phalanx.config import FIELDS, GROUPS, ResolvedConfig, parse_text, resolve
from phalanx.config.aliases import NAMES, Aliases
from phalanx.config.option import kinds
from phalanx.config.settings import add_engine, title_of
from phalanx.engine import find_engine
from phalanx.errors import UsageError, unknown_name
from phalanx.host.gpus import count_gpus
from phalanx.launch import ModuleTarget, ScriptTarget
from phalanx.recipes import Recipe, load_recipe, read_changes, recipe_names

if TYPE_CHECKING:
    from phalanx.launch import ModuleTarget, ScriptTarget

COMMON = (
    "num_workers", "num_nodes", "device", "strategy", "batch_size", "epochs", "max_steps", "learning_rate",
    "optimizer", "weight_decay", "lr_schedule", "warmup", "seed", "mixed_precision",
    "gradient_accumulation_steps", "gradient_clipping", "compile", "fast", "memory", "checkpoint_frequency",
    "resume_from_checkpoint", "run_dir", "tensorboard", "wandb",
)  # fmt: skip
"""The settings that the short help shows."""

ALSO_ACCEPTED = "also accepted"
"""The title of the aliases, which are shown with all settings only."""
SECTIONS: dict[str, Any] = {title_of(group).lower(): group for group in GROUPS}
"""The groups of settings: those of every run, and those of each engine."""
_NEGATIVE = re.compile(r"-\.?\d[\w.+-]*$")
_SEVERAL_WORDS = "profile"
"""A setting whose flag takes several words: --profile steps=10:15 ranks=0,3."""
BARE = "<bare flag>"
"""The value of a flag that was given without one."""
_SHORT = {"-q": ("quiet", "errors, what ranks print and the result"), "-v": ("verbose", "every event")}
"""Short flags, the value of `verbosity` that each stands for, and its output."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Columns, and `--[no-]compile` where a flag has a form that says no."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if len(action.option_strings) != 2 or not action.option_strings[1].startswith("--no-"):
            return super()._format_action_invocation(action)
        value = {"?": f" [{action.metavar}]", "*": f" [{action.metavar} ...]"}.get(str(action.nargs), "")
        return f"--[no-]{action.option_strings[0][2:]}{value}"


class ValueAction(argparse.Action):
    """Stores a setting's text; a flag that is given twice with different values is refused."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Store the value, "false" for the form with --no-."""
        value = self.const if values in ([], None) else " ".join(values) if isinstance(values, list) else values
        if option_string is not None and option_string.startswith("--no-"):
            if value != self.const:
                raise UsageError(f"{option_string} takes no value; got: {value}")
            value = "false"
        before = getattr(namespace, self.dest, value)
        if before != value:
            forms = ["without a value" if text == self.const else f"as {text}" for text in (before, value)]
            flag = self.option_strings[0]
            raise UsageError(f"{flag} is given twice, {forms[0]} and {forms[1]}", hint="Leave one of them out.")
        setattr(namespace, self.dest, value)


class HelpAction(argparse.Action):
    """`--help [GROUP]`: the short help, or one group of settings; `--help-all`: every setting, by group."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
        """Print, and end the program."""
        part = "all" if option_string == "--help-all" else values or ""
        print(parser.help_about(part, getattr(namespace, "recipe", None)), end="")
        raise SystemExit(0)


def format_parts(parser: argparse.ArgumentParser, part: str) -> str:
    """Return the help of a parser; `part` is empty, "all" or the name of a group."""
    formatter = parser._get_formatter()
    if part in SECTIONS:
        _add_section(formatter, part, (SECTIONS[part].__doc__ or "").rstrip("."), _actions_of(parser, part))
        return formatter.format_help()
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    has_settings = False
    for group in parser._action_groups:
        if part == "all" or group.title not in (*SECTIONS, ALSO_ACCEPTED):
            _add_section(formatter, group.title, group.description, group._group_actions)
        else:
            has_settings = True
    if has_settings:
        flags = {action.dest: action for action in parser._actions}
        _add_section(formatter, "settings used most", None, [flags[name] for name in COMMON])
        formatter.add_text(
            f"all {len(FIELDS)} settings: {parser.prog} --help-all\n"
            f"one group: {parser.prog} --help GROUP, where GROUP is one of\n  "
            + textwrap.fill(", ".join(SECTIONS), 106, subsequent_indent="  ")
        )
    formatter.add_text(parser.epilog)
    return formatter.format_help()


def _actions_of(parser: argparse.ArgumentParser, title: str) -> list[argparse.Action]:
    return next(group._group_actions for group in parser._action_groups if group.title == title)


def _add_section(formatter: Any, title: str | None, text: str | None, actions: list[argparse.Action]) -> None:
    formatter.start_section(title)
    formatter.add_text(text)
    formatter.add_arguments(actions)
    formatter.end_section()


class FlagParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError, and reports all unknown flags at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, add_help=False, **options)
        self._negative_number_matcher = _NEGATIVE  # that of argparse takes -5B and -1e-3 for flags
        self.takes_settings = False
        self.help_action = self.add_argument(
            "-h",
            "--help",
            action=HelpAction,
            nargs=0,
            metavar="GROUP",
            default=argparse.SUPPRESS,
            help="show this help",
        )

    def format_help(self, part: str = "") -> str:
        """Return the help: with the settings used most, with all of them ("all"), or one group."""
        return format_parts(self, part)

    def help_about(self, part: str, recipe: str | None) -> str:
        """Return the help that was asked for; `recipe`: the one that was named before."""
        if part not in ("", "all", *SECTIONS):
            raise UsageError(unknown_name("group of settings", part, SECTIONS), hint=f"See {self.prog} --help")
        return self.format_help(part)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        text, example = explained(self, message)
        raise UsageError(text, hint="\n  ".join([*([example] if example else []), f"See {self.prog} --help"]))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does; a flag that is not known yet may be of an engine from another package."""
        words = list(sys.argv[1:] if args is None else args)
        for flag, file in itertools.pairwise(words):
            if flag == "--json" and (file == "-" or file.endswith(".json")):  # as other programs have it
                raise UsageError("--json takes no file: it prints on standard output", hint="Write: --json > FILE")
        flags = {self._with_dashes(word).partition("=")[0] for word in words if word.startswith("--")}
        if self.takes_settings and not flags <= {"--", *self._option_string_actions}:
            _add_flags_of_engines(self)
        return super().parse_known_args(words, namespace)

    def _parse_optional(self, arg_string: str) -> Any:
        """Return the flag that a word is, if it is one (argparse asks this of each word)."""
        return super()._parse_optional(self._with_dashes(arg_string))

    def _with_dashes(self, word: str) -> str:
        """Return --max-steps for --max_steps, as settings are written in Python."""
        flag, equals, value = word.partition("=")
        meant = flag.replace("_", "-")
        return f"{meant}{equals}{value}" if meant in self._option_string_actions else word

    def parse_all(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse, and name every unknown flag with the nearest known one."""
        namespace, unknown = self.parse_known_args(list(arguments))
        self.check(namespace, unknown)
        return namespace

    def check(self, namespace: argparse.Namespace, unknown: Sequence[str]) -> None:
        """Refuse unknown words, and files that cannot be written."""
        if unknown:
            raise UsageError("\n  ".join(self.describe_unknown(unknown, namespace)), hint=f"See {self.prog} --help")
        check_outputs(self, namespace)

    def describe_unknown(self, words: Sequence[str], namespace: argparse.Namespace | None = None) -> list[str]:
        """Return what is wrong with each word that no flag takes; `namespace`: what the other words mean."""
        return unknown_words(self, words, namespace)


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name what runs: a recipe, a script or a module."""
    names = ", ".join(recipe_names())
    parser.add_argument("recipe", nargs="?", help=f"a recipe ({names}), a file ./mine.toml, or my_package.recipes:tiny")
    parser.add_argument("--model", metavar="MODEL", help="a model: gpt, my_package.nets:Net, or a Hugging Face folder")
    parser.add_argument(
        "--data", metavar="DATA", help="a file, a folder or a pattern of files; digits, my_package.data:load"
    )
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a value of the recipe: --set model.dropout=0.1 --set data.seq_len=256",
    )
    parser.add_argument("--preset", metavar="NAME", help="size of the recipe's model: debug, small, ...")
    parser.add_argument("--script", metavar="FILE", help="a Python script that runs under torchrun")
    parser.add_argument("-m", "--module", metavar="MODULE", help="a module, as in python -m MODULE")


def pop_action(words: list[str], verb: str, actions: Mapping[str, Any], form: str) -> str:
    """Take the action off the words after a verb; `form`: what follows `phalanx VERB` in a right command."""
    action = words.pop(0) if words and not words[0].startswith("-") else ""
    if action not in actions:
        problem = unknown_name("action", action, actions, of=f"phalanx {verb}") if action else f"{verb} needs an action"
        raise UsageError(problem, hint=f"Write: phalanx {verb} {form}, with one of {', '.join(actions)}")
    return action


def split_own(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the arguments of a verb from those of the script, which follow --."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def read_target(
    namespace: argparse.Namespace, script_arguments: Sequence[str], verb: str, hint: str
) -> Recipe | ScriptTarget | ModuleTarget:
    """Return what was named; `script_arguments`: the script's own arguments."""
    parts = [name for name in ("model", "data") if getattr(namespace, name)]
    named = [name for name in ("recipe", "script", "module") if getattr(namespace, name)]
    if len(named) > 1 or not (named or parts):
        problem = f"nothing to {verb} was named" if not named else f"{' and '.join(named)} were both given"
        # --tensorboard digits: a flag with an optional value takes the word after it.
        settings = [(name, str(value)) for name, value in vars(namespace).items() if name in NAMES]
        flag_of = {word: name for name, value in settings for word in (value, *value.split())}
        if recipe := next((word for word in recipe_names() if word in flag_of), None):
            flag = "--" + flag_of[recipe].replace("_", "-")
            hint = f"{recipe} is a value of {flag} here. Write: phalanx {verb} {recipe} ... {flag}"
        raise UsageError(problem, hint=hint)
    if namespace.recipe or parts:
        if script_arguments:
            raise UsageError(f"a recipe takes no arguments; got: {shlex.join(script_arguments)}")

        find_engine(vars(namespace).get("backend", "")).check_recipe(namespace.recipe or " and ".join(parts))
    if namespace.script or namespace.module:
        _refuse_for_scripts(namespace)

        script, module = namespace.script, namespace.module
        return (
            ScriptTarget(script, tuple(script_arguments)) if script else ModuleTarget(module, tuple(script_arguments))
        )
    return _named_recipe(namespace)


def _refuse_for_scripts(namespace: argparse.Namespace) -> None:
    """Refuse flags about a model and its data where a script builds them."""
    nested = read_changes(namespace.changes, NAMES.__contains__)[1]
    flags = [f"--{name}" for name in ("preset", "model", "data") if getattr(namespace, name)]
    flags += [f"--set {key}" for key in nested]
    if flags:
        raise UsageError(f"{flags[0]} is for recipes; a script builds its own model and data")


def _named_recipe(namespace: argparse.Namespace) -> Recipe:
    """Return the recipe of a command: the one named, or one of --model and --data; with the values of --set."""
    from phalanx.zoo.data import check_name as check_data
    from phalanx.zoo.data import named_data
    from phalanx.zoo.models.registry import check_name as check_model

    if namespace.recipe:
        recipe = load_recipe(namespace.recipe).with_preset(namespace.preset)
        data = None if namespace.data is None else named_data(namespace.data, recipe.data)
        recipe = recipe.with_parts(namespace.model, data)
    else:
        for part in ("model", "data"):
            if not getattr(namespace, part):
                raise UsageError(
                    f"--{'data' if part == 'model' else 'model'} was given, but no --{part}",
                    hint="Write: phalanx train --model my_package.nets:Net --data my_package.data:load",
                )
        name = re.sub(r"\W+", "-", Path(namespace.model).name.rpartition(":")[2]).lower()
        # Checkpoints, so that the result can be evaluated and exported.
        recipe = Recipe(name, "", {}, {}, {"checkpoint_frequency": 1})
        recipe = recipe.with_parts(namespace.model, named_data(namespace.data, {}))
        if namespace.preset is not None:
            recipe = replace(recipe, model={**recipe.model, "preset": namespace.preset})
    recipe = recipe.with_values(read_changes(namespace.changes, NAMES.__contains__)[1]).fitted()
    if "pretrained" in recipe.model or {"tokenizer", "root"} & set(recipe.data):
        from phalanx.run.stored import with_located_sources  # few commands need it

        recipe = with_located_sources(recipe)
    recipe.check()
    check_model(str(recipe.model["name"]))
    check_data(str(recipe.data["name"]))
    return recipe


def add_config_flags(parser: FlagParser) -> None:
    """Add a flag for every field of the config, in its groups, and the help of one group or all."""
    parser.takes_settings = True
    parser.help_action.nargs, parser.help_action.help = "?", "show this help, or one group of settings"
    parser.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        help="a TOML or YAML file with settings; flags override it, and later files override earlier ones",
    )
    parser.add_argument(
        "--help-all", action=HelpAction, nargs=0, default=argparse.SUPPRESS, help="show every setting, by group"
    )
    for short, (word, content) in _SHORT.items():
        text = f"show {content} (--verbosity {word})"
        add = parser.add_argument
        flags = (short, f"--{word}")
        add(*flags, dest="verbosity", action="store_const", const=word, default=argparse.SUPPRESS, help=text)
    for title, group in (*SECTIONS.items(), (ALSO_ACCEPTED, Aliases)):
        section = parser.add_argument_group(title, (group.__doc__ or "").rstrip("."))
        for name in group.__dataclass_fields__:
            _add_flag(section, name)


def _add_flags_of_engines(parser: FlagParser) -> None:
    """Add the settings of engines of other packages."""
    from importlib.metadata import entry_points  # 30 ms, which few commands need

    names: list[str] = []
    for name in entry_points(group="phalanx.engines").names:
        with suppress(UsageError):  # a broken one is reported where it is chosen
            group = add_engine(name)
            names += group.__dataclass_fields__ if group is not None else ()
    new = [name for name in names if f"--{name.replace('_', '-')}" not in parser._option_string_actions]
    section = parser.add_argument_group("engines of other packages")
    for name in new:
        _add_flag(section, name)


def _add_flag(section: argparse._ArgumentGroup, name: str) -> None:
    field = NAMES[name]
    flag = "--" + name.replace("_", "-")
    members = kinds(field)
    default = "" if field.default is None or members == ("bool",) else f" [{field.default}]"
    text = f"{field.metadata['help']}{default}".replace("%", "%%")
    flags = [flag, f"--no-{flag[2:]}"] if "bool" in members else [flag]
    nargs = None if "bool" not in members else "?" if {"str", "int"} & {*members} else 0
    nargs = "*" if name == _SEVERAL_WORDS else nargs
    options: dict[str, Any] = {"nargs": nargs, "const": BARE, "metavar": _metavar(field), "help": text}
    section.add_argument(*flags, dest=name, default=argparse.SUPPRESS, action=ValueAction, **options)


def _metavar(field: dataclasses.Field[Any]) -> str:
    choices = field.metadata["choices"]
    if choices is not None:
        names = [str(choice) for choice in choices if choice is not None and not isinstance(choice, bool)]
        return f"{{{','.join(names)}}}"
    words = {"int": "N", "float": "X", "str": "TEXT"}
    return "|".join(words[kind] for kind in kinds(field) if kind in words)


def resolve_flags(
    namespace: argparse.Namespace, recipe: Recipe | None, extra: Mapping[str, Any] | None = None
) -> ResolvedConfig:
    """Return the settings of a command: flags over the environment over --config over the recipe's own.

    `extra`: settings that follow from other flags.
    """
    changes = read_changes(getattr(namespace, "changes", []), NAMES.__contains__)[0]
    return resolve(
        {**changes, **(extra or {}), **given_flags(namespace)},
        given_as="flag",
        file=namespace.config,
        **(recipe.settings_for(count_gpus()) if recipe else {}),
    )


def given_flags(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that flags set, with their values."""
    texts = {name: value for name, value in vars(namespace).items() if name in NAMES}
    return {name: True if text == BARE else parse_text(NAMES[name], text) for name, text in texts.items()}
