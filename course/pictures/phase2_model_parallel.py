"""Draw the model parallel pictures of phase 2: python course/pictures/phase2_model_parallel.py [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

from draw import Picture

UNIT = 18
"""Width of one unit of time: a forward takes 1, a backward 2."""


def order(kind: str, stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    """Return the work of one stage."""
    ahead = count if kind == "gpipe" else min(stages - stage, count)
    actions = [("F", number) for number in range(ahead)]
    for number in range(count):
        actions.append(("B", number))
        if ahead + number < count:
            actions.append(("F", ahead + number))
    return actions


def times(kind: str, stages: int, count: int) -> dict[tuple[str, int, int], int]:
    """Return when each (kind, stage, micro-batch) begins, if each stage begins as soon as it can."""
    ends: dict[tuple[str, int, int], int] = {}
    begins: dict[tuple[str, int, int], int] = {}
    queues = [order(kind, stage, stages, count) for stage in range(stages)]
    clocks = [0] * stages
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                action, number = queue[0]
                source = stage - 1 if action == "F" else stage + 1
                if 0 <= source < stages and (action, source, number) not in ends:
                    break
                begin = max(clocks[stage], ends.get((action, source, number), 0))
                begins[action, stage, number] = begin
                clocks[stage] = ends[action, stage, number] = begin + (1 if action == "F" else 2)
                queue.pop(0)
    return begins


def draw_pipeline(folder: Path) -> None:
    """GPipe and 1F1B on 3 stages with 6 micro-batches: the same time, less memory."""
    stages, count = 3, 6
    picture = Picture(640, 330, "3 stages, 6 micro-batches: forward takes 1 unit, backward 2")
    for row, kind in enumerate(("gpipe", "1f1b")):
        top = 62 + 130 * row
        picture.text(16, top, kind, bold=True)
        begins = times(kind, stages, count)
        for (action, stage, number), begin in begins.items():
            width = UNIT * (1 if action == "F" else 2)
            color = "blue" if action == "F" else "orange"
            picture.box(80 + UNIT * begin, top + 10 + 30 * stage, width - 2, 26, str(number), color, size=11)
        for stage in range(stages):
            kept = count if kind == "gpipe" else stages - stage
            picture.text(16, top + 28 + 30 * stage, f"stage {stage}", soft=True)
            end = max(begin for (_, own, _), begin in begins.items() if own == stage) + 2
            picture.text(88 + UNIT * end, top + 28 + 30 * stage, f"keeps {kept}", soft=True)
    picture.text(16, 316, "blue: forward of the micro-batch with this number; orange: backward", soft=True)
    picture.save(folder / "phase2_pipeline.svg")


def draw_split(folder: Path) -> None:
    """Five layers on two ranks."""
    picture = Picture(700, 210, "A model of 5 layers on 2 ranks: what travels")
    for number in range(5):
        rank, x = int(number > 1), 30 + 110 * number + (110 if number > 1 else 0)
        picture.box(x, 80, 90, 40, f"layer {number}", ("blue", "orange")[rank])
        if number not in (1, 4):
            picture.arrow(x + 90, 92, x + 110, 92)
            picture.arrow(x + 110, 110, x + 90, 110, color="pink")
    picture.text(30, 66, "rank 0", bold=True)
    picture.text(360, 66, "rank 1", bold=True)
    picture.arrow(230, 92, 358, 92, "activations")
    picture.arrow(358, 110, 230, 110, color="pink")
    picture.text(294, 130, "gradient of them", size=11, anchor="middle", soft=True)
    picture.text(30, 170, "forward: grey arrows, one message; backward: pink arrows, one message back", soft=True)
    picture.text(
        30, 192, "rank 1 calls requires_grad_() on what it receives, so that backward makes its gradient", soft=True
    )
    picture.save(folder / "phase2_split.svg")


def draw_tensor_parallel(folder: Path) -> None:
    """A pair of layers on two ranks: where the two collectives stand."""
    picture = Picture(800, 300, "A column layer and a row layer on 2 ranks")
    for rank, y in enumerate((80, 180)):
        color = ("blue", "orange")[rank]
        picture.text(16, y + 30, f"rank {rank}", bold=True)
        picture.box(80, y, 70, 50, "inputs\n(whole)", "grey")
        picture.box(190, y, 110, 50, f"column layer\nhidden block {rank}", color, size=11)
        picture.box(340, y, 60, 50, "GELU", color)
        picture.box(440, y, 110, 50, f"row layer\nhidden block {rank}", color, size=11)
        picture.box(640, y, 130, 50, "outputs (whole)\n+ row bias", "grey", size=11)
        for begin, end in ((150, 190), (300, 340), (400, 440), (550, 580), (608, 640)):
            picture.arrow(begin, y + 25, end, y + 25)
    picture.box(580, 70, 28, 170, "sum", "violet")
    picture.text(594, 262, "forward: all-reduce", anchor="middle", size=11, soft=True)
    picture.box(158, 70, 24, 170, "", "pink-outline")
    picture.text(170, 262, "backward: all-reduce", anchor="middle", size=11, soft=True)
    picture.text(370, 262, "no message between the two layers", anchor="middle", size=11, soft=True)
    picture.save(folder / "phase2_tensor_parallel.svg")


def main() -> None:
    """Draw all pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for draw in (draw_split, draw_pipeline, draw_tensor_parallel):
        draw(folder)


if __name__ == "__main__":
    main()
