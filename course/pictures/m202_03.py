"""Draw the pictures of lecture 3: Horovod's negotiation and fusion, and DDP's Reducer in one backward pass."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from draw import Picture  # noqa: E402

LAYERS = {"g1": "blue", "g2": "teal", "g3": "violet", "g4": "pink"}


def horovod(folder: Path) -> None:
    """Draw one cycle: what is ready on each rank, what the coordinator answers, one all-reduce for all of it."""
    picture = Picture(960, 330, "One cycle of Horovod: ready gradients, negotiation, one fused all-reduce")
    for left, text in (
        (16, "1  ready, in any order"),
        (250, "2  reported"),
        (440, "3  one answer"),
        (650, "4  one all-reduce"),
    ):
        picture.text(left, 60, text, size=12, bold=True)
    for rank, (ready, top) in enumerate(((("g4", "g3", "g1"), 80), (("g3", "g4"), 200))):
        picture.text(16, top + 28, f"rank {rank}", size=12)
        for place, name in enumerate(ready):
            picture.box(70 + place * 48, top + 10, 42, 30, name, LAYERS[name])
        picture.arrow(226, top + 25, 300, 165 if rank else 145)
        picture.text(268, 218 if rank else 116, "names, shapes", size=11, soft=True)
        picture.box(650, top, 210, 50, color="grey-outline")
        picture.text(655, top - 4, "fusion buffer", size=10, soft=True)
        for place, name in enumerate(("g4", "g3")):
            picture.box(658 + place * 100, top + 10, 94, 30, name, LAYERS[name])
        picture.arrow(556, 165 if rank else 145, 640, top + 25)
        picture.text(590, 218 if rank else 116, "g4, g3", size=11, anchor="end", soft=True)
    picture.box(306, 130, 110, 50, "coordinator\n(rank 0)", "orange")
    picture.arrow(420, 155, 446, 155)
    picture.box(450, 130, 100, 50, "all have:\ng4, g3", "green")
    picture.arrow(755, 192, 755, 136, color="green")
    picture.arrow(785, 136, 785, 192, color="green")
    picture.text(800, 170, "sum of both buffers", size=11, soft=True)
    picture.text(16, 284, "g1 waits: rank 1 has not computed it. It comes into a later cycle.", size=12, soft=True)
    picture.text(
        16,
        308,
        "From the second step on each known gradient is one bit (response cache); AND over ranks.",
        size=12,
        soft=True,
    )
    picture.save(folder / "m202-horovod.svg")


def reducer(folder: Path) -> None:
    """Draw backward from the last layer to the first, the buckets that fill, and their all-reduces beside it."""
    picture = Picture(960, 300, "DDP: buckets are all-reduced while backward computes earlier layers")
    left, width, top = 110, 90, 60
    layers = (("layer 8", "pink"), ("layer 7", "violet"), ("layer 6", "violet"), ("layer 5", "violet"))
    layers += (("layer 4", "teal"), ("layer 3", "teal"), ("layer 2", "teal"), ("layer 1", "blue"))
    picture.text(16, top + 24, "backward", size=12, bold=True)
    for place, (name, color) in enumerate(layers):
        picture.box(left + place * width, top, width - 4, 40, name, color)
    picture.text(16, top + 84, "bucket full", size=12, bold=True)
    picture.text(16, top + 134, "all-reduce", size=12, bold=True)
    rows = (("bucket 0\n1 MiB", "pink", 1, 0.7), ("bucket 1\n25 MiB", "violet", 4, 1.6))
    rows += (("bucket 2\n25 MiB", "teal", 7, 1.6), ("rest", "blue", 8.6, 0.5))
    for name, color, full, long in rows:
        x = left + min(full, 8) * width - 2
        picture.arrow(x, top + 42, x, top + 104, color=color)
        picture.box(left + full * width, top + 110, long * width, 40, name, color, size=11)
    end = left + 8 * width
    picture.line(end, top - 8, end, top + 170, dashed=True)
    picture.text(end + 6, top - 12, "backward ends", size=11, soft=True)
    picture.arrow(left + 9.1 * width + 4, top + 170, left + 9.1 * width + 4, top + 154)
    picture.text(left + 9.1 * width, top + 186, "optimizer's step", size=11, anchor="end", soft=True)
    picture.text(
        16, top + 212, "Only what is right of the dashed line is waited for. Buckets are sent in", size=12, soft=True
    )
    picture.text(16, top + 230, "this order on all ranks: nothing has to be negotiated.", size=12, soft=True)
    picture.save(folder / "m202-reducer.svg")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    horovod(target)
    reducer(target)
