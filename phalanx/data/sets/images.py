"""Images: handwritten digits that the package ships, MNIST and its relatives from IDX files, one folder per class."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from phalanx.data.fetch import GatherDataset
from phalanx.errors import DataError, UsageError

TRAIN_SIZE = 1437
"""Images of the training split; the other 360 are for validation."""


def digits(split: str = "train") -> TensorDataset:
    """Return (images, labels): float32 of shape [1, 8, 8] from 0 to 1, and int64 from 0 to 9; 1797 of them.

    They are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI
    Machine Learning Repository, https://doi.org/10.24432/C50P49, licensed CC BY 4.0; here in one fixed shuffled order.
    """
    with resources.files("phalanx.data.sets").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    part = slice(TRAIN_SIZE) if split == "train" else slice(TRAIN_SIZE, None)
    scaled = torch.from_numpy(images[part]).unsqueeze(1).float() / 16
    return TensorDataset(scaled, torch.from_numpy(labels[part]).long())


_PREFIXES = {"train": "train", "val": "t10k"}
_UNSIGNED_BYTE = 0x08


class ImageArray(GatherDataset):
    """Grey images kept as bytes and scaled to 0..1 when a batch is made: a quarter of the memory of floats."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, index: torch.Tensor) -> list[torch.Tensor]:
        """Return (images, labels): float32 [batch, 1, height, width] and int64."""
        images = self.images.index_select(0, index).unsqueeze(1).float().div_(255)
        return [images, self.labels.index_select(0, index)]


def mnist(split: str = "train", root: str | Path | None = None) -> ImageArray:
    """Read the images and labels of a split from the folder `root`."""
    if root is None:
        raise UsageError("mnist needs the folder with its IDX files.", hint='Write root="path/to/mnist".')
    folder, prefix = Path(root).expanduser(), _PREFIXES[split]
    images = read_idx(_find(folder, f"{prefix}-images", "idx3-ubyte"), dimensions=3)
    labels = read_idx(_find(folder, f"{prefix}-labels", "idx1-ubyte"), dimensions=1)
    if len(images) != len(labels):
        raise DataError(f"{folder} has {len(images)} {split} images but {len(labels)} labels.")
    return ImageArray(images, labels.long())


def read_idx(path: Path, *, dimensions: int) -> torch.Tensor:
    """Read one IDX file of bytes and check that it is whole."""
    data = _read_bytes(path)
    magic = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if data[:4] != magic:
        raise DataError(
            f"{path} is not an IDX file of {dimensions}-dimensional bytes: "
            f"it starts with {data[:4].hex() or 'nothing'}, not {magic.hex()}.",
            hint="Download it again; a web page saved under this name is a usual cause.",
        )
    header = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", data[4:header]) if len(data) >= header else (0,)
    if len(data) < header or len(data) - header != math.prod(shape):
        raise DataError(f"{path} is damaged: {len(data)} bytes do not hold an array of shape {shape}.")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8, offset=header).copy()).reshape(shape)


def _find(folder: Path, stem: str, kind: str) -> Path:
    candidates = [folder / f"{stem}{joint}{kind}{ending}" for joint in "-." for ending in ("", ".gz")]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    reason = "has no" if folder.is_dir() else "does not exist; it should hold"
    raise DataError(f"{folder} {reason} {candidates[0].name} or {candidates[1].name}.")


def _read_bytes(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked: {error}.", hint="Download it again.") from error


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
