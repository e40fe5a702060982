"""Images in one folder per class, read as floats one by one; `shards` reads the same folders as bytes for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from phalanx.errors import DataError, UsageError
from phalanx.zoo.data.image_files import FoundImages, as_rgb, find_images, import_pillow
from phalanx.zoo.data.places import Root
from phalanx.zoo.data.splits import check_fraction, held_out_part


class ImageFolder(Dataset[Any]):
    """Images read when asked for, as (image, label), or as images alone where they have no labels.

    `transform` gets the PIL image; without one, images are resized to `size` and become float32 [3, size, size] from 0
    to 1. `channels`: 1 for grey ones, [1, size, size].
    """

    def __init__(
        self,
        images: FoundImages,
        *,
        size: int = 224,
        channels: int = 3,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        import_pillow()
        if channels not in (1, 3) or size < 1:
            raise UsageError(f"size = {size}, channels = {channels}: size is 1 or more, channels 1 (grey) or 3")
        self.size, self.channels = size, channels
        self.transform = transform
        self.deterministic = transform is None
        self.classes, self.samples = images.classes, images.samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        image = self._open(path)
        pixels = self.transform(image) if self.transform else self._to_tensor(image)
        return pixels if label < 0 else (pixels, label)

    def _open(self, path: Any) -> Any:
        pillow = import_pillow()
        try:
            with pillow.open(path) as image:
                return as_rgb(image)
        except OSError as error:
            raise DataError(f"{path} is not a readable image: {error}.") from error

    def _to_tensor(self, image: Any) -> torch.Tensor:
        resized = image.resize((self.size, self.size), resample=import_pillow().Resampling.BILINEAR)
        pixels = np.array(resized.convert("L"))[:, :, None] if self.channels == 1 else np.array(resized)
        return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def imagefolder(
    split: str = "train",
    root: Root | None = None,
    size: int = 224,
    channels: int = 3,
    transform: Callable[[Any], Any] | None = None,
    val_fraction: float = 0.1,
    class_names: Sequence[str] | None = None,
    needs_target: bool = True,
) -> Any:
    """Read root/train/<class>/... and root/val/<class>/...; without val/ a part of the images is held out.

    `class_names`: all labels in their order, where the folders may lack some. Without `needs_target` the images may
    be in any folders, or in a list of files, and have no labels.
    """
    if root is None:
        raise UsageError("imagefolder needs the folder with the images", hint="Write: --data path/to/images")
    check_fraction(val_fraction, split)
    import_pillow()
    listed = find_images(root, split, class_names, needs_target=needs_target)
    images = ImageFolder(listed, size=size, channels=channels, transform=transform)
    return held_out_part(images, listed.part, val_fraction)
