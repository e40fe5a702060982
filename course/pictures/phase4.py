"""Draw the pictures of phase 4: python course/pictures/phase4.py [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

from draw import Picture

RANKS = ("blue", "orange", "green", "pink")
"""The color of each rank."""


def draw_save(folder: Path) -> None:
    """The operations of an atomic save, and what a kill before each of them leaves."""
    steps = (
        ("open\nstep-200.tmp", "new.tmp is empty", "step 100"),
        ("write\nchecksum, state", "new.tmp is half", "step 100"),
        ("flush, fsync", "new.tmp is whole", "step 100"),
        ("os.replace", "new.tmp is safe", "step 100"),
        ("remove the\noldest", "new and old are whole", "step 200"),
    )
    picture = Picture(800, 250, "atomic-checkpoint: what a kill leaves")
    picture.text(16, 78, "save of 200", soft=True)
    picture.text(16, 148, "a kill at it", soft=True)
    picture.text(16, 205, "load() returns", soft=True)
    for number, (operation, left, loaded) in enumerate(steps):
        x = 130 + 132 * number
        picture.box(x, 50, 112, 48, operation, "violet" if operation == "os.replace" else "blue", size=11)
        if number + 1 < len(steps):
            picture.arrow(x + 112, 74, x + 132, 74)
        picture.arrow(x + 56, 100, x + 56, 128, color="pink", dashed=True)
        picture.text(x + 56, 148, left.replace("new", "200"), size=11, anchor="middle")
        picture.box(x + 16, 182, 80, 34, loaded, "green" if loaded == "step 200" else "grey")
    picture.text(130, 240, "The name of a checkpoint only ever stands for whole content.", size=11, soft=True)
    picture.save(folder / "phase4_save.svg")


def draw_failures(folder: Path) -> None:
    """Beats and progress of a healthy, a hung, a waiting and a dead rank."""
    picture = Picture(800, 300, "detect-failure: beats and progress of four ranks")
    compute = {0: (0, 150), 1: (0, 430), 2: (0, 150), 3: (0, 100)}
    verdict = ("waits for rank 1", "hung: beats, but no progress", "waits for rank 1", "dead: no beats")
    for rank in range(4):
        y = 56 + 56 * rank
        picture.text(16, y + 18, f"rank {rank}")
        start, end = compute[rank]
        picture.box(90 + start, y, end - start, 26, "computes step 7", RANKS[rank], size=11)
        if rank in (0, 2):
            picture.box(90 + end, y, 430 - end, 26, "waiting=True (all-reduce)", RANKS[rank] + "-outline", size=11)
        for beat in range(0, 430, 30):
            if rank != 3 or beat < 100:
                picture.line(96 + beat, y + 30, 96 + beat, y + 38)
        color = "pink" if rank in (1, 3) else "grey-outline"
        picture.box(560, y - 2, 220, 32, verdict[rank], color, size=11)
    picture.text(
        96,
        290,
        "Short lines: beats. Ranks 0 and 2 make no progress either, but they are not the cause.",
        size=11,
        soft=True,
    )
    picture.save(folder / "phase4_failures.svg")


def draw_stragglers(folder: Path) -> None:
    """Compute and waiting time of three steps on three ranks, from the times."""
    times = ((100, 110, 105), (180, 190, 185), (105, 100, 110))
    picture = Picture(800, 230, "find-stragglers: all steps take the same time, but not for the same reason")
    begin = [90]
    for step in range(3):
        begin.append(begin[-1] + max(rank[step] for rank in times) + 40)
    for rank, row in enumerate(times):
        y = 56 + 48 * rank
        picture.text(16, y + 20, f"rank {rank}")
        for step, seconds in enumerate(row):
            end = begin[step + 1] - 12
            picture.box(begin[step], y, seconds, 30, "compute", RANKS[rank], size=11)
            waits = end - begin[step] - seconds
            picture.box(begin[step] + seconds, y, waits, 30, "wait" if waits > 60 else "", "grey-outline", size=11)
    picture.text(
        90,
        215,
        "Rank 1 is the slow one: most compute, least waiting. Its own wait is the time of the transfer.",
        size=11,
        soft=True,
    )
    picture.save(folder / "phase4_stragglers.svg")


def draw_feedback(folder: Path) -> None:
    """Top-1 of four entries with error feedback over three steps, computed here."""
    gradients = ((0.9, 0.4, -0.2, 0.1), (0.9, 0.4, -0.2, 0.1), (0.7, 0.4, -0.2, 0.1))
    picture = Picture(800, 300, "compress-gradients: the largest entry is sent, the rest is kept (top 1 of 4)")
    rest = [0.0] * 4
    for step, gradient in enumerate(gradients):
        y = 60 + 78 * step
        total = [a + b for a, b in zip(gradient, rest, strict=True)]
        largest = max(range(4), key=lambda entry: abs(total[entry]))
        picture.text(16, y + 22, f"step {step + 1}")
        columns = (("gradient", gradient, "blue"), ("plus residual", total, "violet"), ("kept", total, "grey-outline"))
        for column, (name, values, color) in enumerate(columns):
            x = 80 + 240 * column
            picture.text(x, y - 6, name, size=11, soft=True)
            for entry, value in enumerate(values):
                kept = column == 2 and entry == largest
                sent = column == 1 and entry == largest
                text = "0" if kept else f"{value:.1f}"
                picture.box(x + 52 * entry, y, 48, 34, text, "orange" if sent else color)
        rest = [0.0 if entry == largest else value for entry, value in enumerate(total)]
    picture.text(
        80,
        288,
        "Orange: sent. The second entry is never the largest of its gradient, and is sent in step 3.",
        size=11,
        soft=True,
    )
    picture.save(folder / "phase4_feedback.svg")


def main() -> None:
    """Draw all of them into the folder that is given, or beside this script."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for draw in (draw_save, draw_failures, draw_stragglers, draw_feedback):
        draw(folder)


if __name__ == "__main__":
    main()
