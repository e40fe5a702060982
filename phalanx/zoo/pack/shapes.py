"""A procedural set of images: a class is a shape, a texture, a kind of background and a range of colours.

Place, size, angle, colours within the range, and noise are random: a model has to look at the form, not at pixels. An
image is a function of (seed, split, number); its bytes are those of the JPEG encoder that Pillow has.
"""

from __future__ import annotations

import colorsys
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import UsageError
from phalanx.zoo.data.image_files import import_pillow
from phalanx.zoo.pack.write import EncodedSample

Plane = NDArray[Any]
"""Values of float32 for each pixel."""

_SPLITS = ("train", "val")
_SHARD_IMAGES = 2500
_QUALITY = 90


def _polygon(corners: int) -> Callable[[Plane, Plane], Plane]:
    """Return the signed distance (negative inside, about 1 wide) to a regular polygon."""
    wedge = 2 * math.pi / corners

    def distance(x: Plane, y: Plane) -> Plane:
        angle = np.arctan2(y, x)
        inside = np.cos(np.floor(0.5 + angle / wedge) * wedge - angle) * np.hypot(x, y)
        distances: Plane = inside - np.float32(math.cos(math.pi / corners))
        return distances

    return distance


def _star(points: int, depth: float) -> Callable[[Plane, Plane], Plane]:
    """Return about the signed distance to a star or flower whose radius swings by `depth`."""

    def distance(x: Plane, y: Plane) -> Plane:
        distances: Plane = np.hypot(x, y) - np.float32(1 - depth) - depth * np.cos(points * np.arctan2(y, x))
        return distances

    return distance


def _cross(x: Plane, y: Plane) -> Plane:
    across, along = np.maximum(np.abs(x), np.abs(y)), np.minimum(np.abs(x), np.abs(y))
    distances: Plane = np.maximum(across - 1, along - np.float32(0.35))
    return distances


SHAPES: dict[str, Callable[[Plane, Plane], Plane]] = {
    "disc": lambda x, y: np.hypot(x, y) - np.float32(0.9),
    "ring": lambda x, y: np.abs(np.hypot(x, y) - np.float32(0.7)) - np.float32(0.25),
    "triangle": _polygon(3),
    "square": _polygon(4),
    "hexagon": _polygon(6),
    "bar": lambda x, y: np.maximum(np.abs(x) - 1, np.abs(y) - np.float32(0.3)),
    "cross": _cross,
    "star": _star(5, 0.3),
    "flower": _star(8, 0.2),
    "crescent": lambda x, y: np.maximum(np.hypot(x, y) - 1, np.float32(0.8) - np.hypot(x - np.float32(0.5), y)),
}
"""The signed distance to each shape's edge, for coordinates in which it is about 2 wide."""
TEXTURES: dict[str, Callable[[Plane, Plane], Plane]] = {
    "plain": lambda x, y: np.ones_like(x),
    "stripes": lambda x, y: (np.sin(x * 14) > 0).astype(np.float32),
    "checks": lambda x, y: (np.sin(x * 9) * np.sin(y * 9) > 0).astype(np.float32),
    "dots": lambda x, y: (np.cos(x * 11) + np.cos(y * 11) > np.float32(0.6)).astype(np.float32),
    "rings": lambda x, y: (np.sin(np.hypot(x, y) * 16) > 0).astype(np.float32),
}
"""How much of the first of two colours a point of the shape has."""
BACKGROUNDS = ("smooth", "blocks")
PALETTES = {"warm": (0.0, 0.12), "cold": (0.5, 0.66), "green": (0.24, 0.4), "violet": (0.74, 0.9)}
"""Ranges of hues of the shape."""
MOST_CLASSES = len(SHAPES) * len(TEXTURES) * len(BACKGROUNDS) * len(PALETTES)


def class_parts(label: int) -> tuple[str, str, str, str]:
    """Return the shape, texture, background and palette of a class; neighbours differ in their shape."""
    rest, shape = divmod(label, len(SHAPES))
    rest, texture = divmod(rest, len(TEXTURES))
    palette, background = divmod(rest, len(BACKGROUNDS))
    return list(SHAPES)[shape], list(TEXTURES)[texture], BACKGROUNDS[background], list(PALETTES)[palette]


def draw(label: int, size: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Return an image of a class as uint8 [size, size, 3]."""
    shape, texture, background, palette = class_parts(label)
    radius = random.uniform(0.25, 0.42)
    centre = random.uniform(radius, 1 - radius, 2)
    angle = random.uniform(0, 2 * math.pi)
    line = (np.arange(size, dtype=np.float32) + np.float32(0.5)) / np.float32(size)
    right, down = (line - np.float32(centre[0])) / radius, (line - np.float32(centre[1])) / radius
    cosine, sine = np.float32(math.cos(angle)), np.float32(math.sin(angle))
    x = (right * cosine)[None, :] + (down * sine)[:, None]
    y = (down * cosine)[:, None] - (right * sine)[None, :]
    # The edge is one pixel wide.
    cover = np.clip(0.5 - SHAPES[shape](x, y) * np.float32(radius * size), 0, 1)[..., None]
    mixed = TEXTURES[texture](x, y)[..., None]
    low, high = PALETTES[palette]
    first = _colour(random.uniform(low, high), random.uniform(0.6, 1.0), random.uniform(0.7, 1.0))
    second = _colour(random.uniform(low, high), random.uniform(0.4, 0.9), random.uniform(0.2, 0.4))
    pixels = cover * (mixed * first + (1 - mixed) * second) + (1 - cover) * _background(background, line, random)
    pixels += random.standard_normal((size, size, 1), dtype=np.float32) * np.float32(random.uniform(0.01, 0.06))
    image: NDArray[np.uint8] = (pixels * 255).clip(0, 255).astype(np.uint8)
    return image


def _colour(hue: float, saturation: float, value: float) -> Plane:
    return np.array(colorsys.hsv_to_rgb(hue % 1, saturation, value), dtype=np.float32)


def _background(kind: str, line: Plane, random: np.random.Generator) -> Plane:
    """Return a pale background: a gradient between two colours, or blocks of several."""
    colours = [_colour(random.uniform(0, 1), random.uniform(0, 0.35), random.uniform(0.3, 0.9)) for _ in range(4)]
    if kind == "smooth":
        slope = line[None, :, None] * np.float32(0.5) + line[:, None, None] * np.float32(0.5)
        return (1 - slope) * colours[0] + slope * colours[1]
    cells = random.integers(5, 9)
    cell = np.minimum((line * cells).astype(np.int64), cells - 1)
    chosen = random.integers(0, len(colours), (cells, cells))
    return np.stack(colours)[chosen[cell[:, None], cell[None, :]]]


@dataclass(frozen=True)
class ShapeSamples:
    """Some of the images, drawn when they are iterated."""

    split: str
    first: int
    stop: int
    size: int
    classes: int
    seed: int

    def __iter__(self) -> Iterator[EncodedSample]:
        pillow = import_pillow()
        for number in range(self.first, self.stop):
            label = number % self.classes
            random = np.random.Generator(np.random.PCG64([self.seed, _SPLITS.index(self.split), number]))
            content = io.BytesIO()
            pillow.fromarray(draw(label, self.size, random)).save(content, "jpeg", quality=_QUALITY)
            yield EncodedSample(f"{self.split} {number}", ".jpg", label, content.getvalue())


@dataclass(frozen=True)
class _ShapeCounts:
    """What was asked for."""

    images: int
    val_images: int
    size: int
    classes: int
    seed: int


class ShapeSource:
    """Images of the first `classes` combinations, each class about as often."""

    def __init__(self, images: int, val_images: int, size: int, classes: int, seed: int) -> None:
        import_pillow()
        if not 2 <= classes <= MOST_CLASSES or min(images, val_images) < classes or size < 8 or seed < 0:
            raise UsageError(
                f"images={images}, val images={val_images}, size={size}, classes={classes}, seed={seed}: classes are 2 "
                f"to {MOST_CLASSES}, both splits have an image of each class or more, size is 8 or more, seed 0 or more"
            )
        self._drawn = _ShapeCounts(images, val_images, size, classes, seed)
        self.classes = ["-".join(class_parts(label)) for label in range(classes)]
        self.lengths = {"train": images, "val": val_images}
        self.about: dict[str, Any] = {"made of": "drawn shapes", "size": size, "seed": seed}
        self.usual_shards = max(1, round(images / _SHARD_IMAGES))

    def hash(self) -> str:
        """Return what was asked for: it decides every image."""
        return " ".join(["shapes 1", *(f"{name}={value}" for name, value in asdict(self._drawn).items())])

    def samples(self, split: str, first: int, stop: int) -> ShapeSamples:
        """Return some images of a split."""
        drawn = self._drawn
        return ShapeSamples(split, first, stop, drawn.size, drawn.classes, drawn.seed)
