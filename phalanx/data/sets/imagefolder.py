"""Images in one folder per class, read as floats one by one; `shards` reads the same folders as bytes for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from phalanx.data.sets.image_files import as_rgb, import_pillow, list_classes
from phalanx.errors import DataError, UsageError


class ImageFolder(Dataset[tuple[Any, int]]):
    """Images read when asked for, labelled by the sorted names of their folders.

    `transform` gets the PIL image; without one, images are resized to `size` and become float32 [3, size, size] from 0
    to 1.
    """

    def __init__(
        self,
        root: Path,
        *,
        size: int = 224,
        transform: Callable[[Any], Any] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        """`classes`: the names of all labels in their order, where the folder may lack some."""
        import_pillow()
        self.root = root
        self.size = size
        self.transform = transform
        self.deterministic = transform is None
        found, samples = list_classes(root)
        self.classes = list(classes or found)
        if strange := sorted(set(found) - set(self.classes)):
            raise DataError(f"{root} has classes that were not trained: {', '.join(strange[:5])}.")
        self.samples = [(file, self.classes.index(found[label])) for file, label in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        image = self._open(path)
        return (self.transform(image) if self.transform else self._to_tensor(image)), label

    def _open(self, path: Path) -> Any:
        pillow = import_pillow()
        try:
            with pillow.open(path) as image:
                return as_rgb(image)
        except OSError as error:
            raise DataError(f"{path} is not a readable image: {error}.") from error

    def _to_tensor(self, image: Any) -> torch.Tensor:
        resized = image.resize((self.size, self.size), resample=import_pillow().Resampling.BILINEAR)
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
