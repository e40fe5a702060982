"""Pictures of a benchmark: bandwidth over size, and the links between ranks as a heat map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.comm.bench.report import Row


def check_plotting(path: str) -> None:
    """Refuse a picture that could not be drawn, before anything is measured."""
    _pyplot()
    if "." not in path.rsplit("/", 1)[-1]:
        raise UsageError(f"--plot {path}: the name says no format", hint=f"Write --plot {path}.png")


def plot_rows(rows: Sequence[Row], path: str) -> None:
    """Draw time and bus bandwidth over size, a line an algorithm."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for algo in dict.fromkeys(row.algo for row in rows):
        mine = [row for row in rows if row.algo == algo]
        sizes = [row.size_bytes for row in mine]
        left.plot(sizes, [row.time_us for row in mine], marker="o", label=algo)
        right.plot(sizes, [row.busbw_gbs for row in mine], marker="o", label=algo)
    for axes, label in ((left, "time (us)"), (right, "bus bandwidth (GB/s)")):
        axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel=label)
        axes.grid(visible=True, alpha=0.3)
    right.legend()
    figure.suptitle(f"{rows[0].op} on {rows[0].ranks} ranks, {rows[0].dtype}")
    _save(figure, path, plt)


def plot_links(latency_us: list[list[float]], bandwidth_gbs: list[list[float]], path: str) -> None:
    """Draw latency and bandwidth of every pair of ranks as heat maps."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for place, title, numbers in ((axes[0], "latency (us)", latency_us), (axes[1], "bandwidth (GB/s)", bandwidth_gbs)):
        _draw_matrix(figure, place, title, numbers)
    _save(figure, path, plt)


def _draw_matrix(figure: Any, axes: Any, title: str, numbers: list[list[float]]) -> None:
    hidden = [list(line) for line in numbers]
    for rank in range(len(hidden)):
        hidden[rank][rank] = float("nan")  # nobody sends to itself
    image = axes.imshow(hidden)
    for row, line in enumerate(hidden):
        for column, value in enumerate(line):
            if row != column:
                axes.text(column, row, f"{value:.2g}", ha="center", va="center", color="white")
    axes.set(title=title, xlabel="to rank", ylabel="from rank", xticks=range(len(numbers)), yticks=range(len(numbers)))
    figure.colorbar(image, ax=axes)


def _save(figure: Any, path: str, plt: Any) -> None:
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:  # a folder that is not there, a format that is none
        raise UsageError(f"--plot {path}: {error}") from None
    finally:
        plt.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UsageError("plots need matplotlib", hint="pip install 'phalanx[bench]'") from None
    matplotlib.use("Agg")  # no screen needed
    from matplotlib import pyplot

    return pyplot
