"""The table and the plots of `phalanx bench comm`, and the nominal speed of the links."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.tools.bench.comm.plan import REDUCING, bus_factor
from phalanx.tools.svg import COLORS, Axis, Plot, drawing, write_picture

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


def make_row(fields: dict[str, Any]) -> BenchRow:
    """Read a row from JSON."""
    return BenchRow(**{name: fields[name] for name in BenchRow.__dataclass_fields__})


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
    bandwidth_of = {(row.algo, row.size_bytes): row.busbw_gbs for row in rows}
    lines = ["busbw (GB/s)".ljust(14) + "".join(f"{algo:>17}" for algo in algos)]
    for size in sorted({row.size_bytes for row in rows}):
        cells = (f"{bandwidth_of[algo, size]:.3f}" if (algo, size) in bandwidth_of else "-" for algo in algos)
        lines.append(f"{size:<14}" + "".join(f"{cell:>17}" for cell in cells))
    return "\n".join(lines)


_CELL = (520, 400)


def plot_rows(rows: Sequence[BenchRow], path: str) -> None:
    """Draw time and bus bandwidth over size, one line per algorithm."""
    algos = list(dict.fromkeys(row.algo for row in rows))
    charts = []
    for label, name in (("time (us)", "time_us"), ("bus bandwidth (GB/s)", "busbw_gbs")):
        points = {algo: [(row.size_bytes, getattr(row, name)) for row in rows if row.algo == algo] for algo in algos}
        sizes, values = zip(*(point for line in points.values() for point in line), strict=True)
        x, y = (
            Axis(title, min(numbers), max(numbers), log=True) for title, numbers in (("bytes", sizes), (label, values))
        )
        plot = Plot(x, y, _CELL)
        for (algo, line), color in zip(points.items(), COLORS, strict=False):
            plot.line(line, color, algo)
            for point in line:
                plot.mark(point, color, f"{algo}: {point[1]:.4g}")
        charts.append(plot.svg())
    write_picture(path, f"{rows[0].op} on {rows[0].ranks} ranks, {rows[0].dtype}", charts, _CELL, algos)


def plot_links(latency_us: list[list[float]], bandwidth_gbs: list[list[float]], path: str) -> None:
    """Draw latency and bandwidth of every pair of ranks as heat maps."""
    charts = [_heat_map("latency (us)", latency_us), _heat_map("bandwidth (GB/s)", bandwidth_gbs)]
    write_picture(path, f"links between {len(latency_us)} ranks, from each (row) to each (column)", charts, _CELL, [])


def _heat_map(title: str, numbers: list[list[float]]) -> str:
    """Return a cell per pair of ranks, the larger the number the darker; no rank sends to itself."""
    side = 320 / len(numbers)
    most = max((value for line in numbers for value in line), default=0.0) or 1.0
    parts = [f'<text class="name" x="16" y="20">{title}</text>']
    for row, line in enumerate(numbers):
        for column, value in enumerate(line):
            x, y, shade = 16 + column * side, 32 + row * side, 0.15 + 0.85 * value / most
            box = f'x="{x:.1f}" y="{y:.1f}" width="{side - 1:.1f}" height="{side - 1:.1f}"'
            if row != column:
                parts.append(f'<rect {box} fill="#3b6fb6" fill-opacity="{shade:.2f}"/>')
                parts.append(f'<text class="name" x="{x + side / 3:.1f}" y="{y + side / 2:.1f}">{value:.2g}</text>')
    return drawing(_CELL, parts)


_INTERFACES = Path("/sys/class/net")
_LANE_GBS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""PCIe, GB/s per lane by generation."""


@dataclass(frozen=True)
class ExpectedLink:
    """One link and its expected bandwidth in GB/s; None where it is not known."""

    name: str
    expected_gbs: float | None
    source: str


def network_links(interfaces: Path = _INTERFACES) -> list[ExpectedLink]:
    """Return the network cards that are up, with the speed their driver reports."""
    links = []
    for path in sorted(interfaces.glob("*")):
        if path.name == "lo" or _read(path / "operstate") not in ("up", "unknown"):
            continue
        megabits = _read(path / "speed")
        has_speed = bool(re.fullmatch(r"[1-9]\d*", megabits))
        rate = int(megabits) / 8e3 if has_speed else None
        links.append(ExpectedLink(path.name, rate, f"{path / 'speed'}" if has_speed else "its driver does not say"))
    return links


def gpu_links() -> list[ExpectedLink]:
    """Return how GPUs are connected, by nvidia-smi; nothing without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    nvlink = _ask("nvidia-smi", "nvlink", "--status")
    pcie = _ask("nvidia-smi", "--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader")
    return [*parse_nvlink(nvlink), *parse_pcie(pcie)]


def parse_nvlink(text: str) -> list[ExpectedLink]:
    """Add up the links of each GPU (`Link 0: 26.562 GB/s`)."""
    links = []
    for block in re.split(r"^(?=GPU \d+)", text, flags=re.MULTILINE):
        number = re.match(r"GPU (\d+)", block)
        rates = [float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", block)]
        if number and rates:
            links.append(ExpectedLink(f"GPU {number[1]} NVLink", sum(rates), f"nvidia-smi: {len(rates)} links"))
    return links


def parse_pcie(text: str) -> list[ExpectedLink]:
    """Read generation and width of each GPU's PCIe link (`5, 16`)."""
    links = []
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines()))):
        match = re.fullmatch(r"(\d+), (\d+)", line)
        if match:
            rate = _LANE_GBS.get(int(match[1]), 0.0) * int(match[2])
            links.append(ExpectedLink(f"GPU {number} PCIe", rate or None, f"nvidia-smi: gen {match[1]} x{match[2]}"))
    return links


def link_table(measured_gbs: float, copy_gbs: float, *, one_host: bool, links: list[ExpectedLink]) -> str:
    """Return expected and measured bandwidth. Ranks of one host communicate through memory, not its cards."""
    memory = ExpectedLink("memory (loopback)", copy_gbs, "one core copies, measured here")
    lines = [
        f"{'link':<22}{'expected':>10}{'measured':>10}{'share':>8}   expected by",
        " " * 22 + "    (GB/s)    (GB/s)",
    ]
    for link in [memory, *links] if one_host else links:
        used = one_host == (link is memory)
        expected = f"{link.expected_gbs:.2f}" if link.expected_gbs is not None else "?"
        rate = f"{measured_gbs:.2f}" if used else "-"
        share = f"{measured_gbs / link.expected_gbs:.0%}" if used and link.expected_gbs else "-"
        lines.append(f"{link.name:<22}{expected:>10}{rate:>10}{share:>8}   {link.source}")
    return "\n".join(lines)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the kernel gives no speed for some links
        return ""


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
