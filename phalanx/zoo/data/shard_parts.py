"""Where encoded images are: in a tar, in a row group of a parquet file, or in separate files. No torch.

A part has the label of each of its images, and reads one of them by its number. It holds no open file, so that worker
processes may have copies of it.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import DataError, UsageError
from phalanx.zoo.data.shard_index import HEADER, ShardIndex

_SIZE_FIELD = slice(124, 136)
"""Where a header of a tar has the size of the content, in octal digits."""
_IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp")
_LABEL_COLUMNS = ("label", "labels", "target", "class", "cls", "fine_label")
_CACHED_BYTES = 512 << 20
"""Bytes of row groups that a process keeps: a row group is decompressed as a whole."""


class ImagePart(Protocol):
    """Some of the encoded images of a data set."""

    labels: NDArray[np.int64]

    def read(self, row: int) -> bytes:
        """Return the encoded image with this number."""

    def name(self, row: int) -> str:
        """Return what to call it in a message."""


class TarPart:
    """The images of one tar, each read at its offset."""

    def __init__(self, path: Path, index: ShardIndex) -> None:
        self._path, self._index = path, index
        self.labels = index.labels

    def read(self, row: int) -> bytes:
        """Return the image; raise where the tar has another member at its offset than the index says."""
        offset, size = int(self._index.offsets[row]), int(self._index.sizes[row])
        with self._path.open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), HEADER + size, offset - HEADER)
        header = content[_SIZE_FIELD].strip(b" \0")
        if len(content) != HEADER + size or not header.isdigit() or int(header, 8) != size:
            raise DataError(
                f"the index of {self._path} does not match it: {self.name(row)} is not at byte {offset}.",
                hint="Pack it again, or, for a tar of another program, remove its index so that it is made again.",
            )
        return content[HEADER:]

    def name(self, row: int) -> str:
        """Return the tar and the name in it."""
        return f"{self._path.name}: {self._index.names[row].decode(errors='replace')}"


def _below(file: Path, root: Path) -> Path:
    return file.relative_to(root) if file.is_relative_to(root) else file


class FilePart:
    """Images that are separate files, in class folders or named one by one."""

    def __init__(self, root: Path, samples: Sequence[tuple[Path, int]]) -> None:
        self._root = root
        # As one array: a million objects would be copied, page by page, into every worker process.
        self._names = np.array([os.fsencode(_below(file, root)) for file, _ in samples], dtype=np.bytes_)
        self.labels = np.array([label for _, label in samples], dtype=np.int64)

    def read(self, row: int) -> bytes:
        """Return the content of the file."""
        return (self._root / self.name(row)).read_bytes()

    def name(self, row: int) -> str:
        """Return the path below the root; of an image that was named, its path."""
        return os.fsdecode(bytes(self._names[row]))


class RowGroupPart:
    """The images of one row group of a parquet file in Hugging Face's layout."""

    def __init__(self, path: Path, group: int, column: str, labels: NDArray[np.int64]) -> None:
        self._path, self._group, self._column = path, group, column
        self.labels = labels

    def read(self, row: int) -> bytes:
        """Return the image: the bytes of the column, or of its field `bytes`."""
        value = _row_group(self._path, self._group, self._column)[row].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise DataError(
                f"{self.name(row)} holds no image in its column '{self._column}', but {type(content).__name__}.",
                hint="Images must be in the file: with datasets, cast the column and embed them before to_parquet.",
            )
        return content

    def name(self, row: int) -> str:
        """Return the file, the row group and the row in it."""
        return f"{self._path.name}: row {row} of row group {self._group}"


_row_groups: OrderedDict[tuple[Path, int], Any] = OrderedDict()


def _row_group(path: Path, group: int, column: str) -> Any:
    """Return the images of a row group, from those read last or from the file."""
    images = _row_groups.pop((path, group), None)
    if images is None:
        images = _parquet().ParquetFile(path).read_row_group(group, columns=[column], use_threads=False).column(0)
    _row_groups[path, group] = images
    while len(_row_groups) > 1 and sum(cached.nbytes for cached in _row_groups.values()) > _CACHED_BYTES:
        _row_groups.popitem(last=False)
    return images


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UsageError("reading .parquet files needs pyarrow", hint="Run: pip install 'phalanx[data]'") from None
    return parquet


def parquet_parts(paths: Sequence[Path]) -> tuple[list[ImagePart], list[str], int]:
    """Return the row groups of parquet files, the class names that they tell, and how many groups to keep in memory."""
    parts: list[ImagePart] = []
    names: list[str] = []
    largest = 1
    for path in paths:
        try:
            file = _parquet().ParquetFile(path)
        except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
            raise DataError(f"{path} cannot be read as parquet: {error}.") from error
        image, label = (_column(path, file.schema_arrow, kind) for kind in (_IMAGE_COLUMNS, _LABEL_COLUMNS))
        names = names or _class_names(file.schema_arrow, label)
        for group in range(file.num_row_groups):
            labels = file.read_row_group(group, columns=[label], use_threads=False).column(0).to_numpy()
            if labels.dtype.kind not in "iu":
                raise DataError(f"{path}: column '{label}' holds {labels.dtype}, not whole numbers from 0 on.")
            parts.append(RowGroupPart(path, group, image, labels.astype(np.int64)))
            largest = max(largest, file.metadata.row_group(group).total_byte_size)
    return parts, names, max(1, _CACHED_BYTES // 2 // largest)


def _column(path: Path, schema: Any, allowed: Sequence[str]) -> str:
    name_of_column = next((name for name in allowed if name in schema.names), None)
    if name_of_column is None:
        raise DataError(
            f"{path} has none of the columns {', '.join(allowed)}; it has: {', '.join(schema.names)}.",
            hint="Rename the column, or write a function: --data my_package.data:load",
        )
    return name_of_column


def _class_names(schema: Any, label: str) -> list[str]:
    """Return the names of the classes that the library datasets keeps in a file's metadata."""
    about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    return list(about.get("info", {}).get("features", {}).get(label, {}).get("names") or [])
