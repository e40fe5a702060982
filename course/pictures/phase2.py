"""Draw the pictures of phase 2 about memory and precision: python course/pictures/phase2.py [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

from draw import Picture

SHARES = {0: [3, 3, 2], 1: [3, 1]}
"""Samples of the micro-batches of each rank."""


def draw_accumulation(folder: Path) -> None:
    """Two ranks with different micro-batches, and one all-reduce per update."""
    picture = Picture(860, 250, "Gradient accumulation: many backward passes, one all-reduce, one update")
    for rank, sizes in SHARES.items():
        x, y = 90.0, 60 + 80 * rank
        picture.text(16, y + 25, f"rank {rank}", bold=True)
        for size in sizes:
            picture.box(x, y, 26 * size, 40, f"fwd {size}" if size > 1 else "f", "blue", size=11)
            picture.box(x + 26 * size + 2, y, 34 * size, 40, "backward" if size > 1 else "bwd", "orange", size=11)
            x += 60 * size + 10
        picture.line(x, y + 20, 606, y + 20, dashed=True)
    tokens = sum(sum(sizes) for sizes in SHARES.values())
    picture.box(606, 60, 110, 120, "all-reduce\nsum of gradients\nand number of\nsamples", "violet", size=11)
    for rank in SHARES:
        picture.box(730, 60 + 80 * rank, 112, 40, f"sum / {tokens}, step", "green", size=11)
    picture.text(
        90, 215, "Each backward adds to .grad and frees the activations of its micro-batch.", size=11, soft=True
    )
    picture.text(
        90, 233, "The number after fwd is the number of samples; the dashed line is waiting.", size=11, soft=True
    )
    picture.save(folder / "phase2_accumulation.svg")


def kept_activations(layers: int, block: int) -> tuple[list[int], list[int]]:
    """Return the activations in memory after each step of forward and backward: all saved, and with recomputation.

    With recomputation the inputs of each block are kept; going back through a block brings its activations once more.
    """
    saved = [*range(1, layers + 1), *range(layers - 1, -1, -1)]
    again = [-(-step // block) for step in range(1, layers + 1)]
    for left in range(layers // block, 0, -1):
        again += [left + inner for inner in range(block - 1, -1, -1)]
    return saved, again


def draw_recompute(folder: Path) -> None:
    """The number of activations in memory over the time of one step."""
    layers, block = 12, 4
    picture = Picture(860, 300, f"Activations in memory: {layers} layers, recomputed in blocks of {block}")
    for row, (values, text, color) in enumerate(
        zip(
            kept_activations(layers, block),
            ("every activation saved", "inputs of blocks saved, blocks recomputed"),
            ("orange", "blue"),
            strict=True,
        )
    ):
        x = 60 + 410 * row
        picture.text(x, 56, f"{text}: at most {max(values)}", size=12)
        for step, value in enumerate(values):
            picture.box(x + 14 * step, 250 - 13 * value, 12, 13 * value, "", color)
        picture.line(x, 250, x + 14 * len(values), 250)
        picture.text(x, 270, "forward", size=11, soft=True)
        picture.text(x + 14 * layers, 270, "backward", size=11, soft=True)
    picture.save(folder / "phase2_recompute.svg")


def draw_precision(folder: Path) -> None:
    """The way of a gradient through a step with loss scaling and master weights."""
    picture = Picture(860, 240, "Mixed precision: small numbers are kept by a scale and by float32 copies")
    stages = (
        ("float16 or bfloat16\nforward, loss", "blue"),
        ("loss * scale\nbackward", "orange"),
        ("gradients / scale\nfinite on all ranks?", "violet"),
        ("clip,\nupdate masters", "green"),
        ("round masters\ninto the model", "blue"),
    )
    for number, (text, color) in enumerate(stages):
        x = 20 + 166 * number
        picture.box(x, 60, 142, 60, text, color)
        if number:
            picture.arrow(x - 24, 90, x, 90)
    picture.box(352, 165, 142, 44, "skip the update,\nhalve the scale", "pink")
    picture.arrow(423, 120, 423, 165)
    picture.text(435, 148, "no: all ranks skip", size=11, soft=True)
    picture.box(518, 165, 142, 44, "masters: float32", "green-outline")
    picture.arrow(589, 120, 589, 165)
    picture.save(folder / "phase2_precision.svg")


def main() -> None:
    """Draw all of them into the folder that is given, or beside this script."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for draw in (draw_accumulation, draw_recompute, draw_precision):
        draw(folder)


if __name__ == "__main__":
    main()
