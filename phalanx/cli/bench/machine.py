"""`phalanx bench machine`: measure this machine for the planner (`phalanx plan --gpu measured`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_json_flag, print_json
from phalanx.launch import prestart

_HELP = "Measure matrix products, memory and links of this machine, and keep them for `phalanx plan --gpu measured`."


def run(arguments: Sequence[str]) -> int:
    """Run the subject."""
    usage = "phalanx bench machine [--output FILE] [--json]"
    parser = FlagParser(prog="phalanx bench machine", usage=usage, description=_HELP)
    parser.add_argument("--output", metavar="FILE", help="where to write [the user's folder]")
    add_json_flag(parser, "what was measured")
    namespace = parser.parse_all(arguments)
    prestart()
    from phalanx.tools.bench.calibrate import calibrate  # imports torch

    out = sys.stderr if namespace.json else sys.stdout
    path = calibrate(namespace.output, lambda text: print(text, file=out, flush=True))
    print(f"kept in {path}; a plan for this machine: phalanx plan MODEL --gpus 1 --gpu measured", file=out)
    if namespace.json:
        print_json(json.loads(path.read_text(encoding="utf-8")))
    return 0
