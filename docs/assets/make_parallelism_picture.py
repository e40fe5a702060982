"""Draw parallelism.svg, what each rank holds and computes under each kind of parallelism.

    python docs/assets/make_parallelism_picture.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

RANKS, LAYERS = 4, 4
RANK, GAP, BAR = 62, 14, 11
"""Width of a rank, space between two, and height of a layer's bar."""
PANEL_WIDTH, PANEL_HEIGHT = 340, 208
COLOURS = ("#2f6fde", "#d9822b", "#2e9e6b", "#a556c4")
"""One per part of what is split: of a model, of a sequence, or of the data."""

_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1c2733 } .title { font-size: 15px; font-weight: 650 }
.small { font-size: 11px; fill: #5a6878 } .rank { fill: #f4f6f9; stroke: #c3ccd6 } .gone { fill: none; stroke: #b4bfca; stroke-dasharray: 2 2 }
.whole { fill: #7f8c9a } .page { fill: #ffffff }
@media (prefers-color-scheme: dark) {
text { fill: #e4e9ef } .small { fill: #9fadbb } .rank { fill: #1d2630; stroke: #43505e } .gone { stroke: #56636f }
.whole { fill: #8d9aa8 } .page { fill: #12181f } }
"""

Cell = Callable[[int, int], str]


def bar(x: float, y: float, width: float, *, colour: str = "", kind: str = "", height: float = BAR) -> str:
    """Return a bar in a colour, or in a look of the style sheet."""
    look = f'fill="{colour}"' if colour else f'class="{kind}"'
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" {look}/>'


def whole(rank: int, layer: int) -> str:
    """Return a layer that the rank holds whole."""
    return bar(0, 0, RANK - 12, kind="whole")


def piece(rank: int, layer: int) -> str:
    """Return a layer of which the rank holds a quarter, and fetches the rest when it is needed."""
    width = (RANK - 12) / RANKS
    return "".join(
        bar(part * width + 0.5, 0, width - 1, **({"colour": COLOURS[part]} if part == rank else {"kind": "gone"}))
        for part in range(RANKS)
    )


def slice_of_layer(rank: int, layer: int) -> str:
    """Return the quarter of a layer that the rank computes with."""
    width = (RANK - 12) / RANKS
    return bar(rank * width, 0, width, colour=COLOURS[rank])


def stage(rank: int, layer: int) -> str:
    """Return the layer, where it belongs to the stage of the rank."""
    return bar(0, 0, RANK - 12, colour=COLOURS[rank]) if rank == layer else ""


def experts(rank: int, layer: int) -> str:
    """Return shared layers, and in every second one the expert of the rank."""
    return whole(rank, layer) if layer % 2 == 0 else bar(14, 0, RANK - 40, colour=COLOURS[rank])


def batches(rank: int) -> str:
    """Return a batch of the rank's own."""
    return bar(0, 0, RANK - 12, colour=COLOURS[rank], height=8)


def one_batch(rank: int) -> str:
    """Return the batch that all ranks have."""
    return bar(0, 0, RANK - 12, kind="whole", height=8)


def micro_batches(rank: int) -> str:
    """Return micro-batches, of which each rank has another one at a time."""
    width = (RANK - 12) / RANKS
    return "".join(
        bar(part * width + 0.5, 0, width - 1, kind="whole" if part == RANKS - 1 - rank else "gone", height=8)
        for part in range(RANKS)
    )


def part_of_sequence(rank: int) -> str:
    """Return the quarter of a sequence that the rank has."""
    width = (RANK - 12) / RANKS
    return bar(0, 0, RANK - 12, kind="gone", height=8) + bar(rank * width, 0, width, colour=COLOURS[rank], height=8)


PANELS: list[tuple[str, str, str, Cell, Callable[[int], str]]] = [
    ("Data: ddp", "each rank has the model and its own batch;", "gradients are averaged once per step", whole, batches),
    ("Sharded data: fsdp, ZeRO", "as ddp, but each rank keeps a quarter of every layer;", "the rest is fetched when it is computed", piece, batches),
    ("Tensor", "all ranks compute a quarter of each layer, for one batch;", "results are added up twice per layer", slice_of_layer, one_batch),
    ("Pipeline", "each rank has some of the layers; micro-batches", "pass from rank to rank", stage, micro_batches),
    ("Context", "each rank has the model and a part of one long", "sequence; keys and values travel in a ring", whole, part_of_sequence),
    ("Expert", "each rank has an expert of each mixture layer;", "tokens are sent to their expert and back", experts, batches),
]  # fmt: skip


def panel(title: str, first: str, second: str, cell: Cell, data: Callable[[int], str]) -> str:
    """Return one kind of parallelism: a title, two lines, four ranks with their layers and their data."""
    parts = [
        f'<text class="title" x="0" y="16">{title}</text>',
        f'<text class="small" x="0" y="34">{first}</text><text class="small" x="0" y="49">{second}</text>',
    ]
    for rank in range(RANKS):
        left = rank * (RANK + GAP)
        parts.append(f'<rect class="rank" x="{left}" y="62" width="{RANK}" height="{LAYERS * (BAR + 6) + 40}" rx="6"/>')
        for layer in range(LAYERS):
            parts.append(f'<g transform="translate({left + 6} {70 + layer * (BAR + 6)})">{cell(rank, layer)}</g>')
        parts.append(f'<g transform="translate({left + 6} {70 + LAYERS * (BAR + 6) + 4})">{data(rank)}</g>')
        middle, bottom = left + RANK / 2, 62 + LAYERS * (BAR + 6) + 34
        parts.append(f'<text class="small" text-anchor="middle" x="{middle:g}" y="{bottom}">rank {rank}</text>')
    return "".join(parts)


def picture() -> str:
    """Return the whole picture as SVG."""
    width, height = 3 * PANEL_WIDTH, 2 * PANEL_HEIGHT + 30
    drawn = [
        f'<g transform="translate({20 + number % 3 * PANEL_WIDTH} {16 + number // 3 * PANEL_HEIGHT})">{panel(*each)}</g>'
        for number, each in enumerate(PANELS)
    ]
    legend = "Thick bars: layers of the model that the rank holds. Thin bar: its data. Dashed: not there, or fetched for a moment. One colour per part."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="What four ranks hold under six kinds of parallelism"><style>{_STYLE}</style>'
        f'<rect class="page" width="{width}" height="{height}"/>{"".join(drawn)}'
        f'<text class="small" x="20" y="{height - 12}">{legend}</text></svg>\n'
    )


if __name__ == "__main__":
    (Path(__file__).parent / "parallelism.svg").write_text(picture())
