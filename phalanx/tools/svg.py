"""Charts as SVG text: an axis with round labels, a plot with marks and lines, bars; and the page or file for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 40
_BELOW = -0.08
_MOST_SIGNS = 19
UNUSED = object()
"""Stands for a value that is missing: it is drawn below the axis."""
COLORS = (
    *("#3b6fb6", "#e08a3c", "#5aa469", "#c05c7e", "#8567ad", "#7a7a7a", "#b9a440", "#3fa7a3"),
    *("#a0522d", "#d2691e", "#4b5563"),
)
"""Colors of parts and lines, in this order."""
_CHARTS = """
:root { --ink: #1b2733; --soft: #5b6b7b; --grid: #e3e8ee; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #dbe4ee; --soft: #94a3b3; --grid: #263341; --paper: #10161d; } }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); } svg .name { fill: var(--ink); font-weight: 600; }
svg .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; } .paper { fill: var(--paper); }
.grid { stroke: var(--grid); } .axis { stroke: var(--soft); }
.line { fill: none; } .mark:hover, .line:hover { stroke: #d9480f; stroke-width: 4; }
"""
_PAGE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; } p { margin: .3rem 0 .8rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
.soft { color: var(--soft); } .big { font-size: 1.15rem; } .scroll { overflow-x: auto; }
"""


def html_page(title: str, parts: Iterable[str], style: str = "") -> str:
    """Return a page that needs nothing else: its head, the style of charts and tables, and these parts."""
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_CHARTS}{_PAGE}{style}</style></head>\n"
        f"<body>{body}\n</body></html>\n"
    )


def write_picture(path: str, title: str, charts: Sequence[str], cell: tuple[int, int], names: Sequence[str]) -> None:
    """Write charts of one size as a file, two in a row, below a title and a legend of these names."""
    width, height = 2 * cell[0], 56 + -(-len(charts) // 2) * cell[1]
    placed = (
        f'<g transform="translate({number % 2 * cell[0]} {56 + number // 2 * cell[1]})">{chart}</g>'
        for number, chart in enumerate(charts)
    )
    head = f'<style>{_CHARTS}</style><rect class="paper" width="{width}" height="{height}"/>'
    head += f'<text class="name" x="16" y="22">{escape(title)}</text>'
    head += legend(dict(zip(names, COLORS, strict=False)))
    try:
        Path(path).write_text(drawing((width, height), [head, *placed], is_file=True), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--plot {path}: {error.strerror}") from None


def legend(colors: Mapping[str, str], left: int = 16, top: int = 36, stride: int = 112) -> str:
    """Return names with the color of each, in a row."""
    return "".join(
        f'<rect x="{left + index * stride}" y="{top}" width="11" height="11" fill="{color}"/>'
        f'<text x="{left + 16 + index * stride}" y="{top + 10}">{escape(name)}</text>'
        for index, (name, color) in enumerate(colors.items())
    )


def brief(value: Any, most: int = _MOST_SIGNS) -> str:
    """Return a value as a short text: numbers with four digits, long texts without their middle."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def drawing(size: tuple[int, int], parts: Iterable[str], *, is_file: bool = False) -> str:
    """Return a chart of this size with these parts; `is_file`: not a part of a page, so it names its format."""
    width, height = size
    kind = 'xmlns="http://www.w3.org/2000/svg" ' if is_file else ""
    head = f'<svg {kind}viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
    return "".join([head, *parts, "</svg>"])


@dataclass(frozen=True)
class Axis:
    """One direction of a chart: positions of values between 0 and 1, and round values as labels."""

    name: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    names: tuple[Any, ...] = ()
    """Choices, in order; empty for numbers."""
    optional: bool = False
    """Whether some trials do not have it: they pass below the axis."""
    whole: bool = False
    """Whether only whole numbers have a meaning."""

    @classmethod
    def of(cls, name: str, values: Iterable[float]) -> Axis:
        """Return the axis of these numbers, with a margin."""
        numbers = list(values)
        low, high = min(numbers, default=0.0), max(numbers, default=1.0)
        margin = (high - low) * 0.05 or abs(high) * 0.05 or 0.5
        return cls(name, low - margin, high + margin, whole=all(isinstance(value, int) for value in numbers))

    def position(self, value: Any) -> float:
        """Return the position of a value."""
        if value is UNUSED:
            return _BELOW
        if self.names:
            return ((self.names.index(value) if value in self.names else 0) + 0.5) / len(self.names)
        low, high, here = (math.log(n) if self.log else n for n in (self.low, self.high, value))
        return 0.5 if high == low else (here - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and their labels."""
        values = self.names or [float(value) for value in self._round() if self.low <= value <= self.high]
        positions = [(self.position(value), brief(value)) for value in values]
        return positions + ([(_BELOW, "unused")] if self.optional else [])

    def _round(self) -> list[float]:
        """Return about five round values."""
        if self.low == self.high:
            return [self.low]
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            rounded = [10.0**power for power in powers]
            if sum(self.low <= value <= self.high for value in rounded) < 2:
                return [self.low, math.sqrt(self.low * self.high), self.high]
            return rounded
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough)
        step = max(1.0, step) if self.whole else step
        return [step * n for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


class Plot:
    """An SVG plot with axes, grid and labels; what is drawn in it is added as marks and lines."""

    def __init__(self, x: Axis, y: Axis, size: tuple[int, int]) -> None:
        self._x, self._y, self._width, self._height = x, y, *size
        self._parts: list[str] = []
        bottom, right = self._height - _BOTTOM, self._width - _RIGHT
        for share, label in y.ticks():
            at = self._down(share)
            self._parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
            self._parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        for share, label in x.ticks():
            at = self._across(share)
            self._parts.append(f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}"/>')
            self._parts.append(f'<text x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{escape(label)}</text>')
        self._parts.append(f'<path class="axis line" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
        middle = (_LEFT + right) / 2
        self._parts.append(
            f'<text class="name" x="{middle}" y="{self._height - 6}" text-anchor="middle">{escape(x.name)}</text>'
            f'<text class="name" transform="translate(13 {(_TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">'
            f"{escape(y.name)}</text>"
        )

    def _across(self, share: float) -> float:
        return _LEFT + share * (self._width - _LEFT - _RIGHT)

    def _down(self, share: float) -> float:
        return _TOP + (1 - share) * (self._height - _TOP - _BOTTOM)

    def _at(self, point: tuple[Any, float]) -> tuple[float, float]:
        return self._across(self._x.position(point[0])), self._down(self._y.position(point[1]))

    def mark(self, point: tuple[Any, float], color: str, title: str, sign: str = "o") -> None:
        """Add a dot, or a cross."""
        x, y = self._at(point)
        shape = f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}">'
        if sign == "x":
            d = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
            shape = f'<path class="mark" d="{d}" stroke="{color}" stroke-width="2">'
        self._parts.append(f"{shape}<title>{escape(title)}</title>{'</path>' if sign == 'x' else '</circle>'}")

    def line(self, points: Sequence[tuple[float, float]], color: str, title: str, width: float = 1.5) -> None:
        """Add a line through points."""
        course = " L".join(f"{x:.1f} {y:.1f}" for x, y in map(self._at, points))
        look = f'stroke="{color}" stroke-width="{width}"'
        self._parts.append(f'<path class="line" d="M{course}" {look}><title>{escape(title)}</title></path>')

    def svg(self) -> str:
        """Return the plot."""
        return drawing((self._width, self._height), self._parts)


def bars(shares: Mapping[str, float]) -> str:
    """Return a bar per name, for shares from 0 to 1."""
    parts = []
    for row, (name, share) in enumerate(shares.items()):
        y = 28 * row + 4
        parts.append(f'<text class="name" x="190" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="200" y="{y}" width="{300 * share:.1f}" height="20" fill="#0d5a78"/>')
        parts.append(f'<text x="{206 + 300 * share:.1f}" y="{y + 15}">{share:.0%}</text>')
    return drawing((560, 28 * len(shares) + 6), parts)
