"""The pictures of a search as PNG files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from phalanx.tune.charts import Axis, Line

PARALLEL_FILE = "parallel.png"
CURVES_FILE = "curves.png"


def draw_pictures(axes: Sequence[Axis], lines: Sequence[Line], folder: Path) -> list[Path]:
    """Draw both pictures and return where they are."""
    plt = _pyplot()
    figure, place = plt.subplots(figsize=(2.2 * len(axes) + 1.5, 4.2), layout="constrained")
    draw_parallel(place, axes, lines)
    paths = [_save(plt, figure, folder / PARALLEL_FILE)]
    figure, place = plt.subplots(figsize=(7, 4.2), layout="constrained")
    draw_curves(place, axes[-1].name, lines)
    return [*paths, _save(plt, figure, folder / CURVES_FILE)]


def draw_parallel(place: Any, axes: Sequence[Axis], lines: Sequence[Line]) -> None:
    """Draw a line a trial across one upright axis a hyperparameter."""
    for line in lines:
        width = 2.5 if line.goodness == 1 else 1.0
        place.plot(range(len(axes)), line.positions, color=line.color, linewidth=width)
    for number, axis in enumerate(axes):
        place.plot((number, number), (0, 1), color="black", linewidth=0.8)
        for where, label in axis.ticks():
            place.annotate(label, (number, where), xytext=(4, 0), textcoords="offset points", fontsize=7, va="center")
    place.set_xticks(range(len(axes)), [axis.name for axis in axes])
    place.set(yticks=[], ylim=(-0.12, 1.04), xlim=(-0.1, len(axes) - 0.6))
    for side in ("top", "left", "right", "bottom"):
        place.spines[side].set_visible(False)


def draw_curves(place: Any, metric: str, lines: Sequence[Line]) -> None:
    """Draw the metric over iterations; a curve that ends early was given up there."""
    for line in lines:
        if line.curve:
            best = line.goodness == 1
            label = f"trial {line.trial.number}, the best" if best else None
            place.plot(*zip(*line.curve, strict=True), color=line.color, linewidth=2.5 if best else 1.0, label=label)
            if str(line.trial.state) == "stopped":
                place.plot(*line.curve[-1], marker="x", color=line.color, markersize=5)
    place.set(xlabel="iteration", ylabel=metric)
    place.grid(visible=True, alpha=0.3)
    if any(line.curve and line.goodness == 1 for line in lines):
        place.legend()


def _save(plt: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(
            "the PNG pictures need matplotlib, which is not installed", hint="Run: pip install 'phalanx[tune]'"
        ) from error
    matplotlib.use("agg", force=False)
    import matplotlib.pyplot as plt

    return plt
