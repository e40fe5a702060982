"""Class folders as a source of shards: the files as they are, in one fixed shuffled order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.zoo.data.image_files import about_empty, list_splits
from phalanx.zoo.pack.write import EncodedSample

_ENDINGS = {".jpeg": ".jpg", ".tiff": ".tif"}
_SHARD_BYTES = 200_000_000


@dataclass(frozen=True)
class FolderSamples:
    """Files and labels, read when they are iterated."""

    root: Path
    files: Sequence[tuple[str, int]]

    def __iter__(self) -> Iterator[EncodedSample]:
        for name, label in self.files:
            ending = Path(name).suffix.lower()
            yield EncodedSample(name, _ENDINGS.get(ending, ending), label, (self.root / name).read_bytes())


class FolderSource:
    """The images of `root/train/<class>/` and `root/val/<class>/`, or of `root/<class>/`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.classes, splits = list_splits(root)
        self.warning = about_empty(self.classes, splits["train"])
        """About class folders without images; empty where there are none."""
        self._files = {name: self._shuffled(samples) for name, samples in splits.items()}
        self.lengths = {name: len(files) for name, files in self._files.items()}
        self.about: dict[str, Any] = {"made of": "class folders"}
        self._sizes = {name: [(root / file).stat().st_size for file, _ in files] for name, files in self._files.items()}

    def _shuffled(self, samples: Sequence[tuple[Path, int]]) -> list[tuple[str, int]]:
        """Mix the classes: then each shard is a sample of all of them."""
        order = np.random.Generator(np.random.PCG64(len(samples))).permutation(len(samples))
        return [(str(samples[number][0].relative_to(self._root)), samples[number][1]) for number in order]

    @property
    def usual_shards(self) -> int:
        """How many shards are of a size that copies and reads well."""
        size = sum(self._sizes["train"])
        return max(1, min(self.lengths["train"], round(size / _SHARD_BYTES)))

    def hash(self) -> str:
        """Return a hash of the names, labels and sizes of all files."""
        digest = hashlib.sha256()
        for name, files in self._files.items():
            for (file, label), size in zip(files, self._sizes[name], strict=True):
                digest.update(f"{name}\0{file}\0{label}\0{size}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def samples(self, split: str, first: int, stop: int) -> FolderSamples:
        """Return some samples of a split."""
        return FolderSamples(self._root, self._files[split][first:stop])
