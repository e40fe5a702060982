"""Images for a GPU: bytes of one size from tar shards, parquet files or class folders, read in any order.

Every sample has a number and is one read, so the order, the resuming in an epoch and the distribution over ranks and
worker processes are those of any map-style data set (`phalanx.data.order`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from phalanx.config.option import limited
from phalanx.data.hints import LoaderHints
from phalanx.errors import DataError, UsageError
from phalanx.world.env import read_rank_env
from phalanx.zoo.data.files import of_split
from phalanx.zoo.data.image_files import (
    IMAGE_ENDINGS,
    UndecodableImage,
    about_empty,
    decode,
    find_images,
    import_pillow,
)
from phalanx.zoo.data.places import Root, find_places
from phalanx.zoo.data.shard_index import ShardList, foreign_indexes, packed_index
from phalanx.zoo.data.shard_parts import FilePart, ImagePart, TarPart, parquet_parts
from phalanx.zoo.data.splits import check_fraction, held_out

_MOST_TRIED = 100
"""Images in a row that cannot be decoded before the data set is taken to be broken."""
_NAMED = 5
_PROBLEM = "could not be decoded, and the next image was read instead"
_MOST_WORKERS = 16
_WINDOW = 8
_SHUFFLES = ("samples", "shards")


class ImageShards(Dataset[tuple[torch.Tensor, int]]):
    """Samples (uint8 [3, size, size], label). One that cannot be decoded is replaced by the next, and named."""

    deterministic = True

    def __init__(
        self,
        parts: Sequence[ImagePart],
        classes: Sequence[str],
        *,
        size: int,
        rows: Sequence[int] | None = None,
        workers: int = 0,
        window: int = 0,
        notes: Sequence[str] = (),
    ) -> None:
        """`rows`: the numbers of the samples, where not all. `window`: parts that are shuffled together; 0: all."""
        self._parts, self.classes, self.size = list(parts), list(classes), size
        self._starts = np.cumsum([0, *(len(part.labels) for part in self._parts)])
        total = int(self._starts[-1])
        self._rows = np.arange(total) if rows is None else np.asarray(rows, dtype=np.int64)
        highest = max((int(part.labels.max(initial=-1)) for part in self._parts), default=-1)
        if highest >= len(self.classes):
            raise DataError(f"a sample has the label {highest}, but there are {len(self.classes)} classes.")
        groups: list[int] = np.diff(np.searchsorted(self._rows, self._starts)).tolist()
        self.loader_hints = LoaderHints(workers, groups, window, tuple(notes), self.replaced, _PROBLEM)
        # In shared memory: worker processes mark what they had to replace.
        self._replaced = torch.zeros(total, dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        tried = min(_MOST_TRIED, len(self))
        for step in range(tried):
            number = int(self._rows[(index + step) % len(self)])
            part, row = self._locate(number)
            try:
                pixels = decode(part.read(row), self.size)
            except UndecodableImage as error:
                if part.labels[row] < 0:  # it is asked about: another image would be another answer
                    raise DataError(f"{part.name(row)} is not a readable image: {error}.") from None
                self._replace(number, error)
                continue
            return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), int(part.labels[row])
        raise DataError(f"{tried} images in a row cannot be decoded, from {self.name(index)} on.")

    def name(self, index: int) -> str:
        """Return the file, and the place in it, of a sample."""
        part, row = self._locate(int(self._rows[index]))
        return part.name(row)

    def replaced(self) -> list[str]:
        """Return the names of the images that were replaced so far, by this process and its workers."""
        numbers = self._replaced.nonzero().flatten().tolist()
        return [part.name(row) for part, row in map(self._locate, numbers)]

    def _locate(self, number: int) -> tuple[ImagePart, int]:
        at = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._parts[at], number - int(self._starts[at])

    def _replace(self, number: int, error: UndecodableImage) -> None:
        """Mark an image that cannot be decoded; the first ones are named at once, all of them at the epoch's end."""
        if self._replaced[number]:
            return
        self._replaced[number] = True
        part, row = self._locate(number)
        if int(self._replaced.sum()) <= _NAMED:
            warnings.warn(f"{part.name(row)} is replaced by the next image: {error}", stacklevel=3)


class _ImageSource(NamedTuple):
    """The images of one split. `held_out`: the part to take, where the data has no validation images."""

    parts: list[ImagePart]
    classes: list[str]
    held_out: str | None
    window: int = 0
    notes: tuple[str, ...] = ()


@limited(size={"minimum": 1}, window={"minimum": 1}, workers={"minimum": 0}, shuffle={"choices": (None, *_SHUFFLES)})
def shards(
    split: str = "train",
    root: Root | None = None,
    size: int = 256,
    val_fraction: float = 0.1,
    shuffle: str | None = None,
    window: int = _WINDOW,
    workers: int | None = None,
    class_names: Sequence[str] | None = None,
    needs_target: bool = True,
) -> ImageShards:
    """Read the images at `root`: shards of `phalanx data pack`, tars of WebDataset, parquet files or class folders.

    `size`: the side of the square that an image becomes: its shorter side is resized, and the centre is cut out.
    `val_fraction`: the part that is held out where there is no validation split. `shuffle`: "samples" mixes all
    samples, "shards" reads `window` shards (row groups of parquet files) at a time; the default is "samples", and
    "shards" for parquet. `workers`: processes per rank that decode; by default as many as there are cores for.
    `class_names`: all labels in their order, where class folders may lack some. Without `needs_target` images in
    folders, or in a list of files, have the label -1.
    """
    if root is None:
        raise UsageError("shards needs the folder with the images.", hint="Write: --data path/to/images")
    check_fraction(val_fraction, split)
    import_pillow()
    source = _find(root, split, class_names, needs_target=needs_target)
    by_parts = shuffle == "shards" or (shuffle is None and source.window > 0)
    total = sum(len(part.labels) for part in source.parts)
    return ImageShards(
        source.parts,
        source.classes,
        size=size,
        rows=held_out(total, source.held_out, val_fraction),
        workers=_cores_per_rank() if workers is None else workers,
        window=min(window, source.window or window) if by_parts else 0,
        notes=source.notes,
    )


def _find(root: Root, split: str, names: Sequence[str] | None, *, needs_target: bool) -> _ImageSource:
    """Recognise what is at a place; `names`: the classes that are known."""
    places = find_places(root)
    is_packed = len(places) == 1 and (places[0].is_file() or _holds_shards(places[0]))
    if not is_packed or places[0].suffix.lower() in IMAGE_ENDINGS:
        images = find_images(root, split, names, needs_target=needs_target)
        notes = (about_empty(images.classes, images.samples),) if split == "train" else ()
        part = FilePart(images.root, images.samples)
        return _ImageSource([part], images.classes, images.part, notes=tuple(filter(None, notes)))
    packed = _find_packed(places[0], split)
    if names is not None and list(names) != packed.classes:
        raise DataError(
            f"{places[0]} has other classes than the training images: {', '.join(packed.classes[:5])}; "
            f"they have {', '.join(names[:5])}."
        )
    return packed


def _holds_shards(folder: Path) -> bool:
    return any(file.suffix in (".tar", ".parquet") for file in folder.rglob("*"))


def _find_packed(root: Path, split: str) -> _ImageSource:
    """Return the images of tars or parquet files."""
    if (manifest := ShardList.read(root)) is not None:
        records = manifest.splits.get(split, manifest.splits["train"])
        parts: list[ImagePart] = [TarPart(root / record.name, packed_index(root, record)) for record in records]
        return _ImageSource(
            parts, manifest.classes, None if split in manifest.splits and len(manifest.splits) > 1 else split
        )
    files = [root] if root.is_file() else sorted(root.rglob("*"))
    if tars := [file for file in files if file.suffix == ".tar"]:
        return _foreign(root, tars, split)
    tables = [file for file in files if file.suffix == ".parquet"]
    if not tables:
        raise DataError(f"{root} holds neither images nor shards of images.")
    chosen, part = of_split(_folder(root), tables, split)
    parts, names, window = parquet_parts(chosen)
    return _ImageSource(parts, names or _number_names(parquet_parts(tables)[0]), part, window)


def _folder(root: Path) -> Path | None:
    return root if root.is_dir() else None


def _foreign(root: Path, tars: list[Path], split: str) -> _ImageSource:
    indexes = dict(zip(tars, foreign_indexes(tars), strict=True))
    chosen, part = of_split(_folder(root), tars, split)
    every = {tar: TarPart(tar, index) for tar, index in indexes.items()}
    return _ImageSource([every[tar] for tar in chosen], _number_names(list(every.values())), part)


def _number_names(parts: Sequence[ImagePart]) -> list[str]:
    """Return the numbers of the classes as their names, where nothing tells the names."""
    return [str(number) for number in range(1 + max(int(part.labels.max(initial=-1)) for part in parts))]


def _cores_per_rank() -> int:
    """Return the cores of this machine for each of its ranks, less one for training."""
    env = read_rank_env()
    cores = len(os.sched_getaffinity(0)) // (env.local_world_size if env is not None else 1)
    return max(0, min(_MOST_WORKERS, cores - 1))
