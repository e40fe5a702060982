"""torch.distributed.checkpoint on hashed files, read back without running code from them.

`torch.load(weights_only=True)` accepts tensors and plain containers. NumPy's arrays, which its random generator state
consists of, are stored as tagged tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.futures import Future

from phalanx import torch_compat
from phalanx.checkpoint.files import FileRecord, hashed_file, open_regular, write_failed
from phalanx.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import WriteResult


_ARRAY = "__phalanx_ndarray__"
_PLAIN = (type(None), bool, int, float, complex, str)


def to_plain(value: Any, where: str = "rank_state") -> Any:
    """Encode `value`, or raise a CheckpointError that names the part that cannot be stored."""
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        return {_plain_key(key, where): to_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    return _from_numpy(value, where)


def from_plain(value: Any) -> Any:
    """Decode what `to_plain` made."""
    if isinstance(value, dict):
        if _ARRAY in value:
            return _to_numpy(value)
        return {key: from_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(from_plain(item) for item in value)
    return value


def _plain_key(key: Any, where: str) -> Any:
    if type(key) not in (bool, int, float, str) or key == _ARRAY:
        raise CheckpointError(f"{where} has the key {key!r}; keys must be strings or numbers")
    return key


def _from_numpy(value: Any, where: str) -> Any:
    import numpy as np

    if isinstance(value, np.generic):
        return to_plain(value.item(), where)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        raw = torch.from_numpy(np.frombuffer(value.tobytes(), dtype=np.uint8).copy())
        return {_ARRAY: raw, "dtype": value.dtype.str, "shape": tuple(value.shape)}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold",
        hint="Use numbers, strings, tensors, NumPy arrays, and lists, tuples and dicts of them.",
    )


def _to_numpy(value: dict[str, Any]) -> Any:
    import numpy as np

    raw = value[_ARRAY].numpy().tobytes()
    return np.frombuffer(raw, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()


class HashingFileSystem(FileSystem):
    """A file system that keeps a record of every file written through it."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self.current: Path | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file; what is written is hashed and flushed to the disk."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        self.current = Path(path)
        with hashed_file(self.current, self.records) as file:
            yield cast("io.IOBase", file)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file and its record."""
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class ShardWriter(dcp.FileSystemWriter):
    """Writes a rank's shards and its own state into a directory.

    One thread a rank: with more, torch loses the error of a thread that failed, and shards would be short unnoticed.
    """

    def __init__(self, directory: Path, *, rank: int, rank_state: Any) -> None:
        super().__init__(directory, single_file_per_rank=True, sync_files=False, thread_count=1, overwrite=False)
        self.files = HashingFileSystem()
        self.fs = self.files
        self._directory = directory
        self._this_rank = rank
        self._rank_state = rank_state

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; an error is carried to every rank by torch and raised there."""
        needed = sum(item.tensor_storage_size() or 0 for item in plan.items)
        with self._explained(needed), without_crc32():
            own = self._directory / rank_file_name(self._this_rank)
            with self.files.create_stream(own, "wb") as stream:
                torch.save(to_plain(self._rank_state), cast("IO[bytes]", stream))
            # A rank whose every tensor is written by another would leave an empty file behind.
            return super().write_data(plan, planner) if plan.items else _nothing_written()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's index of the shards (on one rank)."""
        with self._explained(0):
            super().finish(metadata, results)

    def storage_meta(self) -> StorageMeta:
        """Leave the path out: it changes when the checkpoint is published."""
        return StorageMeta(save_id=self.save_id)

    @contextlib.contextmanager
    def _explained(self, needed: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            path = Path(error.filename) if error.filename else self.files.current or self._directory
            raise write_failed(error, rank=self._this_rank, path=path, needed=needed) from error


class ShardReader(dcp.FileSystemReader):
    """Reads shards, and their index without letting it name anything but torch's own records."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index of the shards."""
        path = Path(self.path, ".metadata")
        try:
            with open_regular(path) as file:
                metadata = _read_index(file)
        except Exception as error:  # a stream can make any of the types it names raise anything
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        storage_meta = metadata.storage_meta or StorageMeta()
        return dataclasses.replace(metadata, storage_meta=dataclasses.replace(storage_meta, load_id=self.load_id))


class PlainSavePlanner(dcp.DefaultSavePlanner):
    """Stores what is no tensor in a form that loads without running code."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Encode one leaf of the state dict."""
        if write_item.type == WriteItemType.BYTE_IO:
            object = to_plain(object, write_item.index.fqn)
        return super().transform_object(write_item, object)


class PlainLoadPlanner(dcp.DefaultLoadPlanner):
    """Reads what `PlainSavePlanner` stored."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode one leaf that is no tensor and put it in its place."""
        path = self.mappings[read_item.dest_index.fqn]
        holder: Any = self.original_state_dict
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = from_plain(torch.load(value, weights_only=True))


_RECORDS = {
    cls.__name__: cls
    for cls in (
        torch_metadata.Metadata,
        torch_metadata.MetadataIndex,
        torch_metadata.TensorStorageMetadata,
        torch_metadata.BytesStorageMetadata,
        torch_metadata.ChunkStorageMetadata,
        torch_metadata.TensorProperties,
        torch_metadata.StorageMeta,
        torch_metadata._MEM_FORMAT_ENCODING,
    )
}
"""The types of an index, by name. Every other name of their module (dataclass, os, torch) would run code."""


class _IndexUnpickler(pickle.Unpickler):
    """Knows the few types an index consists of and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        if module == torch_metadata.__name__ and name in _RECORDS:
            return _RECORDS[name]
        if (module, name) in _HELPERS:
            return _HELPERS[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"the index of the shards names {module}.{name}, which is not part of an index")


_HELPERS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    **torch_compat.index_types(),
}


def _read_index(file: IO[bytes]) -> Metadata:
    """Unpickle an index; a stream may set attributes on the classes it names, which is undone and refused."""
    classes = [value for value in (*_RECORDS.values(), *_HELPERS.values()) if isinstance(value, type)]
    before = [dict(vars(cls)) for cls in classes]
    try:
        index = _IndexUnpickler(file).load()
    finally:
        changed = [cls.__name__ for cls, kept in zip(classes, before, strict=True) if _put_back(cls, kept)]
    if changed or not isinstance(index, Metadata):
        what = f"changes the class {changed[0]}" if changed else f"is a {type(index).__name__}"
        raise pickle.UnpicklingError(f"the index of the shards {what}")
    return index


def _put_back(cls: type, attributes: dict[str, Any]) -> bool:
    """Give a class the attributes it had; say whether they differed."""
    changed = {name for name in {*vars(cls), *attributes} if vars(cls).get(name) is not attributes.get(name)}
    for name in changed:
        if name in attributes:
            type.__setattr__(cls, name, attributes[name])
        else:
            type.__delattr__(cls, name)
    return bool(changed)


def first_cause(failure: CheckpointException) -> tuple[int, Exception]:
    """Return the lowest failing rank and its error, the same on every rank.

    torch gathers whatever is raised, Ctrl-C too; that one goes on as itself.
    """
    rank, (cause, _) = min(failure.failures.items(), key=lambda item: item[0])
    if not isinstance(cause, Exception):
        raise cause
    return rank, cause


def rank_file_name(rank: int) -> str:
    """Return the name of the file that holds a rank's own state."""
    return f"rank-{rank:05d}.pt"


@contextlib.contextmanager
def quiet_without_group() -> Iterator[None]:
    """Silence torch's warning that there is no process group: one process is a normal case here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


@contextlib.contextmanager
def without_crc32() -> Iterator[None]:
    """Spare torch the CRC-32 of each tensor, which costs more than the writing: our own hash covers the whole file."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _nothing_written() -> Future[list[WriteResult]]:
    future: Future[list[WriteResult]] = torch.futures.Future()
    future.set_result([])
    return future
