"""Pictures of lecture 5: the bits of number formats: `python m202_05.py [DIR]`."""

from __future__ import annotations

import sys
from pathlib import Path

from draw import Picture

HERE = Path(__file__).resolve().parent
FORMATS = (("FP32", 8, 23), ("TF32", 8, 10), ("FP16", 5, 10), ("BF16", 8, 7), ("FP8 E5M2", 5, 2), ("FP8 E4M3", 4, 3))
SIDE = 22


def formats(folder: Path) -> None:
    """Draw sign, exponent and mantissa of each format, one box per bit."""
    picture = Picture(860, 290, "Bits of number formats: sign, exponent (range), mantissa (digits)")
    for row, (name, exponent, mantissa) in enumerate(FORMATS):
        top = 48 + row * 38
        picture.text(16, top + 17, name, size=13, bold=True)
        colors = ["grey"] + ["blue"] * exponent + ["orange"] * mantissa
        for place, color in enumerate(colors):
            picture.box(100 + place * SIDE, top, SIDE - 3, 24, color=color)
        end = 100 + len(colors) * SIDE
        picture.text(end + 8, top + 17, f"{exponent} + {mantissa}", size=12, soft=True)
    picture.save(folder / "m202-formats.svg")


if __name__ == "__main__":
    formats(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
