"""Showing what was measured: rows in nccl-tests' columns, as a table and as JSON. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from phalanx.comm.bench.plan import REDUCING, bus_factor

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER = (
    f"{'algo':<17}{'size':>12}{'count':>12}{'type':>10}{'redop':>7}{'time':>12}{'algbw':>9}{'busbw':>9}{'#wrong':>8}\n"
    f"{'':<17}{'(B)':>12}{'(elements)':>12}{'':>10}{'':>7}{'(us)':>12}{'(GB/s)':>9}{'(GB/s)':>9}"
)


@dataclass(frozen=True)
class Row:
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

    @property
    def algbw_gbs(self) -> float:
        """Bytes of the tensor for each second, in GB (10^9)."""
        return self.size_bytes / self.time_us / 1e3

    @property
    def busbw_gbs(self) -> float:
        """The same, as the load of a link: comparable between numbers of ranks, and with the hardware's own figure."""
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


def make_row(found: dict[str, Any]) -> Row:
    """Read a row from JSON."""
    return Row(**{name: found[name] for name in Row.__dataclass_fields__})


def matrix_table(title: str, numbers: Sequence[Sequence[float]], unit: str) -> str:
    """Return numbers between pairs of ranks as a table."""
    size = len(numbers)
    lines = [f"{title} ({unit})", "from\\to" + "".join(f"{rank:>9}" for rank in range(size))]
    for rank, row in enumerate(numbers):
        cells = ("-" if other == rank else f"{value:.2f}" for other, value in enumerate(row))
        lines.append(f"{rank:<7}" + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def side_by_side(rows: Sequence[Row]) -> str:
    """Return the bus bandwidth of all algorithms beside each other, one line a size; nothing for a single one."""
    algos = list(dict.fromkeys(row.algo for row in rows))
    if len(algos) < 2:
        return ""
    found = {(row.algo, row.size_bytes): row.busbw_gbs for row in rows}
    lines = ["busbw (GB/s)".ljust(14) + "".join(f"{algo:>17}" for algo in algos)]
    for size in sorted({row.size_bytes for row in rows}):
        cells = (f"{found[algo, size]:.3f}" if (algo, size) in found else "-" for algo in algos)
        lines.append(f"{size:<14}" + "".join(f"{cell:>17}" for cell in cells))
    return "\n".join(lines)
