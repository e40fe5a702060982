"""How well does training scale? Speedup, time per epoch and accuracy on 1, 2, ... N ranks, as a table and a plot.

    python ddp_benchmark.py --max-ranks 2                      # 1 and 2 ranks, on the GPUs or on the CPU
    python ddp_benchmark.py --ranks 1 2 4 8 --steps 100 --plot scaling.png --json scaling.json
    python ddp_benchmark.py --model resnet50 --epochs 3 --samples 5000 --scaling strong    # whole epochs, accuracy

Weak scaling: every rank keeps its batch, the global batch grows with the ranks, and ideally the time of a step stays.
Strong scaling: the global batch stays, each rank gets a smaller share, and ideally the time of a step falls to 1/N.
Speedup is the throughput over that of the fewest ranks, efficiency the speedup over the ratio of ranks. The time of an
epoch is that of --samples samples at the measured speed. At its end each run is evaluated on 500 samples that it has
not seen: the accuracy of classes, or of the next token for gpt, whose made-up tokens are random. --epochs trains for
whole epochs of --samples, in the place of --steps. On the CPU every rank computes with one thread; more ranks than
cores have to share them, so expect the efficiency to fall there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import phalanx
from phalanx.zoo.data import load
from phalanx.zoo.models import build

_WINDOWS = 5
"""Laps of the clock in one run; the first is the warm-up, the median of the others counts."""
_IMAGES = {
    "convnet": ((1, 8, 8), {}),
    "resnet": ((1, 8, 8), {"preset": "debug"}),
    "resnet50": ((3, 32, 32), {"preset": "resnet50", "classes": 10, "stem": 3}),
    "vit": ((1, 8, 8), {"preset": "debug"}),
}
"""By name on the command line: the shape of a sample, and the model's options."""
_CLASSES = 10


class Point(NamedTuple):
    """One measured run."""

    scaling: str
    ranks: int
    batch_per_rank: int
    step_ms: float
    samples_per_second: float
    epoch_seconds: float
    accuracy: float | None = None
    speedup: float = 1.0
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
    """Measure every number of ranks; speedups are relative to the smallest."""
    points = []
    for ranks in args.ranks:
        batch = args.batch_size if scaling == "weak" else args.batch_size * args.ranks[0] // ranks
        if batch == 0:
            raise SystemExit(f"{ranks} ranks cannot share a batch of {args.batch_size}: give a larger --batch-size")
        points.append(measure(scaling, ranks, batch, args))
        print(f"{scaling}: {ranks} ranks, {points[-1].samples_per_second:,.0f} samples/s", flush=True)
    speedups = [point.samples_per_second / points[0].samples_per_second for point in points]
    return [
        point._replace(speedup=speedup, efficiency=speedup * points[0].ranks / point.ranks)
        for point, speedup in zip(points, speedups, strict=True)
    ]


def measure(scaling: str, ranks: int, batch: int, args: argparse.Namespace) -> Point:
    """Train for some steps or epochs on this many ranks and return the steady speed."""
    torch.manual_seed(0)
    steps = args.steps if args.epochs is None else args.epochs * -(-args.samples // (batch * ranks))
    model, train, val = prepare(args, length=args.samples if args.epochs else batch * ranks * args.steps)
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        trainer = phalanx.PyTorchDDPTrainer(
            model,
            num_workers=ranks,
            device=args.device,
            threads_per_rank=None if args.device == "cuda" else 1,
            batch_size=batch,
            max_steps=steps,
            eval_every=args.epochs or 1,  # once, at the end
            mixed_precision="bf16" if args.device == "cuda" else False,
            log_every_n_steps=max(1, steps // _WINDOWS),
            progress=False,
        )
        history = trainer.fit(train, val, run_dir=folder)
    speeds = [lap["samples_per_second"] for lap in history.steps if lap["step"] > steps // _WINDOWS]
    speed = median(speeds)
    seconds = args.samples / speed
    return Point(scaling, ranks, batch, batch * ranks / speed * 1e3, speed, seconds, history.best_accuracy)


def prepare(args: argparse.Namespace, length: int) -> tuple[torch.nn.Module, Any, Any]:
    """Return the model, data to train on, and data to evaluate on."""
    if args.model == "gpt":
        model = build("gpt", preset="debug", seq_len=args.time, hidden=args.width, layers=args.layers)
        made_up: dict[str, Any] = {"shape": (args.time,), "task": "tokens", "classes": 256}
    else:
        shape, options = _IMAGES[args.model]
        model = build("resnet" if args.model == "resnet50" else args.model, **options)
        made_up = {"shape": shape, "classes": _CLASSES}
    return model, load("synthetic", length=length, **made_up), load("synthetic", split="val", length=500, **made_up)


def format_table(points: list[Point]) -> str:
    names = (
        "scaling",
        "ranks",
        "batch/rank",
        "ms/step",
        "samples/s",
        "time/epoch",
        "speedup",
        "efficiency",
        "accuracy",
    )
    rows = [
        (
            *(p.scaling, str(p.ranks), str(p.batch_per_rank), f"{p.step_ms:.1f}", f"{p.samples_per_second:,.0f}"),
            *(f"{p.epoch_seconds:.2f}s", f"{p.speedup:.2f}x", f"{p.efficiency:.0%}"),
            "-" if p.accuracy is None else f"{p.accuracy:.1%}",
        )
        for p in points
    ]
    return "\n".join(" ".join(f"{cell:>10}" for cell in row) for row in (names, *rows))


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
    parser.add_argument("--model", choices=("gpt", *_IMAGES), default="gpt")
    parser.add_argument("--steps", type=int, default=50, help="steps a run; the first fifth is warm-up")
    parser.add_argument("--epochs", "--num-epochs", type=int, help="epochs a run, in the place of --steps")
    parser.add_argument("--samples", type=int, default=10_000, help="samples of an epoch")
    parser.add_argument("--batch-size", type=int, default=16, help="samples a rank (weak) or in all (strong)")
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
