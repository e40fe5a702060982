"""The help of a verb: the settings used most, one group of settings, or all; and the flag of one setting."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any, NoReturn

from phalanx.config import FIELDS, GROUPS
from phalanx.config.engine_options import CommonOptions
from phalanx.errors import UsageError, unknown_name

COMMON = (
    "num_workers", "num_nodes", "device", "strategy", "batch_size", "epochs", "max_steps", "learning_rate",
    "optimizer", "weight_decay", "lr_schedule", "warmup", "seed", "data_dir", "mixed_precision",
    "gradient_accumulation_steps", "gradient_clipping", "compile", "checkpoint_frequency", "resume_from_checkpoint",
    "keep_best", "early_stopping", "run_dir", "tensorboard", "wandb",
)  # fmt: skip
"""The settings that the short help shows."""

ALSO_ACCEPTED = "also accepted"
"""The title of the aliases, which are shown with all settings only."""
SECTIONS: dict[str, Any] = {**{group.__name__.lower(): group for group in GROUPS}, "advanced": CommonOptions}
"""The groups of settings, and the options of every engine."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Columns, and `--[no-]compile` where a flag has a form that says no."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if len(action.option_strings) != 2 or not action.option_strings[1].startswith("--no-"):
            return super()._format_action_invocation(action)
        value = f" [{action.metavar}]" if action.nargs == "?" else ""
        return f"--[no-]{action.option_strings[0][2:]}{value}"


class ValueAction(argparse.Action):
    """Stores a setting's text; a flag that is given twice with different values is refused."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Store the value, "false" for the form with --no-."""
        value = self.const if values in ([], None) else values
        if option_string is not None and option_string.startswith("--no-"):
            if value != self.const:
                raise UsageError(f"{option_string} takes no value; got: {value}")
            value = "false"
        before = getattr(namespace, self.dest, value)
        if before != value:
            shown = ["without a value" if text == self.const else f"as {text}" for text in (before, value)]
            flag = self.option_strings[0]
            raise UsageError(f"{flag} is given twice, {shown[0]} and {shown[1]}", hint="Leave one of them out.")
        setattr(namespace, self.dest, value)


class HelpAction(argparse.Action):
    """`--help [GROUP]`: the short help, or one group of settings; `--help-all`: every setting, by group."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
        """Print, and end the program."""
        if values and values not in (*SECTIONS, "all"):
            raise UsageError(unknown_name("group of settings", values, SECTIONS), hint=f"See {parser.prog} --help")
        print(parser.format_help("all" if option_string == "--help-all" else values or ""), end="")
        raise SystemExit(0)


def format_parts(parser: argparse.ArgumentParser, shown: str) -> str:
    """Return the help of a parser; `shown` is empty, "all" or the name of a group."""
    formatter = parser._get_formatter()
    if shown in SECTIONS:
        _add_section(formatter, shown, (SECTIONS[shown].__doc__ or "").rstrip("."), _actions_of(parser, shown))
        return formatter.format_help()
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    has_settings = False
    for group in parser._action_groups:
        if shown == "all" or group.title not in (*SECTIONS, ALSO_ACCEPTED):
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
