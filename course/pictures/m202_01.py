"""Pictures of lecture 1: ways to divide training, pipeline schedules, efficiency: `python m202_01.py [DIR]`."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from draw import Picture

HERE = Path(__file__).resolve().parent
LAYERS = ("blue", "teal", "green", "orange")


def parallelism(folder: Path) -> None:
    """Draw what four ranks hold of a model of four layers and of a batch, for five ways to divide them."""
    picture = Picture(960, 330, "What each of four ranks holds: layers (colours) and samples (grey)")
    ways = (
        ("data", "whole model, own samples", lambda rank, layer: 1.0, lambda rank: (rank, 1)),
        ("ZeRO 3 / FSDP", "1/4 of each layer, own samples", lambda rank, layer: 0.25, lambda rank: (rank, 1)),
        ("tensor", "1/4 of each layer, all samples", lambda rank, layer: 0.25, lambda rank: (0, 4)),
        ("pipeline", "one layer, all samples", lambda rank, layer: float(rank == layer), lambda rank: (0, 4)),
        ("context", "whole model, 1/4 of each sample", lambda rank, layer: 1.0, lambda rank: (-1, 4)),
    )
    for column, (name, text, share, samples) in enumerate(ways):
        left = 16 + column * 188
        picture.text(left, 56, name, size=14, bold=True)
        picture.text(left, 74, text, size=11, soft=True)
        for rank in range(4):
            top = 88 + rank * 58
            picture.text(left, top + 24, f"{rank}", size=12, soft=True)
            for layer, color in enumerate(LAYERS):
                x = left + 16 + layer * 28
                picture.box(x, top, 24, 36, color=f"{color}-outline")
                if share(rank, layer):
                    height = 36 * share(rank, layer)
                    picture.box(x, top + (36 - height) * (rank / 3 if height < 36 else 0), 24, height, color=color)
            first, count = samples(rank)
            for sample in range(4):
                x, y = left + 136, top + sample * 9
                picture.box(x, y, 28, 8, color="grey-outline")
                if first < 0:
                    picture.box(x + 7 * rank, y, 7, 8, color="grey")
                elif first <= sample < first + count:
                    picture.box(x, y, 28, 8, color="grey")
    picture.save(folder / "m202-parallelism.svg")


def schedule(stages: int, batches: int, *, one_by_one: bool) -> list[tuple[int, float, float, str, int]]:
    """Return (stage, start, end, kind, micro-batch) of GPipe or of 1F1B; forward takes 1, backward 2."""
    orders = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, batches) if one_by_one else batches
        order = [("F", number) for number in range(ahead)]
        for number in range(batches - ahead):
            order += [("F", number + ahead), ("B", number)]
        orders.append(order + [("B", number) for number in range(batches - ahead, batches)])
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * stages
    done = []
    while any(orders):
        for stage, order in enumerate(orders):
            if not order:
                continue
            kind, number = order[0]
            before = (kind, stage - 1, number) if kind == "F" else (kind, stage + 1, number)
            needed = [("F", stage, number)] if kind == "B" else []
            if 0 <= before[1] < stages:
                needed.append(before)
            if all(key in ends for key in needed):
                start = max([free[stage], *(ends[key] for key in needed)])
                free[stage] = ends[kind, stage, number] = start + (1 if kind == "F" else 2)
                done.append((stage, start, free[stage], kind, number))
                order.pop(0)
    return done


def pipeline(folder: Path) -> None:
    """Draw GPipe and 1F1B for four stages and eight micro-batches."""
    picture = Picture(960, 320, "Four stages, eight micro-batches: F forward, B backward; white is idle")
    for row, (name, one_by_one) in enumerate((("GPipe", False), ("1F1B", True))):
        top = 60 + row * 128
        picture.text(
            16, top - 8, f"{name}: a stage keeps up to {4 if one_by_one else 8} micro-batches", size=12, bold=True
        )
        for stage, start, end, kind, number in schedule(4, 8, one_by_one=one_by_one):
            color = "blue" if kind == "F" else "orange"
            x, width = 70 + start * 26, (end - start) * 26 - 1
            picture.box(x, top + stage * 24, width, 21, f"{kind}{number}", color, size=10)
        for stage in range(4):
            picture.text(16, top + 15 + stage * 24, f"stage {stage}", size=11, soft=True)
    picture.save(folder / "m202-pipeline.svg")


def efficiency_of(ranks: int, gb_per_s: float) -> float:
    """The efficiency of lecture 1, section 5.1."""
    if ranks == 1:
        return 1.0
    ring = 2 * (ranks - 1) / ranks * 0.25 / gb_per_s * 1000 + 2 * (ranks - 1) * 0.03
    return 100 / (100 + max(0.0, ring - 0.8 * 100 * 2 / 3))


def efficiency(folder: Path) -> None:
    """Draw the weak-scaling efficiency of data parallelism over three networks."""
    picture = Picture(720, 340, "Scaling efficiency of data parallelism, 0.25 GB of gradients, 100 ms of computation")
    left, top, width, height = 60, 50, 560, 230
    for share in range(0, 101, 25):
        y = top + height * (1 - share / 100)
        picture.line(left, y, left + width, y, dashed=True)
        picture.text(left - 8, y + 4, f"{share}%", size=11, anchor="end", soft=True)
    ranks = [2**power for power in range(11)]
    for number in ranks:
        x = left + width * math.log2(number) / 10
        picture.text(x, top + height + 18, str(number), size=11, anchor="middle", soft=True)
    picture.text(left + width / 2, top + height + 40, "ranks", size=12, anchor="middle", soft=True)
    for name, speed, color in (
        ("NVLink 235 GB/s", 235, "green"),
        ("HDR 24 GB/s", 23.8, "blue"),
        ("10 GbE", 1.1, "pink"),
    ):
        points = [
            (left + width * math.log2(number) / 10, top + height * (1 - efficiency_of(number, speed)))
            for number in ranks
        ]
        picture.curve(points, color)
        picture.text(left + width + 8, points[-1][1] + 4, name, size=11)
    picture.save(folder / "m202-efficiency.svg")


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    parallelism(place)
    pipeline(place)
    efficiency(place)
