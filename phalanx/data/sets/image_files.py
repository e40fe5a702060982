"""Image files: those in class folders, and their content as arrays of one size. No torch."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import DataError, UsageError

IMAGE_ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_VALIDATION = ("val", "valid", "validation", "test")
_WHITE = (255, 255, 255, 255)
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error)
"""What Pillow raises for damaged files of its formats."""


class UndecodableImage(ValueError):
    """Bytes that are not a whole image."""


def import_pillow() -> Any:
    """Return the module PIL.Image; raise with the command that installs it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError("reading images needs the package Pillow.", hint="pip install 'phalanx[data]'") from error
    return Image


def list_classes(root: Path) -> tuple[list[str], list[tuple[Path, int]]]:
    """Return the sorted names of the folders in `root`, which are the classes, and the images in them with labels."""
    if not root.is_dir():
        raise UsageError(f"the folder {root} does not exist.", hint="Give the folder that holds one folder per class.")
    classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
    samples = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((root / name).rglob("*"))
        if file.suffix.lower() in IMAGE_ENDINGS
    ]
    if not samples:
        raise DataError(
            f"{root} holds no images in class folders ({len(classes)} folders found).",
            hint=f"Expected {root}/<class>/<image> with an ending of {', '.join(sorted(IMAGE_ENDINGS))}.",
        )
    return classes, samples


def list_splits(root: Path) -> tuple[list[str], dict[str, list[tuple[Path, int]]]]:
    """Return the classes, and the labelled images of `root/train` and `root/val`; without these, of `root` as "train".

    The classes are those of the training images; labels of validation images follow the names of their folders.
    """
    if not (root / "train").is_dir():
        classes, samples = list_classes(root)
        return classes, {"train": samples}
    classes, training = list_classes(root / "train")
    other = next((root / name for name in _VALIDATION if (root / name).is_dir()), None)
    if other is None:
        return classes, {"train": training}
    names, validation = list_classes(other)
    if strange := sorted({names[label] for _, label in validation} - set(classes)):
        raise DataError(f"{other} has {len(strange)} classes that {root / 'train'} lacks: {', '.join(strange[:5])}.")
    # Folders without images need no place among the classes: they are in no sample.
    place = {number: classes.index(name) for number, name in enumerate(names) if name in classes}
    return classes, {"train": training, "val": [(file, place[label]) for file, label in validation]}


def about_empty(classes: Sequence[str], samples: Sequence[tuple[Path, int]]) -> str:
    """Return a message about classes without a single image; empty where all have some."""
    filled = {label for _, label in samples}
    empty = [name for label, name in enumerate(classes) if label not in filled]
    if not empty:
        return ""
    shown = ", ".join(empty[:5]) + (", ..." if len(empty) > 5 else "")
    return f"{len(empty)} of {len(classes)} class folders hold no images: {shown} (they stay classes)"


def decode(content: bytes, size: int) -> NDArray[np.uint8]:
    """Return an image as uint8 [size, size, 3]: its shorter side is resized to `size`, and the centre is cut out.

    A large JPEG is decoded at a half, a quarter or an eighth of its size where that is still enough.
    """
    pillow = import_pillow()
    try:
        with pillow.open(io.BytesIO(content)) as image:
            image.draft("RGB", (size, size))
            whole = as_rgb(image)
    except pillow.UnidentifiedImageError as error:
        raise UndecodableImage(f"its {len(content)} bytes are not an image of a known format") from error
    except (*_BROKEN, pillow.DecompressionBombError) as error:
        raise UndecodableImage(f"{type(error).__name__}: {error}") from error
    width, height = whole.size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    if (width, height) != (size, size):  # cut out and resized in one pass
        whole = whole.resize((size, size), pillow.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    return np.asarray(whole)


def as_rgb(image: Any) -> Any:
    """Return a PIL image of any mode as RGB: 16 bits are scaled, transparent parts become white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()  # while its file is open
        return image
    if image.mode.startswith(("I", "F")):
        return import_pillow().fromarray(_eight_bits(np.asarray(image))).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        shown = image.convert("RGBA")
        return import_pillow().alpha_composite(import_pillow().new("RGBA", shown.size, _WHITE), shown).convert("RGB")
    return image.convert("RGB")


def _eight_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Scale grey values, which Pillow itself would clip: 16-bit ones to their upper 8 bits, floats up to 1 to 255."""
    highest = values.max(initial=0)
    if values.dtype.kind == "f":
        values = values * 255 if highest <= 1 else values
    elif values.dtype.itemsize == 2 or highest > 255:
        values = values >> 8
    return values.clip(0, 255).astype(np.uint8)
