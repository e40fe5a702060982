"""Boxes, arrows and text as SVG files that are readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

COLORS = {
    "blue": "#3b6fb6",
    "orange": "#e08a3c",
    "green": "#5aa469",
    "pink": "#c05c7e",
    "violet": "#8567ad",
    "grey": "#7a8794",
    "teal": "#3fa7a3",
    "sand": "#b9a440",
}
_STYLE = """
:root { --ink: #1b2733; --soft: #5b6b7b; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #dbe4ee; --soft: #94a3b3; --paper: #10161d; } }
.paper { fill: var(--paper); } text { font-family: system-ui, sans-serif; fill: var(--ink); } .on { fill: #fff; }
.soft { fill: var(--soft); } .line { stroke: var(--soft); fill: none; }
"""


class Picture:
    """One picture; things are drawn in the order of the calls."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []
        self.text(16, 26, title, size=15, bold=True)

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", color: str = "blue", *, size: int = 12
    ) -> None:
        """Draw a filled box with lines of text in its middle; the color grey-outline leaves it unfilled."""
        outline = color.endswith("-outline")
        paint = COLORS[color.removesuffix("-outline")]
        fill = f'fill="none" stroke="{paint}"' if outline else f'fill="{paint}"'
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" {fill}/>')
        lines = text.split("\n") if text else []
        top = y + height / 2 + size * 0.35 - (len(lines) - 1) * size * 0.6
        for number, line in enumerate(lines):
            name = "" if outline else ' class="on"'
            place = f'x="{x + width / 2:g}" y="{top + number * size * 1.2:g}"'
            self._parts.append(f'<text {place} font-size="{size}" text-anchor="middle"{name}>{escape(line)}</text>')

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, text: str = "", color: str = "grey", *, dashed: bool = False
    ) -> None:
        """Draw an arrow, with a text beside its middle."""
        paint, dash = COLORS[color], ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{paint}" stroke-width="2"{dash} '
            f'marker-end="url(#{color})"/>'
        )
        if text:
            self.text((x1 + x2) / 2, (y1 + y2) / 2 - 6, text, size=11, anchor="middle", soft=True)

    def line(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> None:
        """Draw a thin line."""
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self._parts.append(f'<line class="line" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"{dash}/>')

    def curve(self, points: Sequence[tuple[float, float]], color: str = "blue") -> None:
        """Draw a line through points."""
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{text}" fill="none" stroke="{COLORS[color]}" stroke-width="2.5"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        anchor: str = "start",
        bold: bool = False,
        soft: bool = False,
    ) -> None:
        """Write one line of text."""
        weight = ' font-weight="600"' if bold else ""
        name = ' class="soft"' if soft else ""
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
        self._parts.append(f"<text {place}{weight}{name}>{escape(text)}</text>")

    def save(self, path: Path | str) -> None:
        """Write the file."""
        width, height = self._size
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{paint}"/></marker>'
            for name, paint in COLORS.items()
        )
        text = "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
                f"<title>{escape(self._title)}</title><style>{_STYLE}</style><defs>{heads}</defs>",
                f'<rect class="paper" width="{width}" height="{height}"/>',
                *self._parts,
                "</svg>\n",
            ]
        )
        Path(path).write_text(text)
