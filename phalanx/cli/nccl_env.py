"""`phalanx nccl-env`: the NCCL variables for a kind of cluster, with reasons."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from phalanx.cli.flags import FlagParser
from phalanx.config.meanings import unknown_value
from phalanx.errors import UsageError
from phalanx.launch.nccl import CLUSTERS, Variable, nccl_variables


def parser() -> FlagParser:
    """Return the parser of the verb."""
    parser = FlagParser(
        prog="phalanx nccl-env",
        usage=f"phalanx nccl-env {'|'.join(CLUSTERS)} [--interface NAME] [--json]",
        description="Print the NCCL variables for a kind of cluster, with a reason for each. "
        'Use them with: eval "$(phalanx nccl-env ethernet)", or let the launcher set them: '
        "phalanx train ... --nccl-env ethernet",
    )
    parser.add_argument("kind", nargs="?", metavar="|".join(CLUSTERS), help="what connects the machines")
    parser.add_argument("--cluster", metavar="|".join(CLUSTERS), help="the same as a flag")
    parser.add_argument("--interface", metavar="NAME", help="network card (default: that of the default route)")
    parser.add_argument("--json", action="store_true", help="print objects with name, value, reason, advice and set")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Print the variables, ready for a shell."""
    options = parser().parse_all(arguments)
    if options.kind and options.cluster and options.kind != options.cluster:
        raise UsageError(f"two clusters: {options.kind} and --cluster {options.cluster}", hint="Give one of them.")
    cluster = options.kind or options.cluster
    hint = f"Write: phalanx nccl-env {' | '.join(CLUSTERS)}"
    if not cluster:
        raise UsageError("nccl-env needs a kind of cluster", hint=hint)
    if cluster not in CLUSTERS:
        raise UsageError(unknown_value("nccl_env", "kind of cluster", cluster, CLUSTERS), hint=hint)
    variables = nccl_variables(cluster, options.interface)
    if options.json:
        print(json.dumps([{**v._asdict(), "set": os.environ.get(v.name)} for v in variables], indent=2))
    else:
        print(_as_shell(variables))
    return 0


def _as_shell(variables: Sequence[Variable]) -> str:
    quoted = [f"'{v.value}'" if set(v.value) & set(" ^,") else v.value for v in variables]
    exports = [f"{'# ' * v.advice}export {v.name}={value}" for v, value in zip(variables, quoted, strict=True)]
    lines = []
    for variable, export in zip(variables, exports, strict=True):
        now = os.environ.get(variable.name)
        differs = f" (now: {now})" if now not in (None, variable.value) else ""
        lines.append(f"{export:<{max(map(len, exports))}}  # {variable.reason}{differs}")
    return "\n".join(lines)
