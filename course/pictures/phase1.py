"""Draw the pictures of phase 1: python course/pictures/phase1.py [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

from draw import Picture

RANKS = ("blue", "orange", "green", "pink")
"""The color of each rank."""


def draw_step(folder: Path) -> None:
    """One step of data parallel training on three ranks."""
    picture = Picture(760, 340, "One step of data parallel training on 3 ranks")
    rows = (
        ("its part of the batch", 50),
        ("the same weights", 105),
        ("its own gradient", 160),
        ("the same update", 280),
    )
    for text, y in rows:
        picture.text(16, y + 22, text, soft=True)
    for rank in range(3):
        x, color = 190 + 190 * rank, RANKS[rank]
        samples = [f"{position}" for position in range(rank, 12, 3)]
        picture.box(x, 50, 160, 34, f"rank {rank}: samples " + " ".join(samples), color, size=11)
        picture.box(x, 105, 160, 34, "model w", "grey-outline")
        picture.box(x, 160, 160, 34, f"gradient g{rank}", color)
        picture.box(x, 280, 160, 34, "w - lr * g", "grey-outline")
        for top, bottom in ((84, 105), (139, 160), (194, 215), (249, 280)):
            picture.arrow(x + 80, top, x + 80, bottom)
    picture.box(190, 215, 540, 34, "all-reduce: g = (g0 + g1 + g2) / 3 on every rank", "violet")
    picture.save(folder / "phase1_step.svg")


def draw_shards(folder: Path) -> None:
    """The order of 10 samples, padded for 4 ranks, and the share of each rank."""
    size, world = 10, 4
    order = [7, 2, 9, 0, 5, 3, 8, 1, 6, 4]
    padded = [order[position % size] for position in range(-(-size // world) * world)]
    picture = Picture(760, 300, f"shard-indices: {size} samples, {world} ranks")
    picture.text(16, 72, "order, padded", soft=True)
    for position, sample in enumerate(padded):
        color = RANKS[position % world] + ("-outline" if position >= size else "")
        picture.box(130 + 50 * position, 50, 44, 34, str(sample), color)
    picture.text(724, 44, "padding: the beginning again", size=11, anchor="end", soft=True)
    for rank in range(world):
        y = 120 + 42 * rank
        picture.text(16, y + 22, f"rank {rank} reads", soft=True)
        for step, sample in enumerate(padded[rank::world]):
            position = step * world + rank
            color = RANKS[rank] + ("-outline" if position >= size else "")
            picture.box(130 + 50 * step, y, 44, 34, str(sample), color)
        picture.text(300, y + 22, f"positions {', '.join(str(p) for p in range(rank, len(padded), world))}", size=11)
    picture.save(folder / "phase1_shards.svg")


def tree_messages(world: int) -> list[list[tuple[int, int]]]:
    """Return the messages of the way up, by round."""
    rounds = []
    distance = 1
    while distance < world:
        children = range(distance, world, 2 * distance)
        rounds.append([(child, child - distance) for child in children])
        distance *= 2
    return rounds


def draw_variants(folder: Path) -> None:
    """The messages of the three all-reduces on four ranks, round by round."""
    world = 4
    up = tree_messages(world)
    down = [[(parent, child) for child, parent in pairs] for pairs in reversed(up)]
    everyone = [(source, target) for source in range(world) for target in range(world) if source != target]
    plans = (
        ("root", [[(other, 0)] for other in range(1, world)] + [[(0, other)] for other in range(1, world)]),
        ("exchange", [everyone]),
        ("tree", up + down),
    )
    picture = Picture(980, 300, f"Three all-reduces on {world} ranks: one column per round, one arrow per message")
    x = 30.0
    for name, rounds in plans:
        width = 30 + 56.0 * len(rounds) + (100 if name == "exchange" else 0)
        messages = sum(len(pairs) for pairs in rounds)
        picture.text(x, 60, name, size=14, bold=True)
        picture.text(
            x, 78, f"{messages} messages, {len(rounds)} rounds" if len(rounds) > 1 else "12 messages, 1 round", size=11
        )
        for rank in range(world):
            y = 115 + 48 * rank
            picture.line(x + 24, y, x + width, y)
            picture.box(x - 6, y - 13, 30, 26, str(rank), RANKS[rank])
        for number, pairs in enumerate(rounds):
            for place, (source, target) in enumerate(pairs):
                gap = 11 * place if name == "exchange" else 14 * place
                at = x + 48 + 56 * number + gap
                picture.arrow(at, 115 + 48 * source, at, 115 + 48 * target, color=RANKS[source])
        x += width + 60
    picture.save(folder / "phase1_all_reduce.svg")


def main() -> None:
    """Draw all of them into the folder that is given, or beside this script."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for draw in (draw_step, draw_shards, draw_variants):
        draw(folder)


if __name__ == "__main__":
    main()
