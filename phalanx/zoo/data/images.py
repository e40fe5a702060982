"""Images: handwritten digits that the package ships, MNIST and its relatives from IDX files."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from phalanx.data.fetch import GatherDataset
from phalanx.errors import DataError, UsageError
from phalanx.zoo.data.places import one_folder

TRAIN_SIZE = 1437
"""Images of the training split; the other 360 are for validation."""


def digits(split: str = "train") -> TensorDataset:
    """Return (images, labels): float32 of shape [1, 8, 8] from 0 to 1, and int64 from 0 to 9; 1797 of them.

    They are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI
    Machine Learning Repository, https://doi.org/10.24432/C50P49, licensed CC BY 4.0; here in one fixed shuffled order.
    """
    with resources.files("phalanx.zoo.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    part = slice(TRAIN_SIZE) if split == "train" else slice(TRAIN_SIZE, None)
    scaled = torch.from_numpy(images[part]).unsqueeze(1).float() / 16
    dataset = TensorDataset(scaled, torch.from_numpy(labels[part]).long())
    dataset.classes = [str(digit) for digit in range(10)]  # type: ignore[attr-defined]
    return dataset


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
        raise UsageError("mnist needs the folder with its IDX files", hint="Write: --data path/to/mnist")
    folder, prefix = one_folder(root, "mnist"), _PREFIXES[split]
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
    names = f"{candidates[0].name} or {candidates[1].name}"
    raise DataError(f"{folder} has no {names}.")


def _read_bytes(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked: {error}.", hint="Download it again.") from error
