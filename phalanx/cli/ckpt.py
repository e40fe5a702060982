"""`phalanx ckpt`: list, inspect, check, compare, reshard, prune and copy checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli.flags import FlagParser, pop_action
from phalanx.cli.json_output import print_json
from phalanx.cli.parsers import CKPT_ACTIONS, ckpt_parser


def parser() -> FlagParser:
    """Return the parser of the first action, for help and completion."""
    return ckpt_parser("ls")


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    words = list(arguments)
    if words and words[0] in ("-h", "--help"):
        parser().print_help()
        return 0
    action = pop_action(words, "ckpt", CKPT_ACTIONS, "ACTION PATH")
    namespace = ckpt_parser(action).parse_all(words)
    from phalanx.cli.ckpt_actions import ACTIONS  # with torch, which help and mistakes do not need

    answer = ACTIONS[action](namespace)
    print_json(answer.data) if namespace.json else print(_printable(answer.text))
    return answer.code


def _printable(text: str) -> str:
    """Escape what would control the terminal: names and settings may be those of another user's checkpoint."""
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)
