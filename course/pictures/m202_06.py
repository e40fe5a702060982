"""Pictures of lecture 6: what is lost by the interval between checkpoints: `python m202_06.py [DIR]`."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from draw import Picture

HERE = Path(__file__).resolve().parent


def lost(interval: float, cost: float, mtbf: float, recovery: float = 600.0) -> float:
    """The share of time that is lost, as in section 2 of the lecture."""
    return cost / interval + (interval / 2 + recovery) / mtbf


def intervals(folder: Path) -> None:
    """Draw the lost share by interval for two failure rates and two costs, with Young's interval on each."""
    picture = Picture(760, 340, "Time lost to saving, repeating and recovering, by the interval between checkpoints")
    left, top, width, height, most = 60, 50, 480, 230, 0.25
    for share in (0.0, 0.05, 0.10, 0.15, 0.20, 0.25):
        y = top + height * (1 - share / most)
        picture.line(left, y, left + width, y, dashed=True)
        picture.text(left - 8, y + 4, f"{share:.0%}", size=11, anchor="end", soft=True)
    first, last = math.log(60), math.log(24 * 3600)

    def place(interval: float) -> float:
        return left + width * (math.log(interval) - first) / (last - first)

    for seconds, name in ((60, "1 min"), (600, "10 min"), (3600, "1 h"), (6 * 3600, "6 h"), (24 * 3600, "24 h")):
        picture.text(place(seconds), top + height + 18, name, size=11, anchor="middle", soft=True)
    cases = (
        ("every 3 h, 30 s", 3 * 3600.0, 30.0, "pink"),
        ("every 3 h, 1 s", 3 * 3600.0, 1.0, "orange"),
        ("every 100 h, 30 s", 100 * 3600.0, 30.0, "blue"),
        ("every 100 h, 1 s", 100 * 3600.0, 1.0, "green"),
    )
    for row, (name, mtbf, cost, color) in enumerate(cases):
        steps = [math.exp(first + (last - first) * step / 120) for step in range(121)]
        points = [
            (place(at), top + height * (1 - lost(at, cost, mtbf) / most))
            for at in steps
            if lost(at, cost, mtbf) <= most
        ]
        picture.curve(points, color)
        best = math.sqrt(2 * cost * mtbf)
        picture.box(place(best) - 4, top + height * (1 - lost(best, cost, mtbf) / most) - 4, 8, 8, color=color)
        picture.box(left + width + 20, top + 16 + row * 24, 12, 12, color=color)
        picture.text(left + width + 40, top + 27 + row * 24, name, size=12)
    picture.text(left + width + 20, top + 4, "a failure, a save takes", size=12, bold=True)
    picture.text(left + width + 20, top + 130, "squares: Young's interval", size=12, soft=True)
    picture.save(folder / "m202-intervals.svg")


if __name__ == "__main__":
    intervals(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
