"""Time, speed-up and quality by the number of GPUs: what was measured here, and what the planner predicts elsewhere.

    python benchmarks/scaling_table.py                                 # all four tables; about six minutes on two cores
    python benchmarks/scaling_table.py --only images --ranks 1 2 --json table.json --markdown table.md --plot table.svg

Four tables: images (time per epoch, accuracy), language (fine-tuning for questions: time, F1), precision (16 bits
against 32), and size (the largest model that a GPU's memory holds). Measured rows train for real, on CPU ranks (each
with one thread; more ranks than cores share them) or on the GPUs that are here, with one global batch for every number
of ranks. Predicted rows are those of `phalanx plan` for 1 to 32 GPUs, with the interval that holds nine of ten
measurements; the quality of a predicted row is not known, and its cell is empty. The column "seed" has the figures that
this project set out from, for the same number of GPUs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

from report import describe, environment, table, write_json

from phalanx import Callback
from phalanx.tools.plan import Cluster, Goal, Layout, estimate
from phalanx.tools.plan.plans import Estimate
from phalanx.tools.plan.presets import model as planned_model
from phalanx.tools.plan.search import can_offload

_IMAGENET, _SQUAD, _SQUAD_TOKENS, _SQUAD_EPOCHS = 1_281_167, 88_641, 384, 2
"""Images of an epoch; windows of SQuAD 1.1 with 384 tokens and a stride of 128, and the usual epochs."""
_SEED_IMAGES = {1: (1800, 0.761), 4: (480, 0.762), 8: (250, 0.763), 16: (130, 0.762), 32: (68, 0.761)}
"""Seconds of an epoch and accuracy by GPUs."""
_SEED_BERT = {
    (1, "fp32"): (18.0, 0.912),
    (4, "fp32"): (5.0, 0.914),
    (8, "fp32"): (2.8, 0.913),
    (8, "fp16"): (1.6, 0.912),
}
"""Hours and F1 by V100s and precision."""
_CELL = (460, 320)
_COUNTS = (1, 4, 8, 16, 32)


class Row(NamedTuple):
    """One line of the first two tables."""

    setup: str
    source: str
    """measured or predicted."""
    seconds: float
    interval: tuple[float, float] | None
    speedup: float
    quality: float | None = None
    seed: str = ""


def main() -> None:
    args = _arguments()
    tables: dict[str, list[Any]] = {}
    texts = []
    for name in args.only:
        tables[name], text = _TABLES[name](args)
        texts.append(text)
        print(text, flush=True)
    found = environment(args.device)
    print(describe(found))
    write_json(args.json, {"environment": found, "tables": tables})
    if args.markdown:
        args.markdown.write_text("\n".join([*texts, describe(found), ""]), encoding="utf-8")
    if args.plot:
        _draw(tables, args.plot)


def _images(args: argparse.Namespace) -> tuple[list[Any], str]:
    rows = _speedups([_train_images(ranks, args) for ranks in args.ranks])
    for gpu, precision in (("v100-16", "fp16"), ("a100-40", "bf16"), ("h100", "bf16")):
        goals = [Goal(global_batch=64 * count, precision=precision, optimizer="sgd") for count in _COUNTS]
        rows += _predicted("resnet50", gpu, precision, goals, _IMAGENET, 64, _seeds_of_images(gpu))
    return rows, _text("Image classification, time per epoch", "accuracy", rows)


def _language(args: argparse.Namespace) -> tuple[list[Any], str]:
    rows = _speedups([_train_questions(ranks, args) for ranks in args.ranks])
    for gpu, precision in (("v100-32", "fp32"), ("v100-32", "fp16"), ("a100-40", "bf16"), ("h100", "bf16")):
        goals = [Goal(global_batch=8 * count, seq_len=_SQUAD_TOKENS, precision=precision) for count in _COUNTS]
        samples = _SQUAD * _SQUAD_EPOCHS
        seeds = _seeds_of_bert(gpu, precision)
        rows += _predicted("bert-large", gpu, precision, goals, samples, 8, seeds)
    return rows, _text("Fine-tuning BERT for questions, whole training", "F1", rows)


def _train_images(ranks: int, args: argparse.Namespace) -> Row:
    """Train a small ResNet on drawn shapes; the time of its fastest epoch, and its accuracy on unseen shapes."""
    data = args.folder / "shapes"
    if not data.exists():
        drawn = ["--out", data, "--images", args.images, "--val-images", args.images // 8, "--classes", 10]
        _phalanx("data", "make", "shapes", *drawn, "--size", 32)
    model = ["--set", "model.preset=debug", "--set", "model.channels=3", "--set", "data.size=32"]
    crop = ["--set", "augment.crop=32", "--set", "augment.scale=[0.5, 1.0]", "--learning-rate", 0.4]
    epochs, _ = _trained("imagenet", ranks, args, 64, *model, *crop, "--data", data, "--epochs", args.epochs)
    seconds = min(epoch["seconds"] for epoch in epochs)
    return Row(_setup(ranks, args.device, "ddp"), "measured", seconds, None, 1.0, epochs[-1]["val"]["accuracy"])


def _train_questions(ranks: int, args: argparse.Namespace) -> Row:
    """Train a small BERT on drawn questions; the time of its steps, and the F1 of its answers."""
    data = args.folder / "questions"
    if not data.exists():
        _phalanx("data", "make", "questions", "--out", data)
    epochs, seconds = _trained("bert-qa", ranks, args, 64, "--data", data, "--max-steps", 600)
    return Row(_setup(ranks, args.device, "ddp"), "measured", seconds, None, 1.0, epochs[-1]["val"]["f1"])


def _trained(recipe: str, ranks: int, args: argparse.Namespace, batch: int, *words: object) -> tuple[list[Any], float]:
    """Train a recipe with one global batch for any number of ranks; return its epochs, and the seconds of all."""
    with tempfile.TemporaryDirectory() as run:
        threads = ["--threads-per-rank", 1] if args.device == "cpu" else []
        layout = ["--num-workers", ranks, "--device", args.device, *threads, "--batch-size", batch // ranks]
        _phalanx("train", recipe, *layout, *words, "--run-dir", Path(run) / "run")
        lines = (Path(run) / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    epochs = [event for event in map(json.loads, lines) if event["event"] == "epoch"]
    return epochs, sum(epoch["seconds"] for epoch in epochs)


def _phalanx(*words: object) -> None:
    """Run the command line as a user does; what it prints goes to standard error."""
    done = subprocess.run([sys.executable, "-m", "phalanx", *map(str, words)], stdout=sys.stderr, check=False)
    if done.returncode:
        raise SystemExit(f"phalanx {' '.join(map(str, words))}: exit code {done.returncode}")


def _setup(ranks: int, device: str, strategy: str) -> str:
    kind = "CPU rank" if device == "cpu" else "GPU"
    return f"{ranks} {kind}{'s' if ranks > 1 else ''} ({strategy})"


def _speedups(rows: list[Row]) -> list[Row]:
    return [row._replace(speedup=rows[0].seconds / row.seconds) for row in rows]


def _predicted(
    model: str, gpu: str, precision: str, goals: list[Goal], samples: int, micro_batch: int, seeds: dict[int, str]
) -> list[Row]:
    """Return the time of `samples` samples on 1 to 32 GPUs, each with the same micro-batch."""
    rows = []
    for count, goal in zip(_COUNTS, goals, strict=True):
        layout = Layout(dp_replicate=count, micro_batch=micro_batch)
        found = estimate(model, Cluster(gpu=gpu, gpus=count), layout, goal)
        steps = samples / goal.global_batch
        interval = (steps * found.interval[0], steps * found.interval[1])
        setup = f"{count} {gpu} (ddp, {precision})"
        rows.append(Row(setup, "predicted", steps * found.step_seconds, interval, 1.0, None, seeds.get(count, "")))
    return _speedups(rows)


def _seeds_of_images(gpu: str) -> dict[int, str]:
    if not gpu.startswith("v100"):
        return {}
    first = _SEED_IMAGES[1][0]
    return {
        count: f"{seconds} s, {first / seconds:.1f}x, {accuracy:.1%}"
        for count, (seconds, accuracy) in _SEED_IMAGES.items()
    }


def _seeds_of_bert(gpu: str, precision: str) -> dict[int, str]:
    if not gpu.startswith("v100"):
        return {}
    first = _SEED_BERT[1, "fp32"][0]
    return {
        count: f"{hours:g} h, {first / hours:.1f}x, {score:.3f}"
        for (count, kind), (hours, score) in _SEED_BERT.items()
        if kind == precision
    }


def _text(title: str, quality: str, rows: list[Row]) -> str:
    cells = [
        [row.setup, row.source, _duration(row.seconds), _range(row.interval), f"{row.speedup:.2f}x",
         "" if row.quality is None else f"{row.quality:.3f}", row.seed]
        for row in rows
    ]  # fmt: skip
    return table(title, ["setup", "source", "time", "nine of ten within", "speed-up", quality, "seed"], cells)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds:,.0f} s" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _range(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"{_duration(interval[0])} to {_duration(interval[1])}"


def _precision(args: argparse.Namespace) -> tuple[list[Any], str]:
    """Return how much faster 16 bits are than 32, and how much memory they take."""
    rows = []
    for model, batch, seq_len in (("resnet50", 64, 0), ("bert-large", 8, _SQUAD_TOKENS), ("gpt2", 8, 1024)):
        for gpu, half in (("v100-32", "fp16"), ("a100-40", "bf16"), ("h100", "bf16")):
            wide, narrow = (_one_gpu(model, gpu, precision, batch, seq_len) for precision in ("fp32", half))
            speed, memory = wide.step_seconds / narrow.step_seconds, narrow.peak_gib / wide.peak_gib
            rows.append([f"{model}, 1 {gpu}", "predicted", half, f"{speed:.2f}x", f"{memory:.2f}x"])
    if args.device == "cuda":
        rows += [_measured_precision(model) for model in ("resnet50", "gpt2")]
    title = "16 bits against 32 (TF32 off), batch and weights the same"
    return rows, table(title, ["setup", "source", "type", "speed", "memory"], rows)


def _one_gpu(model: str, gpu: str, precision: str, batch: int, seq_len: int) -> Estimate:
    goal = Goal(global_batch=batch, seq_len=seq_len or 1, precision=precision)
    return estimate(model, Cluster(gpu=gpu, gpus=1), Layout(micro_batch=batch), goal)


def _measured_precision(model: str) -> list[str]:
    """Train for some steps in 32 and in 16 bits on this GPU."""
    import torch

    from phalanx import PyTorchDDPTrainer
    from phalanx.zoo.data import load
    from phalanx.zoo.models import build

    found = []
    for precision in (False, "bf16"):
        torch.cuda.reset_peak_memory_stats()
        if model == "gpt2":
            net, made_up = build("gpt", preset="gpt2"), {"shape": (1024,), "task": "tokens", "classes": 50_257}
        else:
            net, made_up = build("resnet", preset="resnet50"), {"shape": (3, 224, 224), "classes": 1000}
        batch = 8 if model == "gpt2" else 64
        trainer = PyTorchDDPTrainer(
            net, device="cuda", batch_size=batch, max_steps=40, mixed_precision=precision, log_every_n_steps=10,
            loss_fn=None if model == "gpt2" else "cross_entropy", progress=False,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as run:
            history = trainer.fit(load("synthetic", length=batch * 40, **made_up), run_dir=run)
        found.append((history.steps[-1]["samples_per_second"], torch.cuda.max_memory_allocated()))
    (slow, wide), (fast, narrow) = found
    return [
        f"{model}, 1 {torch.cuda.get_device_name()}",
        "measured",
        "bf16",
        f"{fast / slow:.2f}x",
        f"{narrow / wide:.2f}x",
    ]


_SIZES = (("ddp", 8, {}), ("ZeRO-1", 8, {"zero_stage": 1}), ("ZeRO-3", 8, {"zero_stage": 3}),
          ("ZeRO-3 and offload", 8, {"zero_stage": 3, "offload": "cpu"}))  # fmt: skip


def _size(args: argparse.Namespace) -> tuple[list[Any], str]:
    """Return the largest Llama-like model that eight GPUs hold, and what a rank keeps of a model here."""
    rows = []
    for gpu, precision in (("v100-32", "fp16"), ("a100-40", "bf16")):
        first = 0.0
        for name, count, options in _SIZES:
            largest = _largest(gpu, count, precision, options)
            first = first or largest
            rows.append(
                [f"{count} {gpu}, {name}", "predicted", f"{largest / 1e9:.1f} billion", f"{largest / first:.1f}x"]
            )
    rows += _measured_sizes(args)
    header = ["setup", "source", "parameters, or bytes a rank keeps", "times ddp"]
    return rows, table("The largest model: full recomputation, 1,024 tokens", header, rows)


def _largest(gpu: str, count: int, precision: str, options: dict[str, Any]) -> float:
    """Return the parameters of the largest model that fits: the layers of a Llama 7B are added or taken away."""
    from dataclasses import replace

    base = planned_model("llama-7b")
    goal = Goal(global_batch=count, seq_len=1024, precision=precision)
    shards = options.get("zero_stage") is not None
    axes = {"dp_shard": count} if shards else {"dp_replicate": count}
    layout = Layout(**axes, micro_batch=1, recompute="full", **options)
    cluster = Cluster(gpu=gpu, gpus=count)
    low, high = 0, 4096
    while high - low > 1:
        middle = (low + high) // 2
        shape = replace(base, layers=middle)
        fits = estimate(shape, cluster, layout, goal).fits
        fits = fits and (not options.get("offload") or can_offload(layout, shape, cluster))
        low, high = (middle, high) if fits else (low, middle)
    return float(replace(base, layers=low).parameters) if low else 0.0


def _measured_sizes(args: argparse.Namespace) -> list[list[str]]:
    """Return what each of several ranks keeps of parameters and optimizer states while it trains, ddp and sharded."""
    from phalanx import PyTorchDDPTrainer
    from phalanx.zoo.data import load
    from phalanx.zoo.models import build

    ranks = max(2, *args.ranks)
    kept: dict[str, int] = {}
    for strategy in ("ddp", "fsdp"):
        with tempfile.TemporaryDirectory() as run:
            trainer = PyTorchDDPTrainer(
                build("gpt", preset="debug", hidden=256, layers=6),
                num_workers=ranks,
                device=args.device,
                strategy=strategy,
                batch_size=4,
                max_steps=3,
                progress=False,
                callbacks=[_Kept(str(Path(run) / "kept"))],
            )
            trainer.fit(load("synthetic", length=64, shape=(64,), task="tokens", classes=256), run_dir=run)
            kept[strategy] = int((Path(run) / "kept").read_text())
    return [
        [_setup(ranks, args.device, name), "measured", f"{size / 2**20:.1f} MiB", f"{kept['ddp'] / size:.1f}x"]
        for name, size in kept.items()
    ]


class _Kept(Callback):
    """Writes what this rank keeps between two steps: its part of parameters and optimizer states."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_fit_end(self, trainer: Any) -> None:
        import torch

        from phalanx.strategies.base import local

        tensors = list(trainer.model.parameters())
        for state in trainer.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        if trainer.formation.world.rank == 0:
            Path(self.path).write_text(str(sum(local(tensor).nbytes for tensor in tensors)), encoding="utf-8")


_TABLES: dict[str, Callable[[argparse.Namespace], tuple[list[Any], str]]] = {
    "images": _images,
    "language": _language,
    "precision": _precision,
    "size": _size,
}


def _draw(tables: dict[str, list[Any]], path: Path) -> None:
    """Write speed-up against the number of GPUs, of the first two tables."""
    from phalanx.tools.svg import COLORS, Axis, Plot, write_picture

    charts, names = [], []
    for name in ("images", "language"):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in tables.get(name, []):
            count, kind = row.setup.split(" ", 1)
            label = "CPU" if kind.startswith("CPU") else kind.split("-")[0].split(" ")[0] + " " + kind[-5:-1]
            lines.setdefault(label, []).append((float(count), row.speedup))
        if not lines:
            continue
        names += [label for label in lines if label not in names]
        points = [point for line in lines.values() for point in line]
        counts, speedups = zip(*points, strict=True)
        plot = Plot(Axis.of(f"{name}: GPUs or ranks", counts), Axis.of("speed-up", speedups), _CELL)
        for label, line in lines.items():
            plot.line(line, COLORS[names.index(label) % len(COLORS)], label)
        charts.append(plot.svg())
    write_picture(str(path), "Speed-up: measured here, predicted elsewhere", charts, _CELL, names)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(_TABLES), default=list(_TABLES), metavar="TABLE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="of the measured rows [1 2 4]")
    parser.add_argument("--images", type=int, default=4000, help="drawn images of an epoch [4000]")
    parser.add_argument("--epochs", type=int, default=4, help="of the measured rows of images [4]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", type=Path, help="where drawn data are kept [a temporary folder]")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path, help="an .svg file")
    args = parser.parse_args()
    args.folder = args.folder or Path(tempfile.mkdtemp(prefix="scaling-"))
    return args


if __name__ == "__main__":
    main()
