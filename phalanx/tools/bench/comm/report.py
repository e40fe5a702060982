"""The table and the plots of `phalanx bench comm`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.errors import UsageError
from phalanx.tools.bench.comm.plan import REDUCING, bus_factor

HEADER = (
    f"{'algo':<17}{'size':>12}{'count':>12}{'type':>10}{'redop':>7}{'time':>12}{'algbw':>9}{'busbw':>9}{'#wrong':>8}\n"
    f"{'':<17}{'(B)':>12}{'(elements)':>12}{'':>10}{'':>7}{'(us)':>12}{'(GB/s)':>9}{'(GB/s)':>9}"
)


@dataclass(frozen=True)
class BenchRow:
    """One size by one algorithm. The time is the median of the iterations, on the slowest rank."""

    op: str
    algo: str
    ranks: int
    size_bytes: int
    count: int
    dtype: str
    redop: str
    time_us: float
    wrong: int
    ranks_per_gpu: int = 1
    """Over 1: ranks shared GPUs, and the time says nothing about several."""

    @property
    def algbw_gbs(self) -> float:
        """Bytes of the tensor for each second, in GB (10^9)."""
        return self.size_bytes / self.time_us / 1e3

    @property
    def busbw_gbs(self) -> float:
        """The same, as the load of a link: comparable between numbers of ranks and with the specification."""
        return self.algbw_gbs * bus_factor(self.op, self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as it goes into JSON."""
        return {**asdict(self), "algbw_gbs": self.algbw_gbs, "busbw_gbs": self.busbw_gbs}

    def __str__(self) -> str:
        redop = self.redop if self.op in REDUCING else "none"
        return (
            f"{self.algo:<17}{self.size_bytes:>12}{self.count:>12}{self.dtype:>10}{redop:>7}{self.time_us:>12.1f}"
            f"{self.algbw_gbs:>9.2f}{self.busbw_gbs:>9.2f}{self.wrong:>8}"
        )


def make_row(found: dict[str, Any]) -> BenchRow:
    """Read a row from JSON."""
    return BenchRow(**{name: found[name] for name in BenchRow.__dataclass_fields__})


def matrix_table(title: str, numbers: Sequence[Sequence[float]], unit: str) -> str:
    """Return numbers between pairs of ranks as a table."""
    size = len(numbers)
    lines = [f"{title} ({unit})", "from\\to" + "".join(f"{rank:>9}" for rank in range(size))]
    for rank, row in enumerate(numbers):
        cells = ("-" if other == rank else f"{value:.2f}" for other, value in enumerate(row))
        lines.append(f"{rank:<7}" + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def side_by_side(rows: Sequence[BenchRow]) -> str:
    """Return the bus bandwidth of all algorithms as columns, one line per size; nothing for a single one."""
    algos = list(dict.fromkeys(row.algo for row in rows))
    if len(algos) < 2:
        return ""
    found = {(row.algo, row.size_bytes): row.busbw_gbs for row in rows}
    lines = ["busbw (GB/s)".ljust(14) + "".join(f"{algo:>17}" for algo in algos)]
    for size in sorted({row.size_bytes for row in rows}):
        cells = (f"{found[algo, size]:.3f}" if (algo, size) in found else "-" for algo in algos)
        lines.append(f"{size:<14}" + "".join(f"{cell:>17}" for cell in cells))
    return "\n".join(lines)


def check_plotting(path: str) -> None:
    """Raise for a plot that cannot be drawn, before anything is measured."""
    _pyplot()
    if "." not in path.rsplit("/", 1)[-1]:
        raise UsageError(f"--plot {path}: the name has no format", hint=f"Write --plot {path}.png")


def plot_rows(rows: Sequence[BenchRow], path: str) -> None:
    """Draw time and bus bandwidth over size, one line per algorithm."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for algo in dict.fromkeys(row.algo for row in rows):
        chosen = [row for row in rows if row.algo == algo]
        sizes = [row.size_bytes for row in chosen]
        left.plot(sizes, [row.time_us for row in chosen], marker="o", label=algo)
        right.plot(sizes, [row.busbw_gbs for row in chosen], marker="o", label=algo)
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
        hidden[rank][rank] = float("nan")  # no rank sends to itself
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
    except (OSError, ValueError) as error:  # no such folder or format
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
