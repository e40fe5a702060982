"""How long the ranks of a pipeline stand idle: each schedule's measured bubble beside its formula.

    python benchmarks/pipeline_bubble.py
    python benchmarks/pipeline_bubble.py --ranks 4 --microbatches 4 8 16 --plot bubble.png

The layers of the model sleep for a fixed time (forward once, backward twice), so that more ranks than cores can be
measured: what is seen is the schedule and what torch and gloo add to it, not the arithmetic. Idle is the part of a step
in which a rank is in no pass. The formula: (p-1)/(v m+p-1) for p ranks, m micro-batches and v stages per rank.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import describe, environment, table, write_json

from phalanx.world.splits import SCHEDULES

_HERE = Path(__file__).resolve().parent


def main() -> None:
    """Measure every schedule and print the table; draw it where that was asked for."""
    options = _parse()
    document: dict[str, Any] = {"environment": environment(), "ranks": options.ranks, "schedules": {}}
    print(describe(document["environment"]), flush=True)
    rows = []
    for name, schedule in SCHEDULES.items():
        for count in options.microbatches:
            found = _run(name, count, options)
            formula, idle = schedule.bubble(options.ranks, count), 1.0 - found["busy"]
            document["schedules"].setdefault(name, {})[count] = {**found, "idle": idle, "formula": formula}
            rows.append([name, str(count), f"{formula:.1%}", f"{idle:.1%}", f"{found['step'] * 1e3:.0f}"])
            print(f"  {name}, {count} microbatches: {idle:.1%} idle, {formula:.1%} by the formula", flush=True)
    head = ["schedule", "microbatches", "formula", "measured", "ms a step"]
    print("\n" + table(f"idle share of a pipeline of {options.ranks} ranks", head, rows))
    write_json(options.json, document)
    if options.plot is not None:
        draw(document, options.plot)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--milliseconds", type=float, default=10.0, help="what one layer's forward pass takes")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write what was measured here")
    parser.add_argument("--plot", type=Path, help="draw measured and formula into this picture")
    return parser.parse_args()


def _run(schedule: str, count: int, options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        request = {
            "schedule": schedule,
            "ranks": options.ranks,
            "microbatches": count,
            "seconds": options.milliseconds / 1e3,
            "steps": options.steps,
            "answer": str(answer),
        }
        start = ["train", "--script", str(_HERE / "pipeline_bubble_rank.py"), "--num-workers", str(options.ranks)]
        command = [sys.executable, "-m", "phalanx", *start, "--device", "cpu", "--", json.dumps(request)]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, float] = json.loads(answer.read_text())
    return found


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw the idle share over the microbatches: a line for the formula, dots for what was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for color, (name, by_count) in zip(("C0", "C1", "C2", "C3"), document["schedules"].items(), strict=False):
        counts = sorted(by_count)
        style = "--" if name == "1f1b" else "-"  # the same formula as gpipe's
        axes.plot(counts, [100 * by_count[count]["formula"] for count in counts], style, color=color, linewidth=1.5)
        axes.plot(counts, [100 * by_count[count]["idle"] for count in counts], "o", color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    axes.set(xlabel="microbatches", ylabel="idle share of a step, %")
    axes.set_title(f"Pipeline of {document['ranks']} ranks: formula (lines) and measured (dots)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
