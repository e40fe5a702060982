"""The pictures of `gpu_table.py`: speed against memory of every contestant, and the loss curves of our modes.

python benchmarks/gpu_pictures.py benchmarks/results/gpu_table.json docs/assets/gpu
python benchmarks/gpu_pictures.py benchmarks/results/shapes.json docs/assets/shapes    # accuracy by epoch
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

from phalanx.tools.svg import COLORS, Axis, Plot, write_picture

_CELL = (460, 320)
_CONTESTANTS = ("raw", "accelerate", "lightning", "hf", "ours", "ours fast", "ours small")
_SHARES, _LOSSES = ("accuracy", "top5"), ("train_loss", "loss")
_WINDOW = 50
"""Steps over which a curve is averaged: single batches vary more than the modes."""


def main() -> None:
    """Write NAME-table.svg and NAME-curves.svg, or the accuracy of a run's epochs."""
    document = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if "epochs" in document:
        charts = [_lines(document["epochs"], names) for names in (_SHARES, _LOSSES)]
        write_picture(f"{sys.argv[2]}-accuracy.svg", document["about"], charts, _CELL, _SHARES + _LOSSES)
        return
    colors = dict(zip(_CONTESTANTS, COLORS, strict=False))
    charts = [_speed(model, rows, colors) for model, rows in document["models"].items() if "ms" in rows.get("raw", {})]
    title = f"Speed against memory, each times the raw loop ({document['environment']['device']})"
    write_picture(f"{sys.argv[2]}-table.svg", title, charts, _CELL, _CONTESTANTS)
    if curves := document.get("curves"):
        title = "Loss of GPT-2 124M on Python's library, 2,000 steps: whole curve, and the last quarter"
        charts = [_curves(curves, 0, colors), _curves(curves, 3 * len(curves["ours"]) // 4, colors)]
        write_picture(f"{sys.argv[2]}-curves.svg", title, charts, _CELL, _CONTESTANTS)


def _speed(model: str, rows: dict[str, Any], colors: dict[str, str]) -> str:
    known = {name: row for name, row in rows.items() if "ms" in row}
    raw = known["raw"]
    points = {name: (row["gib"] / raw["gib"], row["per_second"] / raw["per_second"]) for name, row in known.items()}
    memory = Axis.of(f"{model}: memory", [0.3, 1.1, *(x for x, _ in points.values())])
    plot = Plot(memory, Axis.of("speed", [0.8, 1.2, *(y for _, y in points.values())]), _CELL)
    for name, (x, y) in points.items():
        plot.mark((x, y), colors[name], f"{name}: {y:.2f}x the speed, {x:.2f}x the memory")
    return plot.svg()


def _curves(curves: dict[str, list[float]], start: int, colors: dict[str, str]) -> str:
    means = {name: _means(losses, start) for name, losses in curves.items()}
    values = [loss for line in means.values() for _, loss in line]
    plot = Plot(Axis.of("step", [float(start), float(len(curves["ours"]))]), Axis.of("loss", values), _CELL)
    for name, line in means.items():
        plot.line(line, colors[name], name)
    return plot.svg()


def _lines(epochs: list[dict[str, float]], names: tuple[str, ...]) -> str:
    colors = dict(zip(_SHARES + _LOSSES, COLORS, strict=False))
    highest = max(each[name] for each in epochs for name in names)
    plot = Plot(Axis.of("epoch", [0.0, float(len(epochs))]), Axis.of("", [0.0, highest]), _CELL)
    for name in names:
        plot.line([(each["epoch"], each[name]) for each in epochs], colors[name], name)
    return plot.svg()


def _means(losses: list[float], start: int) -> list[tuple[float, float]]:
    starts = range(start, len(losses) - _WINDOW + 1, _WINDOW // 2)
    return [(step + _WINDOW / 2, sum(losses[step : step + _WINDOW]) / _WINDOW) for step in starts]


if __name__ == "__main__":
    main()
