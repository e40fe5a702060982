"""Tar shards of images on disk: which shards a folder has, and where in them the samples are. No torch.

A shard is a tar in WebDataset's layout: `000000.jpg` and `000000.cls` (the number of the class as text) are one sample.
Beside `train-00000.tar` is `train-00000.tar.index`: arrays with the place, size, label and name of each image, so that
any sample is one read at a known offset. `index.json` lists the classes and, for each split, the shards with their
checksums. Tars of other programs have neither: they are scanned once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import DataError
from phalanx.host.files import replace_file, replacing
from phalanx.observe.guard import say_to_user
from phalanx.zoo.data.image_files import IMAGE_ENDINGS

MANIFEST = "index.json"
HEADER = 512
"""Bytes of a member's header in a tar; its content follows."""
_KIND, _FORMAT = "phalanx image shards", 1


class ShardRecord(NamedTuple):
    """One shard of a folder; a shard that is not written yet has no checksum."""

    name: str
    samples: int
    bytes: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class ShardList:
    """What `index.json` says. `source` is a hash of what the shards are made of: another one needs other shards."""

    classes: list[str]
    splits: dict[str, list[ShardRecord]]
    source: str = ""
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def records(self) -> list[ShardRecord]:
        """The shards of all splits."""
        return [record for shards in self.splits.values() for record in shards]

    def write(self, folder: Path) -> None:
        """Write `index.json` as a whole."""
        splits = {name: [record._asdict() for record in shards] for name, shards in self.splits.items()}
        content = {"kind": _KIND, "format": _FORMAT, **asdict(self), "splits": splits}
        replace_file(folder / MANIFEST, json.dumps(content, indent=1) + "\n")

    @staticmethod
    def read(folder: Path) -> ShardList | None:
        """Read `index.json`; None where there is none, or where it is a file of another program."""
        try:
            content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        if not isinstance(content, dict) or content.get("kind") != _KIND:
            return None
        if content["format"] != _FORMAT:
            raise DataError(f"{folder / MANIFEST} has format {content['format']}; this version reads {_FORMAT}.")
        splits = {name: [ShardRecord(**record) for record in shards] for name, shards in content["splits"].items()}
        return ShardList(content["classes"], splits, content["source"], content["about"])


@dataclass(frozen=True)
class ShardIndex:
    """Where the images of one tar are."""

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64]
    names: NDArray[np.bytes_]
    bytes: int
    """The size of the tar, by which an index of another tar is recognised."""

    @staticmethod
    def of(rows: Sequence[tuple[int, int, int, str]], size: int) -> ShardIndex:
        """Return the index of (offset, size, label, name) of each image."""
        offsets, sizes, labels = np.array([row[:3] for row in rows], dtype=np.int64).reshape(-1, 3).T.copy()
        names = np.array([os.fsencode(row[3]) for row in rows], dtype=np.bytes_)
        return ShardIndex(offsets, sizes, labels, names, size)

    def write(self, path: Path) -> None:
        """Write the arrays as a whole."""
        with replacing(path) as file:
            np.savez(file, **{**vars(self), "bytes": np.int64(self.bytes)})

    @staticmethod
    def read(path: Path) -> ShardIndex:
        """Read the arrays; raise where they are damaged."""
        try:
            with np.load(path) as arrays:
                fields = {name: arrays[name] for name in arrays.files}
            return ShardIndex(**{**fields, "bytes": int(fields["bytes"])})
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} is damaged: {error}.", hint=f"Remove it: rm {path}") from error


def index_path(tar: Path) -> Path:
    """Return the place of the index beside a tar."""
    return tar.with_name(f"{tar.name}.index")


def file_hash(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def packed_index(folder: Path, record: ShardRecord) -> ShardIndex:
    """Read the index of a shard that `index.json` lists; raise where tar, index and list do not match."""
    tar = folder / record.name
    hint = "Pack the folder again with the same command: it writes only missing and damaged shards."
    if not record.sha256 or not tar.exists() or not index_path(tar).exists():
        missing = "is not complete" if not record.sha256 else "lacks a shard or its index"
        raise DataError(f"{folder} {missing}: {record.name}.", hint=hint)
    index, size = ShardIndex.read(index_path(tar)), tar.stat().st_size
    if not index.bytes == size == record.bytes or len(index.offsets) != record.samples:
        raise DataError(
            f"{index_path(tar)} does not match its tar: {tar} has {size} bytes, the index is of a tar of {index.bytes} "
            f"bytes with {len(index.offsets)} samples, and {MANIFEST} says {record.bytes} bytes, {record.samples}.",
            hint=hint,
        )
    return index


def foreign_indexes(tars: Sequence[Path]) -> list[ShardIndex]:
    """Return the indexes of tars of other programs; those without one are scanned, which is announced."""
    places = [_place_of(tar) for tar in tars]
    with locked(places[0].parent):  # the ranks of a machine: the first one scans
        missing = [tar for tar, path in zip(tars, places, strict=True) if not _is_of(path, tar)]
        if missing:
            say_to_user(
                f"indexing {len(missing)} tar shard{'s' * (len(missing) > 1)} without an index, once: {missing[0]} ..."
            )
        for tar, path in zip(tars, places, strict=True):
            if tar in missing:
                scan(tar).write(path)
    return [ShardIndex.read(path) for path in places]


def _is_of(path: Path, tar: Path) -> bool:
    """Whether there is an index, and it is that of the tar as it is now."""
    is_newer = path.exists() and path.stat().st_mtime >= tar.stat().st_mtime
    return is_newer and ShardIndex.read(path).bytes == tar.stat().st_size


def _place_of(tar: Path) -> Path:
    """Return where the index of a tar is kept: beside it, or in the cache where the folder cannot be written."""
    beside = index_path(tar)
    if beside.exists() or os.access(tar.parent, os.W_OK):
        return beside
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx" / "shards"
    cache.mkdir(parents=True, exist_ok=True)
    return cache / f"{hashlib.sha256(str(tar.resolve()).encode()).hexdigest()[:32]}.index"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, after waiting for it; on a file system without locks, work may be done twice."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def scan(tar: Path) -> ShardIndex:
    """Read the headers of a tar in WebDataset's layout, and the labels."""
    images: dict[str, tuple[int, int, str]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(tar, "r:") as archive:
            for member in filter(tarfile.TarInfo.isfile, archive):
                key, ending = _key_and_ending(member.name)
                if ending in IMAGE_ENDINGS:
                    images[key] = (member.offset_data, member.size, member.name)
                elif ending == ".cls":
                    labels[key] = _label(archive, member, tar)
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{tar} cannot be read as a tar: {error}.", hint="Copy or download it again.") from error
    if images.keys() != labels.keys() or not images:
        raise _unpaired(tar, sorted(images.keys() ^ labels.keys()))
    rows = [(offset, size, labels[key], name) for key, (offset, size, name) in images.items()]
    return ShardIndex.of(rows, tar.stat().st_size)


def _key_and_ending(name: str) -> tuple[str, str]:
    """Split a member's name as WebDataset does, at the first dot of the last part: `a/1.seg.png` -> `a/1`, `.png`."""
    folder, _, last = name.rpartition("/")
    return f"{folder}/{last.partition('.')[0]}", os.path.splitext(last)[1].lower()


def _label(archive: tarfile.TarFile, member: tarfile.TarInfo, tar: Path) -> int:
    file = archive.extractfile(member)
    text = file.read().decode(errors="replace").strip() if file is not None else ""
    if not text.isdecimal():
        raise DataError(
            f"{tar}: {member.name} holds {text[:40]!r}, which is not the number of a class.",
            hint="A .cls file holds a whole number from 0 on, as text.",
        )
    return int(text)


def _unpaired(tar: Path, keys: Sequence[str]) -> DataError:
    hint = "In WebDataset's layout a sample is NAME.jpg and NAME.cls, the number of its class as text."
    if not keys:
        return DataError(f"{tar} holds no images with labels.", hint=hint)
    listed = ", ".join(key.removeprefix("/") for key in keys[:3])
    return DataError(f"{tar}: {len(keys)} samples lack their image or their .cls: {listed}.", hint=hint)
