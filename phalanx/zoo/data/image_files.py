"""Image files: those in class folders, and their content as arrays of one size. No torch."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import DataError, UsageError
from phalanx.zoo.data.places import Root, find_places

IMAGE_ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_VALIDATION = ("val", "valid", "validation", "dev", "test")
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
        wrong = "is a file, not a folder" if root.exists() else "does not exist"
        raise UsageError(f"the folder {root} {wrong}.", hint="Give the folder that holds one folder per class.")
    classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    samples = [(file, label) for label, name in enumerate(classes) for file in _images_below(root / name)]
    if not samples:
        raise DataError(
            f"{root} holds no images in class folders ({len(classes)} folders found).",
            hint=f"Expected {root}/<class>/<image> with an ending of {', '.join(sorted(IMAGE_ENDINGS))}.",
        )
    return classes, samples


def _images_below(folder: Path) -> list[Path]:
    every = (file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_ENDINGS)
    return sorted(file for file in every if not file.name.startswith("."))  # as macOS leaves them on shared disks


class FoundImages(NamedTuple):
    """The images of a split, and the classes by which they are labelled."""

    root: Path
    classes: list[str]
    samples: list[tuple[Path, int]]
    """The file and its label; -1 for images without one."""
    part: str | None
    """The part of the samples to take, where the data have no their own validation images; None: all."""


def find_images(
    root: Root, split: str, classes: Sequence[str] | None = None, *, needs_target: bool = True
) -> FoundImages:
    """Return the images of a split: those in root/train or root/val, else a part of those in `root`.

    `classes`: the names of all labels in their order; without them, those of the training images. An image that is
    named by itself has the class that its folder is called. Without `needs_target` any images will do, without labels.
    """
    places = find_places(root)
    folder = places[0] if len(places) == 1 and places[0].is_dir() else None
    if folder is None:
        if strange := [file for file in places if file.is_file() and file.suffix.lower() not in IMAGE_ENDINGS]:
            endings = ", ".join(sorted(IMAGE_ENDINGS))
            raise DataError(f"{strange[0]} is not an image: its name ends in none of {endings}.")
        files = [image for path in places for image in (_images_below(path) if path.is_dir() else [path])]
        return _named(files, split, classes, needs_target=needs_target)
    train, val = split_folders(folder)
    if split == "val" and val is not None:
        chosen, part = val, None
    else:
        chosen, part = train, None if val is not None else split
    if not needs_target:
        files = _images_below(chosen)
        if not files:
            raise DataError(f"{chosen} holds no images.", hint=f"Known endings: {', '.join(sorted(IMAGE_ENDINGS))}")
        return FoundImages(folder, list(classes or ()), [(file, -1) for file in files], part)
    names, samples = list_classes(chosen)
    if classes is None:
        classes = names if chosen == train else list_classes(train)[0]
    return FoundImages(folder, list(classes), _by_names(chosen, names, samples, classes), part)


def _named(files: list[Path], split: str, classes: Sequence[str] | None, *, needs_target: bool) -> FoundImages:
    """Return images that were named one by one."""
    names = sorted({file.absolute().parent.name for file in files})
    labels = list(classes if classes is not None else names)
    if not needs_target:
        return FoundImages(Path(), labels, [(file, -1) for file in files], split)
    if strange := [name for name in names if name not in labels]:
        raise DataError(
            f"the folder of an image tells its class, and '{strange[0]}' is none: {', '.join(labels[:5])}.",
            hint="phalanx predict takes images without a class.",
        )
    return FoundImages(Path(), labels, [(file, labels.index(file.absolute().parent.name)) for file in files], split)


def split_folders(root: Path) -> tuple[Path, Path | None]:
    """Return the folders of the training and validation images; None where there are none for validation."""
    val = next((root / name for name in _VALIDATION if (root / name).is_dir()), None)
    train = root / "train"
    if train.is_dir():
        return train, val
    # A class may be called "test": only where all folders are those of splits, they are not classes.
    others = [entry for entry in root.iterdir() if entry.is_dir() and entry.name not in _VALIDATION]
    return root, val if not others else None


def _by_names(
    folder: Path, names: Sequence[str], samples: list[tuple[Path, int]], classes: Sequence[str]
) -> list[tuple[Path, int]]:
    """Return samples labelled by the names of their folders: a class that a split lacks keeps its number."""
    if strange := sorted({names[label] for _, label in samples} - set(classes)):
        raise DataError(
            f"{folder} has {len(strange)} classes that the training images lack: {', '.join(strange[:5])}.",
            hint=f"The classes are: {', '.join(classes[:10])}{', ...' if len(classes) > 10 else ''}",
        )
    # Folders without images need no place among the classes: they are in no sample.
    class_of = {number: classes.index(name) for number, name in enumerate(names) if name in classes}
    return [(file, class_of[label]) for file, label in samples]


def list_splits(root: Path) -> tuple[list[str], dict[str, list[tuple[Path, int]]]]:
    """Return the classes, and the labelled images of `root/train` and `root/val`; without these, of `root` as "train".

    The classes are those of the training images; labels of validation images follow the names of their folders.
    """
    training = find_images(root, "train")
    if training.part is not None:
        return training.classes, {"train": training.samples}
    return training.classes, {
        "train": training.samples,
        "val": find_images(root, "val", training.classes).samples,
    }


def about_empty(classes: Sequence[str], samples: Sequence[tuple[Path, int]]) -> str:
    """Return a message about classes without a single image; empty where all have some."""
    filled = {label for _, label in samples}
    empty = [name for label, name in enumerate(classes) if label not in filled]
    if not empty:
        return ""
    listed = ", ".join(empty[:5]) + (", ..." if len(empty) > 5 else "")
    return f"{len(empty)} of {len(classes)} class folders hold no images: {listed} (they stay classes)"


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
        opaque = image.convert("RGBA")
        return import_pillow().alpha_composite(import_pillow().new("RGBA", opaque.size, _WHITE), opaque).convert("RGB")
    return image.convert("RGB")


def _eight_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Scale grey values, which Pillow itself would clip: 16-bit ones to their upper 8 bits, floats up to 1 to 255."""
    highest = values.max(initial=0)
    if values.dtype.kind == "f":
        values = values * 255 if highest <= 1 else values
    elif values.dtype.itemsize == 2 or highest > 255:
        values = values >> 8
    return values.clip(0, 255).astype(np.uint8)
