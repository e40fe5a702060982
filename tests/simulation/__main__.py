"""`python -m tests.simulation --seed 4711`: one history; `--seeds 0 1000`: those that fail, and why."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.simulation.history import failure_of, run_seeds, shrink
from tests.simulation.plan import draw
from tests.simulation.progress import Progress


def main() -> int:
    """Run histories."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run one history and print it")
    parser.add_argument(
        "--seeds", type=int, nargs=2, metavar=("FIRST", "COUNT"), help="run many, and print those that fail"
    )
    parser.add_argument("--nodes", type=int, default=16, help="at most this many nodes")
    parser.add_argument(
        "--shrink", action="store_true", help="look for the shortest history that fails in the same way"
    )
    parser.add_argument("--ranks", action="store_true", help="print the messages of ranks and their orders, too")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--progress", type=Path, help="keep the results in this file, and continue a run that was cut")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        plan = draw(arguments.seed, arguments.nodes)
        failure = failure_of(plan, detailed=arguments.ranks)
        if failure.violation is not None and arguments.shrink:
            plan = shrink(plan)
            failure = failure_of(plan, detailed=arguments.ranks)
        print(plan, *failure.history, failure.violation or "all invariants hold", sep="\n")
        return int(failure.violation is not None)
    first, count = arguments.seeds or (0, 200)
    progress = Progress(range(first, first + count), arguments.nodes, arguments.progress)
    if progress.done:
        print(f"continues after {progress.done} histories")
    run_seeds(progress, arguments.nodes, arguments.seconds)
    for seed, text in progress.failed.items():
        print(f"seed {seed}: {text}"[:300])
    cost = f"{progress.cpu_seconds:.1f} s of CPU time, commit {progress.commit}"
    print(f"{progress.done} of {count} histories, {len(progress.failed)} failed, {cost}")
    return int(bool(progress.failed))


sys.exit(main())
