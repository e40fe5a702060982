"""Draw the pictures of docs/design/index.md and docs/how-it-works.md: `python docs/assets/make_design_pictures.py`.

The picture of the packages is made from the layers that tests/shape checks.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / "helpers"), str(HERE.parents[1] / "tests" / "shape")]

PARENT, RANK, BOTH = "#cfe2f3", "#d9ead3", "#eeeeee"
_SIDES = {
    PARENT: {"cli", "launch"},
    RANK: {"worker", "loop", "strategies", "checkpoint", "data", "models", "comm", "world"},
}

_TIERS = {"tools": "#fff2cc", "engines": "#f4cccc"}


def box(x: float, y: float, width: float, height: float, text: str, fill: str = BOTH) -> str:
    """Return a box with lines of text in it."""
    lines = text.split("\n")
    top = y + height / 2 - 8 * (len(lines) - 1)
    words = "".join(
        f'<text x="{x + width / 2}" y="{top + 16 * number + 4}" text-anchor="middle">{line}</text>'
        for number, line in enumerate(lines)
    )
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="#555"/>{words}'


def arrow(x1: float, y1: float, x2: float, y2: float, label: str = "", *, dashed: bool = False) -> str:
    """Return an arrow, with a label at its middle."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    word = f'<text x="{(x1 + x2) / 2 + 6}" y="{(y1 + y2) / 2 - 5}" class="small">{label}</text>' if label else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#333" marker-end="url(#tip)"{dash}/>{word}'


def picture(name: str, width: int, height: int, *parts: str) -> None:
    """Write one picture."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="14">'
        '<style>.small{font-size:12px;fill:#444}</style><defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" '
        'refY="4" orient="auto"><path d="M0,0 L9,4 L0,8 z" fill="#333"/></marker></defs>'
        f'<rect width="{width}" height="{height}" fill="white"/>'
    )
    (HERE / name).write_text(head + "\n".join(parts) + "</svg>\n")


def packages() -> None:
    """Draw one row of boxes per layer; the tools and the engines by their folders."""
    from test_layers import LAYERS

    folders = HERE.parents[1] / "phalanx"
    hidden = ("__main__", "version", "lazy", "features")
    shown = {name: layer for name, layer in LAYERS.items() if name not in hidden}
    rows = [[name for name, layer in shown.items() if layer == number] for number in range(max(shown.values()), -1, -1)]
    for row in rows:
        if row in (["zoo"], ["tools"], ["engines"]):
            row[:] = sorted(f"{row[0]}/{path.parent.name}" for path in (folders / row[0]).glob("*/__init__.py"))
    parts = []
    for number, row in enumerate(rows):
        y, width = 10 + 54 * number, 800 / len(row)
        parts.append(f'<text x="8" y="{y + 25}" class="small">{len(rows) - 1 - number}</text>')
        for place, name in enumerate(row):
            fill = next((side for side, names in _SIDES.items() if name in names), BOTH)
            is_module = name in ("engine", "model", "torch_compat", "errors", "worker")
            label = f"{name}.py" if is_module else f"{name.rpartition('/')[2].replace('_', ' ')}/"
            parts.append(box(30 + width * place, y, width - 8, 40, label, _TIERS.get(name.partition("/")[0], fill)))
    picture("packages.svg", 840, 10 + 54 * len(rows), *parts)


def launch() -> None:
    """Draw the processes of a launch and what passes between them."""
    picture(
        "launch.svg",
        840,
        390,
        box(20, 20, 230, 56, "phalanx train (cli/, run/)\nconfig, checks", PARENT),
        box(20, 130, 230, 56, "supervisor (launch/)\nattempts, signals, console", PARENT),
        box(330, 130, 190, 56, "fork server\ntorch is imported", PARENT),
        box(600, 40, 210, 50, "store agent\nTCPStore on loopback", PARENT),
        box(600, 140, 210, 50, "rank 0: worker.py\nrun/, loop/, strategies/", RANK),
        box(600, 230, 210, 50, "rank 1: worker.py", RANK),
        box(600, 320, 210, 50, "rank N", RANK),
        box(20, 290, 230, 56, "failure report\nfirst cause, rank, step, log", PARENT),
        arrow(135, 76, 135, 126, "LaunchSpec"),
        arrow(250, 158, 326, 158),
        arrow(520, 145, 596, 70),
        arrow(520, 158, 596, 164),
        '<text x="530" y="115" class="small">forks</text>',
        arrow(520, 172, 596, 250),
        arrow(520, 180, 596, 340),
        arrow(705, 140, 705, 94, "rendezvous"),
        arrow(596, 270, 254, 176, dashed=True),
        '<text x="280" y="262" class="small">events, heartbeats, output, exit codes</text>',
        arrow(135, 186, 135, 286, "a rank failed"),
    )


def step() -> None:
    """Draw one training step."""
    row = 70
    picture(
        "step.svg",
        840,
        260,
        box(20, 20, 150, 46, "learning rate;\nmicro-batch, its share", RANK),
        box(210, 20, 150, 46, "forward\nautocast, loss", RANK),
        box(400, 20, 150, 46, "backward\nloss x share", RANK),
        box(600, 20, 220, 46, "strategy: reduce gradients\nwith the last micro-batch", RANK),
        box(600, 20 + row + 20, 220, 46, "agree on overflow,\nclip", RANK),
        box(400, 20 + row + 20, 150, 46, "optimizer step\nall ranks or none", RANK),
        box(210, 20 + row + 20, 150, 46, "loss log\nheartbeat", RANK),
        box(20, 20 + row + 20, 150, 46, "log, hooks,\ncheckpoint, stop", RANK),
        arrow(170, 43, 206, 43),
        arrow(360, 43, 396, 43),
        arrow(550, 43, 596, 43),
        arrow(710, 66, 710, 106),
        arrow(600, 133, 554, 133),
        arrow(400, 133, 364, 133),
        arrow(210, 133, 174, 133),
        '<path d="M475,66 C475,92 285,92 95,70" fill="none" stroke="#333" stroke-dasharray="5 4" marker-end="url(#tip)"/>',
        '<text x="215" y="98" class="small">next micro-batch (gradient accumulation)</text>',
        '<path d="M95,156 L95,220 L8,220 L8,43 L16,43" fill="none" stroke="#333" marker-end="url(#tip)"/>',
        '<text x="110" y="215" class="small">next step</text>',
        box(210, 200, 340, 46, "an overflow (fp16) skips the step\non every rank", "#fff2cc"),
        arrow(660, 156, 555, 222, dashed=True),
    )


def how_it_works() -> None:
    """Draw a step, a checkpoint and a lost rank, one row each."""
    parts = []
    rows = (
        (
            "A step",
            "this rank's share\nof the batch",
            "forward and\nbackward",
            "gradients are\nreduced meanwhile",
            "optimizer step,\non all ranks or none",
            "heartbeat, log,\nhooks",
        ),
        (
            "A checkpoint",
            "state is copied\nto host memory",
            "training\ngoes on",
            "each rank hashes\nand writes its part",
            "rank 0 renames\nthe whole folder",
            "the oldest one\nis removed",
        ),
        (
            "A lost rank",
            "a rank is killed,\nhangs or fails",
            "the others leave\ntheir collective",
            "a new process takes\nthe empty place",
            "the others send it\nweights and states",
            "the step\nis repeated",
        ),
    )
    fills = (RANK, RANK, PARENT)
    for row, (title, *texts) in enumerate(rows):
        y = 34 + 108 * row
        parts.append(f'<text x="12" y="{y - 10}" font-weight="bold">{title}</text>')
        for place, text in enumerate(texts):
            x = 12 + 168 * place
            parts.append(box(x, y, 148, 54, text, BOTH if (row, place) in ((1, 1), (2, 0)) else fills[row]))
            if place:
                parts.append(arrow(x - 20, y + 27, x - 2, y + 27))
    picture("how-it-works.svg", 848, 318, *parts)


if __name__ == "__main__":
    how_it_works()
    packages()
    launch()
    step()
