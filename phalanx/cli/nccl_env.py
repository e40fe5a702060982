"""`phalanx nccl-env`: the NCCL variables for a kind of cluster, with reasons."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from phalanx.cli.flags import FlagParser
from phalanx.errors import UsageError, unknown_name
from phalanx.launch.nccl import CLUSTERS, Variable, nccl_variables


def run(arguments: Sequence[str]) -> int:
    """Print the variables, ready for a shell."""
    parser = FlagParser(
        prog="phalanx nccl-env",
        description="Print the NCCL variables for a kind of cluster, with a reason for each. "
        'Use them with: eval "$(phalanx nccl-env --cluster ethernet)", or let the launcher set them: '
        "phalanx train ... --nccl-env ethernet",
    )
    parser.add_argument("--cluster", metavar="|".join(CLUSTERS), help="what connects the machines")
    parser.add_argument("--interface", metavar="NAME", help="network card (default: that of the default route)")
    parser.add_argument("--json", action="store_true", help="print objects with name, value, reason, advice and set")
    options = parser.parse_args(list(arguments))
    if options.cluster not in CLUSTERS:
        given = options.cluster or ""
        if not given:
            raise UsageError("nccl-env needs --cluster", hint=f"Allowed: {', '.join(CLUSTERS)}.")
        raise UsageError(unknown_name("cluster", given, CLUSTERS))
    variables = nccl_variables(options.cluster, options.interface)
    print(json.dumps([_as_object(v) for v in variables], indent=2) if options.json else _as_shell(variables))
    return 0


def _as_object(variable: Variable) -> dict[str, str | bool | None]:
    return {**variable._asdict(), "set": os.environ.get(variable.name)}


def _as_shell(variables: Sequence[Variable]) -> str:
    lines = [(f"{'# ' if v.advice else ''}export {v.name}={_quoted(v.value)}", v) for v in variables]
    width = max(len(line) for line, _ in lines)
    return "\n".join(f"{line:<{width}}  # {v.reason}{_as_set(v)}" for line, v in lines)


def _quoted(value: str) -> str:
    return f"'{value}'" if any(letter in value for letter in " ^,") else value


def _as_set(variable: Variable) -> str:
    """Return the value that the environment has, where it differs."""
    now = os.environ.get(variable.name)
    return f" (now: {now})" if now not in (None, variable.value) else ""
