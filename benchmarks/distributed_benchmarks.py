"""How fast gradients travel, and what that is worth in training: our collectives and strategies against gloo's.

    python benchmarks/distributed_benchmarks.py                   # both, on 2 and 4 ranks of this machine
    python benchmarks/distributed_benchmarks.py communication --ranks 2 --sizes 1K:256M:4
    python benchmarks/distributed_benchmarks.py training --rounds 5

communication: all-reduce of float32, each algorithm after the other in the same processes; gloo's time over each. "shm"
is a tensor that lives in shared memory, "shm-copy" one that does not, "ring" our ring on point-to-point messages, and
"copy" what copying the tensor takes every rank: no all-reduce of memory can be much faster. A time is the median over
rounds of the median over iterations, on the slowest rank.

training: steps of a tiny perceptron and of a small GPT on two ranks: a plain loop in torch's DDP on gloo, Phalanx's
ddp, its ring, and torch's DDP on our backend.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from contestants import CONTESTANTS
from rank_group import measure
from report import describe, environment, ratio, table, write_json

from phalanx.launch import PlainConsole
from phalanx.tools.bench.comm.plan import BenchPlan, parse_sizes
from phalanx.tools.bench.comm.run import run_bench

ALGORITHMS = ("gloo", "shm", "shm-copy", "ring", "copy")
IN_TRAINING = ("raw", "phalanx", "phalanx-ring", "raw-on-phalanx")


def main() -> None:
    """Measure what was asked for."""
    options = _parse()
    document: dict[str, Any] = {"environment": environment()}
    print(describe(document["environment"]), flush=True)
    if options.what in ("communication", "both"):
        for ranks in options.ranks:
            document[f"communication {ranks}"] = rounds = [
                _communication(ranks, options) for _ in range(options.rounds)
            ]
            print("\n" + _ratios([row for rows in rounds for row in rows], ranks), flush=True)
            write_json(options.json, document)
    if options.what in ("training", "both"):
        for model in ("mlp", "gpt-small"):
            document[f"training {model}"] = rounds = _training(model, options.rounds)
            print("\n" + _steps(model, rounds), flush=True)
            write_json(options.json, document)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("communication", "training", "both"), default="both")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="ranks for the collectives")
    parser.add_argument("--sizes", default="1K:256M:4", help="bytes: FIRST:LAST:FACTOR, or with commas")
    parser.add_argument("--rounds", type=int, default=3, help="times that everything is measured; medians")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    return parser.parse_args()


def _communication(ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    plan = BenchPlan(op="all_reduce", algos=ALGORITHMS, sizes=parse_sizes(options.sizes), warmup=5)
    found = run_bench(plan, ranks, PlainConsole(), threads=1)
    assert found is not None, "these ranks were started here"
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def _ratios(rows: list[dict[str, Any]], ranks: int) -> str:
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        found.setdefault((row["algo"], row["size_bytes"]), []).append(row["time_us"])
    times = {key: median(values) for key, values in found.items()}
    sizes = list(dict.fromkeys(row["size_bytes"] for row in rows))
    header = ["size", *(f"{algo} us" for algo in ALGORITHMS), "shm x", "shm-copy x", "ring x", "shm/copy"]
    lines = []
    for size in sizes:
        row = [_size(size), *(f"{times[algo, size]:.1f}" for algo in ALGORITHMS)]
        row += [f"{times['gloo', size] / times[algo, size]:.2f}" for algo in ("shm", "shm-copy", "ring")]
        lines.append([*row, f"{times['shm', size] / times['copy', size]:.2f}"])
    return table(f"all-reduce on {ranks} ranks; x: gloo's time over this one's", header, lines)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


def _training(model: str, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in IN_TRAINING}
    for number in range(1, rounds + 1):
        for name, values in found.items():
            values.append(measure(name, model, device="cpu", ranks=2, steps=0))
            print(f"{model} round {number}/{rounds} {name}: {values[-1]:.3f} ms", flush=True)
    return found


def _steps(model: str, rounds: dict[str, list[float]]) -> str:
    header = ["contestant", "median ms", "min ms", "x DDP's step", "x DDP's steps/s"]
    rows = []
    for name, values in rounds.items():
        times = ratio(values, rounds["raw"])
        rows.append(
            [CONTESTANTS[name].title, f"{median(values):.2f}", f"{min(values):.2f}", f"{times:.2f}", f"{1 / times:.2f}"]
        )
    return table(f"{model}: 2 ranks, {len(rounds['raw'])} rounds", header, rows)


if __name__ == "__main__":
    main()
