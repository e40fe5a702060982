"""Images in one folder a class: root/cat/1.png, root/dog/2.jpg, ..."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from phalanx.errors import DataError, UsageError

_ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class ImageFolder(Dataset[tuple[Any, int]]):
    """Images read when asked for, labelled by the sorted names of their folders.

    `transform` gets the PIL image; without one, images are resized to `size` and become float32 [3, size, size] from 0
    to 1.
    """

    def __init__(self, root: Path, *, size: int = 224, transform: Callable[[Any], Any] | None = None) -> None:
        _import_pillow()
        if not root.is_dir():
            raise DataError(f"the folder {root} does not exist.", hint="Give the folder that holds one folder a class.")
        self.root = root
        self.size = size
        self.transform = transform
        self.deterministic = transform is None
        self.classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
        self.samples = [
            (file, label)
            for label, name in enumerate(self.classes)
            for file in sorted((root / name).rglob("*"))
            if file.suffix.lower() in _ENDINGS
        ]
        if not self.samples:
            raise DataError(
                f"{root} holds no images in class folders ({len(self.classes)} folders found).",
                hint=f"Expected {root}/<class>/<image> with an ending of {', '.join(sorted(_ENDINGS))}.",
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        image = self._open(path)
        return (self.transform(image) if self.transform else self._to_tensor(image)), label

    def _open(self, path: Path) -> Any:
        pillow = _import_pillow()
        try:
            with pillow.open(path) as image:
                return image.convert("RGB")
        except OSError as error:
            raise DataError(f"{path} is not a readable image: {error}.") from error

    def _to_tensor(self, image: Any) -> torch.Tensor:
        resized = image.resize((self.size, self.size), resample=_import_pillow().Resampling.BILINEAR)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() / 255


def imagefolder(
    split: str = "train",
    root: str | Path | None = None,
    size: int = 224,
    transform: Callable[[Any], Any] | None = None,
) -> ImageFolder:
    """Read root/train/<class>/... or root/val/<class>/...; a folder without splits is a training set as it stands."""
    if root is None:
        raise UsageError("imagefolder needs the folder with the images.", hint='Write root="path/to/images".')
    folder = Path(root).expanduser()
    if (folder / split).is_dir():
        return ImageFolder(folder / split, size=size, transform=transform)
    if split != "train" or (folder / "val").is_dir():
        raise DataError(f"{folder} has no folder '{split}'.", hint=f"Put the images in {folder}/{split}/<class>/.")
    return ImageFolder(folder, size=size, transform=transform)


def _import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError("reading images needs the package Pillow.", hint="pip install pillow") from error
    return Image
