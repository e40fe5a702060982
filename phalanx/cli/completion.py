"""`phalanx completion`: the script that lets a shell complete commands, flags, values, recipes and runs.

The script calls this verb again with the words typed so far; nothing here imports torch.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from phalanx.cli import VERBS
from phalanx.cli.flags import FlagParser, split_own
from phalanx.cli.parsers import CKPT_ACTIONS, PARSERS, ckpt_parser
from phalanx.errors import UsageError, unknown_name
from phalanx.recipes import load_recipe, recipe_names
from phalanx.tools.plan.presets import names as preset_names
from phalanx.tools.submit.job import records
from phalanx.tools.submit.target import TARGETS, target_class

_BASH = """\
_phalanx() {
    local IFS=$'\\n'
    COMPREPLY=($(phalanx completion bash -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _phalanx phalanx
"""
_ZSH = """\
#compdef phalanx
_phalanx() {
    local -a found
    found=("${(@f)$(phalanx completion zsh -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found" ]]; then _describe phalanx found; else _files; fi
}
if [[ "$funcstack[1]" == _phalanx ]]; then _phalanx "$@"; else compdef _phalanx phalanx; fi
"""
_FISH = """\
function __phalanx
    set -l words (commandline -opc) (commandline -ct)
    set -l found (phalanx completion fish -- $words[2..-1] 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c phalanx -f -a '(__phalanx)'
"""
SHELLS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
INSTALL = """Print the script that completes commands, flags, values, recipes and runs in a shell. To install it:

  bash   echo 'eval "$(phalanx completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(phalanx completion zsh)"' >> ~/.zshrc       (after compinit)
  fish   phalanx completion fish > ~/.config/fish/completions/phalanx.fish"""
SUBCOMMANDS = {
    "config": ("show",),
    "bench": ("comm", "compression"),
    "ckpt": tuple(CKPT_ACTIONS),
    "runs": ("list", "show", "diff", "rm", "tag"),
    "completion": tuple(SHELLS),
    "submit": tuple(TARGETS),
}
"""The words that follow a verb."""
JOB_VERBS = ("status", "logs", "cancel", "resume")
"""Verbs whose argument is the name of a submitted job."""
RUN_VERBS = ("runs", "ckpt", "report", "top", "resume", "scale", "evaluate", "predict", "export", "trace", "stacks")
"""Verbs whose arguments are names of runs, also where a verb has no function `parser`."""


def parser() -> FlagParser:
    """Return the parser of the verb."""
    parser = FlagParser(prog="phalanx completion", usage="phalanx completion bash | zsh | fish", description=INSTALL)
    parser.add_argument("shell", nargs="?", help="bash, zsh or fish")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Print the script; after -- the words typed so far, whose completions are printed."""
    asks = "--" in arguments
    own, typed = split_own(arguments)
    shell = parser().parse_all(own).shell
    if shell not in SHELLS:
        given = unknown_name("shell", shell, SHELLS) if shell else "completion needs the name of a shell"
        raise UsageError(given, hint="Write: phalanx completion bash, zsh or fish")
    if not asks:
        print(SHELLS[shell], end="")
        return 0
    for value, text in completions(typed or [""]):
        shown = {"bash": value, "zsh": f"{value.replace(':', chr(92) + ':')}:{text}", "fish": f"{value}\t{text}"}
        print(shown[shell])
    return 0


def completions(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return what the last word may become, each with a short text; nothing where a file is expected."""
    # bash makes three words of --device=cpu.
    typed = [word for word in words[:-1] if word != "="]
    last = "" if words[-1] == "=" else words[-1]
    return [(value, text) for value, text in _candidates(typed, last) if value.startswith(last)]


def _candidates(typed: list[str], last: str) -> Iterator[tuple[str, str]]:
    if not typed:
        yield from VERBS.items()
        return
    verb, rest = typed[0], typed[1:]
    if verb not in VERBS or "--" in rest:
        return
    if not rest and not last.startswith("-"):
        yield from ((word, "") for word in SUBCOMMANDS.get(verb, ()))
    if verb in JOB_VERBS and not last.startswith("-"):
        yield from ((record.name, f"{record.target} job {record.id}") for record in records())
    known = ckpt_parser(rest[0]) if verb == "ckpt" and rest and rest[0] in CKPT_ACTIONS else parser_of(verb)
    if verb == "submit" and rest and rest[0] in TARGETS:
        known = _submit_flags(rest[0])
    if known is None:
        yield from ((name, "") for name in run_names(rest) if verb in RUN_VERBS and (rest or verb != "runs"))
        return
    flags = {flag: action for action in known._actions for flag in action.option_strings}
    before = flags.get(rest[-1]) if rest else None
    if before is not None and before.nargs != 0 and not rest[-1].startswith("--no-"):
        yield from ((value, "") for value in _values(before, rest))
        if before.nargs != "?":
            return
    if last.startswith("-"):
        yield from ((flag, _first_words(action)) for flag, action in flags.items() if flag.startswith("--"))
    elif verb not in SUBCOMMANDS or rest:
        positional = (action for action in known._actions if not action.option_strings)
        yield from ((value, "") for action in positional for value in _values(action, rest))


def _submit_flags(target: str) -> FlagParser:
    """Return a parser with the flags of a target and those of train."""
    from phalanx.cli.submit import submit_parser

    parser = submit_parser(target, target_class(target).options_class)
    parser._actions += PARSERS["train"]()._actions
    return parser


def parser_of(verb: str) -> FlagParser | None:
    """Return the parser of a verb; None for one that has other verbs below it."""
    make = PARSERS.get(verb) or getattr(import_module(f"phalanx.cli.{verb.replace('-', '_')}"), "parser", None)
    return None if make is None else make()


def _values(action: argparse.Action, typed: list[str]) -> list[str]:
    """Return the values of a flag or a positional argument: those of its name, or the choices in its metavar."""
    if action.dest in _BY_NAME:
        return _BY_NAME[action.dest](typed)
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    words = re.split(r"[|,]", str(action.metavar or "").strip("{}"))
    return words if len(words) > 1 and all(word.islower() or word.isdigit() for word in words) else []


def run_names(typed: list[str]) -> list[str]:
    """Return the folders in ./runs, the newest first."""
    folder = Path("runs")
    found = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]


def _presets(typed: list[str]) -> list[str]:
    """Return the presets of the recipe that was named, or of all recipes."""
    named = [name for name in recipe_names() if name in typed] or recipe_names()
    return list(dict.fromkeys(preset for name in named for preset in load_recipe(name).presets))


_BY_NAME: dict[str, Callable[[list[str]], list[str]]] = {
    "recipe": lambda typed: recipe_names(),
    "subject": lambda typed: recipe_names(),
    "preset": _presets,
    "run": run_names,
    "runs": run_names,
    "calibrate_from": run_names,
    "plan_model": lambda typed: preset_names("models"),
    "gpu": lambda typed: preset_names("gpus"),
    "instance": lambda typed: preset_names("instances"),
    "intra_node": lambda typed: preset_names("links"),
    "inter_node": lambda typed: preset_names("links"),
}
"""What completes an argument, by its `dest`."""


def _first_words(action: argparse.Action) -> str:
    """Return the help of a flag up to its first comma or colon."""
    return "" if action.help in (None, argparse.SUPPRESS) else re.split(r"[,:;(\[]", str(action.help))[0].strip()
