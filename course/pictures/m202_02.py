"""Pictures of lecture 2: the processes of a Ray cluster, trials under successive halving: `python m202_02.py [DIR]`."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

from draw import Picture

HERE = Path(__file__).resolve().parent


def processes(folder: Path) -> None:
    """Draw two nodes with raylet, object store and workers, the control service, and the way of a task."""
    picture = Picture(760, 400, "The processes of a Ray cluster of two nodes, and the way of a task")
    for name, x in (("head node", 20), ("second node", 400)):
        picture.box(x, 46, 340, 300, color="grey-outline")
        picture.text(x + 12, 66, name, size=13, bold=True)
        text = "object store in shared memory\nimmutable objects, read without a copy"
        picture.box(x + 20, 270, 300, 56, text, color="green")
        picture.arrow(x + 80, 220, x + 80, 268, color="green")
        picture.arrow(x + 260, 220, x + 260, 268, color="green")
    picture.box(40, 84, 140, 50, "GCS: nodes, actors,\nplacement groups", color="violet")
    picture.box(220, 84, 120, 50, "driver\nyour program", color="orange")
    picture.box(40, 170, 120, 50, "worker\na task", color="teal")
    picture.box(220, 170, 120, 50, "raylet\nscheduler", color="blue")
    picture.box(420, 170, 120, 50, "raylet\nscheduler", color="blue")
    picture.box(600, 84, 120, 50, "worker\na task", color="teal")
    picture.box(600, 170, 120, 50, "worker\nan actor", color="pink")
    picture.arrow(280, 134, 280, 168, color="orange")
    picture.text(288, 156, "1 lease", size=11, soft=True)
    picture.arrow(340, 195, 418, 195, color="blue")
    picture.text(380, 188, "2 next", size=11, anchor="middle", soft=True)
    picture.arrow(340, 104, 598, 104, color="orange")
    picture.text(440, 98, "3 the task itself", size=11, soft=True)
    picture.arrow(150, 134, 222, 172, color="violet", dashed=True)
    picture.arrow(340, 298, 418, 298, color="green")
    picture.text(
        20,
        372,
        "The control service is asked for actors and placement groups, not for tasks. Objects move between stores.",
        size=12,
    )
    picture.save(folder / "m202-ray.svg")


def make_trials(count: int, seed: int = 0) -> list[tuple[float, float]]:
    """Return learning rates with some noise, as in section 4.2 of the lecture."""
    draw = random.Random(seed)
    return [(10 ** draw.uniform(-4, 0), draw.random()) for _ in range(count)]


def loss_at(trial: tuple[float, float], epoch: float) -> float:
    """Return the loss of a trial at an epoch, as in section 4.2 of the lecture."""
    rate, noise = trial
    final = 0.2 + 0.25 * abs(math.log10(rate) + 1.5)
    return final + (2 - final) * math.exp(-epoch * (0.3 + rate**0.5)) + 0.05 * noise / epoch


def halving(folder: Path) -> None:
    """Draw the curves of 81 trials by how far they come, with the first rung at epoch 1 and at epoch 9."""
    picture = Picture(760, 350, "Successive halving of 81 trials: the first rung at epoch 1, and at epoch 9")
    colors = ("grey", "sand", "teal", "orange", "pink")
    best = min(make_trials(81), key=lambda trial: loss_at(trial, 81))
    for column, first in enumerate((1, 9)):
        left, top, width, height = 50 + column * 370, 56, 310, 220

        def place(epoch: float, loss: float, left: int = left) -> tuple[float, float]:
            x = left + 310 * math.log(epoch) / math.log(81)
            return x, 56 + 220 * (1 - min(max(loss, 0.15), 2.0) / 2.0)

        for loss in (0.0, 0.5, 1.0, 1.5, 2.0):
            y = top + height * (1 - loss / 2)
            picture.line(left, y, left + width, y, dashed=True)
            picture.text(left - 6, y + 4, f"{loss:.1f}", size=11, anchor="end", soft=True)
        for epoch in (1, 3, 9, 27, 81):
            picture.text(place(epoch, 0)[0], top + height + 18, str(epoch), size=11, anchor="middle", soft=True)
        alive, rung, step = make_trials(81), first, 0
        while alive:
            going = sorted(alive, key=lambda trial: loss_at(trial, rung))[: len(alive) // 3] if rung < 81 else []
            for trial in set(alive) - set(going):
                points = [
                    place(3 ** (at / 5), loss_at(trial, 3 ** (at / 5))) for at in range(21) if 3 ** (at / 5) <= rung
                ]
                if len(points) > 1:
                    picture.curve(points, colors[step])
                x, y = place(rung, loss_at(trial, rung))
                picture.box(x - 2, y - 2, 4, 4, color=colors[step])
            alive, rung, step = going, rung * 3, step + 1
        x, y = place(81, loss_at(best, 81))
        picture.box(x - 5, y - 5, 10, 10, color="blue-outline")
    picture.text(
        50,
        322,
        "Colours: how far a trial came. Squares: where it ended. Blue frame: the best if all were trained to the end;",
        size=12,
    )
    picture.text(50, 338, "with the first rung at epoch 1 it was stopped.", size=12)
    picture.save(folder / "m202-asha.svg")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    processes(target)
    halving(target)
