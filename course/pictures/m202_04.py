"""Draw the pictures of lecture 4: the time of an all-reduce by size, and the wires of two machines."""

from __future__ import annotations

import math
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from draw import Picture  # noqa: E402

MEASURED = (
    (1_024, 16.94),
    (8_192, 17.4),
    (65_536, 19.54),
    (262_144, 20.43),
    (1_048_576, 27.37),
    (4_194_304, 54.19),
    (16_777_216, 123.8),
    (67_108_864, 324.7),
    (268_435_456, 1112.5),
    (1_073_741_824, 4029.4),
)
"""Bytes and microseconds of nccl-tests on 8 H100 (NVIDIA/dgxc-benchmarking), out of place."""


def ring_us(ranks: int, size: float) -> float:
    """The ring of lecture 4, section 3.3: 10 us per hop, 23.8 GB/s."""
    return 2 * (ranks - 1) * 10 + 2 * (ranks - 1) / ranks * size / 23.8e3


def tree_us(ranks: int, size: float) -> float:
    """The double binary tree of the same section."""
    return 2 * math.ceil(math.log2(ranks)) * 10 + 2 * size / 23.8e3


def all_reduce(folder: Path) -> None:
    """Draw time over bytes, both logarithmic."""
    picture = Picture(860, 400, "All-reduce: time by size of the tensor")
    left, top, width, height = 70, 50, 560, 290

    def place(size: float, microseconds: float) -> tuple[float, float]:
        x = left + width * (math.log2(size) - 10) / 20
        return x, top + height * (1 - (math.log10(microseconds) - 1) / 4)

    for power, label in ((1, "10 us"), (2, "100 us"), (3, "1 ms"), (4, "10 ms"), (5, "100 ms")):
        y = top + height * (1 - (power - 1) / 4)
        picture.line(left, y, left + width, y, dashed=True)
        picture.text(left - 8, y + 4, label, size=11, anchor="end", soft=True)
    for power, label in ((10, "1 kB"), (15, "32 kB"), (20, "1 MB"), (25, "32 MB"), (30, "1 GB")):
        x = left + width * (power - 10) / 20
        picture.text(x, top + height + 18, label, size=11, anchor="middle", soft=True)
    sizes = [2 ** (10 + step / 4) for step in range(81)]
    rows = (
        ("ring, 256 ranks, InfiniBand", "orange", [(size, ring_us(256, size)) for size in sizes], 4),
        ("tree, 256 ranks, InfiniBand", "green", [(size, tree_us(256, size)) for size in sizes], 20),
        ("8 H100, t = 19 us + s / 246 GB/s", "grey", [(size, 19.2 + size / 246e3) for size in sizes], 22),
        ("8 H100, measured", "blue", list(MEASURED), 0),
    )
    for name, color, points, down in rows:
        picture.curve([place(*point) for point in points], color)
        x, y = place(*points[-1])
        picture.box(x + 10, y + down - 9, 10, 10, color=color)
        picture.text(x + 26, y + down, name, size=11)
    for point in MEASURED:
        x, y = place(*point)
        picture.box(x - 3, y - 3, 6, 6, color="blue")
    picture.text(left + width / 2, top + height + 40, "size of the tensor", size=12, anchor="middle", soft=True)
    picture.save(folder / "m202-allreduce.svg")


def wires(folder: Path) -> None:
    """Draw two machines of four GPUs with their switches and cards, and the path of a message by TCP and by RDMA."""
    picture = Picture(960, 390, "Two machines, four of their eight GPUs and cards: GB/s per GPU and direction")
    for machine, left in enumerate((16, 506)):
        picture.box(left, 44, 438, 270, color="grey-outline")
        picture.text(left + 12, 64, f"machine {machine}", size=12, bold=True)
        picture.box(left + 20, 76, 398, 28, "NVSwitch: 300 (NVLink 3)", "green")
        picture.line(left + 69, 221, left + 369, 221)
        for gpu in range(4):
            x = left + 30 + gpu * 100
            picture.box(x, 130, 78, 34, f"GPU {gpu}", "blue")
            picture.line(x + 39, 104, x + 39, 130)
            picture.line(x + 39, 164, x + 39, 206)
            picture.text(x + 43, 190, "PCIe 32", size=10, soft=True)
            picture.box(x, 206, 78, 30, f"card {gpu}: 25", "orange")
        picture.box(left + 178, 260, 82, 40, "CPUs, host\nmemory", "grey", size=11)
        picture.line(left + 219, 221, left + 219, 260)
    for gpu in range(4):
        x, y = 16 + 30 + gpu * 100 + 39, 324 + gpu * 14
        picture.line(x, 236, x, y)
        picture.line(x + 490, 236, x + 490, y)
        picture.line(x, y, x + 490, y)
        picture.text(480, y - 2, f"rail {gpu}", size=10, anchor="middle", soft=True)
    picture.text(
        16,
        384,
        "A rail joins the cards of equal number: the middle step of a hierarchical all-reduce.",
        size=12,
        soft=True,
    )
    picture.save(folder / "m202-wires.svg")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    all_reduce(target)
    wires(target)
