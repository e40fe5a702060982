"""How well does training scale? Throughput and efficiency on 1, 2, ... N ranks, as a table and a plot.

    python ddp_benchmark.py --max-ranks 2                      # 1 and 2 ranks, on the GPUs or on the CPU
    python ddp_benchmark.py --ranks 1 2 4 8 --steps 100 --plot scaling.png --json scaling.json

Weak scaling: every rank keeps its batch, the global batch grows with the ranks, and ideally the time of a step stays.
Strong scaling: the global batch stays, each rank gets a smaller share, and ideally the time of a step falls to 1/N.
Efficiency is the throughput over N times the throughput of one rank. On the CPU every rank computes with one thread;
more ranks than cores have to share them, so expect the efficiency to fall there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

import phalanx
from phalanx.data import load
from phalanx.models.gpt import gpt

_WINDOWS = 5
"""Laps of the clock in one run; the first is the warm-up, the median of the others counts."""


class Point(NamedTuple):
    """One measured run."""

    scaling: str
    ranks: int
    batch_per_rank: int
    step_ms: float
    samples_per_second: float
    efficiency: float = 1.0


def main() -> None:
    args = parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)  # a single rank trains in this process
    points: list[Point] = []
    for scaling in args.scaling:
        points += measure_scaling(scaling, args)
    print(format_table(points))
    if args.json:
        args.json.write_text(json.dumps([point._asdict() for point in points], indent=2) + "\n")
    if args.plot:
        draw(points, args.plot)
        print(f"plot: {args.plot}")


def measure_scaling(scaling: str, args: argparse.Namespace) -> list[Point]:
    """Measure every number of ranks; efficiencies are relative to the smallest."""
    points = []
    for ranks in args.ranks:
        batch = args.batch_size if scaling == "weak" else args.batch_size * args.ranks[0] // ranks
        if batch == 0:
            raise SystemExit(f"{ranks} ranks cannot share a batch of {args.batch_size}: give a larger --batch-size")
        points.append(measure(scaling, ranks, batch, args))
        print(f"{scaling}: {ranks} ranks, {points[-1].samples_per_second:,.0f} samples/s", flush=True)
    base = points[0].samples_per_second / points[0].ranks
    return [point._replace(efficiency=point.samples_per_second / point.ranks / base) for point in points]


def measure(scaling: str, ranks: int, batch: int, args: argparse.Namespace) -> Point:
    """Train a small GPT for some steps on so many ranks and return its steady speed."""
    torch.manual_seed(0)
    data = load("synthetic", length=batch * ranks * args.steps, shape=(args.time,), task="tokens", classes=256)
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        trainer = phalanx.PyTorchDDPTrainer(
            gpt("debug", block_size=args.time, width=args.width, layers=args.layers),
            num_workers=ranks,
            device=args.device,
            threads_per_rank=None if args.device == "cuda" else 1,
            batch_size=batch,
            max_steps=args.steps,
            mixed_precision="bf16" if args.device == "cuda" else False,
            log_every_n_steps=args.steps // _WINDOWS,
            progress=False,
        )
        history = trainer.fit(data, run_dir=folder)
    speeds = [lap["samples_per_second"] for lap in history.steps if lap["step"] > args.steps // _WINDOWS]
    speed = median(speeds)
    return Point(scaling, ranks, batch, batch * ranks / speed * 1e3, speed)


def format_table(points: list[Point]) -> str:
    lines = [f"{'scaling':<8} {'ranks':>5} {'batch/rank':>10} {'ms/step':>9} {'samples/s':>10} {'efficiency':>10}"]
    for point in points:
        scaling, ranks, batch, step_ms, speed, efficiency = point
        lines.append(f"{scaling:<8} {ranks:>5} {batch:>10} {step_ms:>9.1f} {speed:>10,.0f} {efficiency:>10.0%}")
    return "\n".join(lines)


def draw(points: list[Point], path: Path) -> None:
    """Plot the throughput and the efficiency against the ranks."""
    import matplotlib

    matplotlib.use("Agg")  # no screen needed
    from matplotlib import pyplot as plt

    figure, (speed_axes, efficiency_axes) = plt.subplots(1, 2, figsize=(10, 4))
    ranks = sorted({point.ranks for point in points})
    for scaling in dict.fromkeys(point.scaling for point in points):
        mine = [point for point in points if point.scaling == scaling]
        speed_axes.plot([p.ranks for p in mine], [p.samples_per_second for p in mine], marker="o", label=scaling)
        efficiency_axes.plot([p.ranks for p in mine], [p.efficiency for p in mine], marker="o", label=scaling)
    first = points[0]
    ideal = [first.samples_per_second / first.ranks * count for count in ranks]
    speed_axes.plot(ranks, ideal, linestyle="--", color="grey", label="ideal")
    efficiency_axes.axhline(1.0, linestyle="--", color="grey", label="ideal")
    speed_axes.set(title="Throughput", ylabel="samples/s", ylim=(0, None))
    efficiency_axes.set(title="Efficiency", ylabel="throughput / ideal", ylim=(0, 1.1))
    for axes in (speed_axes, efficiency_axes):
        axes.set(xlabel="ranks", xticks=ranks)
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Scaling efficiency over 1..N ranks.")
    parser.add_argument("--max-ranks", type=int, default=2, help="measure 1, 2, 4, ... up to this many ranks")
    parser.add_argument("--ranks", type=int, nargs="+", help="measure exactly these numbers of ranks")
    parser.add_argument("--scaling", nargs="+", choices=("weak", "strong"), default=["weak", "strong"])
    parser.add_argument("--steps", type=int, default=50, help="steps a run; the first fifth is warm-up")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences a rank (weak) or in all (strong)")
    parser.add_argument("--time", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--width", type=int, default=128, help="width of the GPT")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, default=Path("scaling.png"), help="where the picture goes")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    if args.steps < 2 * _WINDOWS:
        parser.error(f"--steps must be at least {2 * _WINDOWS}")
    args.ranks = sorted(args.ranks or {*(2**n for n in range(args.max_ranks.bit_length())), args.max_ranks})
    return args


if __name__ == "__main__":
    main()
