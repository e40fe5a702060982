"""torch.distributed.checkpoint on hashed files, which are loaded without running code from them.

`torch.load(weights_only=True)` accepts tensors and plain containers. NumPy arrays, of which the state of its random
generator consists, are stored as tagged tensors.
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
        for key in value:
            if type(key) not in (bool, int, float, str) or key == _ARRAY:
                raise CheckpointError(f"{where} has the key {key!r}; keys must be strings or numbers")
        return {key: to_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    return _from_numpy(value, where)


def from_plain(value: Any) -> Any:
    """Decode what `to_plain` returned."""
    if isinstance(value, dict):
        if _ARRAY in value:
            import numpy as np

            raw = value[_ARRAY].numpy().tobytes()
            return np.frombuffer(raw, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
        return {key: from_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(from_plain(item) for item in value)
    return value


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


class HashingFileSystem(FileSystem):
    """A file system that records size and hash of every file it writes."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self.current: Path | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file; a written one is hashed and flushed to the disk."""
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
    """Writes a rank's shards and its state into a directory.

    With one thread per rank: with more, torch loses the error of a failed thread, and shards would be incomplete.
    """

    def __init__(self, directory: Path, *, rank: int, rank_state: Any) -> None:
        super().__init__(directory, single_file_per_rank=True, sync_files=False, thread_count=1, overwrite=False)
        self.files = HashingFileSystem()
        self.fs = self.files
        self._directory = directory
        self._this_rank = rank
        self._rank_state = rank_state

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; torch raises an error on every rank."""
        needed = sum(item.tensor_storage_size() or 0 for item in plan.items)
        with self._explained(needed), without_crc32():
            own = self._directory / rank_file_name(self._this_rank)
            with self.files.create_stream(own, "wb") as stream:
                torch.save(to_plain(self._rank_state), cast("IO[bytes]", stream))
            if plan.items:
                return super().write_data(plan, planner)
            nothing: Future[list[WriteResult]] = torch.futures.Future()  # torch would write an empty file
            nothing.set_result([])
            return nothing

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
    """Reads shards and their index, which may only contain torch's record types."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index of the shards."""
        path = Path(self.path, ".metadata")
        try:
            with open_regular(path) as file:
                metadata = _read_index(file)
        except Exception as error:  # a pickle stream can cause any exception
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        storage_meta = metadata.storage_meta or StorageMeta()
        return dataclasses.replace(metadata, storage_meta=dataclasses.replace(storage_meta, load_id=self.load_id))


class PlainSavePlanner(dcp.DefaultSavePlanner):
    """Stores what is not a tensor in a form that loads without running code."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Encode one leaf of the state dict."""
        if write_item.type == WriteItemType.BYTE_IO:
            object = to_plain(object, write_item.index.fqn)
        return super().transform_object(write_item, object)


class PlainLoadPlanner(dcp.DefaultLoadPlanner):
    """Reads what `PlainSavePlanner` stored."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode one leaf that is not a tensor, and put it into the state dict."""
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
"""The types of an index, by name; other names of their module (dataclass, os, torch) could run code."""


class _IndexUnpickler(pickle.Unpickler):
    """Loads only the types of an index."""

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
    """Unpickle an index; a stream that sets attributes of classes is refused, and the attributes are restored."""
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
    """Restore the attributes of a class; return whether they differed."""
    changed = {name for name in {*vars(cls), *attributes} if vars(cls).get(name) is not attributes.get(name)}
    for name in changed:
        if name in attributes:
            type.__setattr__(cls, name, attributes[name])
        else:
            type.__delattr__(cls, name)
    return bool(changed)


def first_cause(failure: CheckpointException) -> tuple[int, Exception]:
    """Return the lowest failed rank and its error, equal on every rank; what is not an Exception (Ctrl-C) is raised."""
    rank, (cause, _) = min(failure.failures.items(), key=lambda item: item[0])
    if not isinstance(cause, Exception):
        raise cause
    return rank, cause


def rank_file_name(rank: int) -> str:
    """Return the name of the file with a rank's state."""
    return f"rank-{rank:05d}.pt"


@contextlib.contextmanager
def quiet_without_group() -> Iterator[None]:
    """Suppress torch's warning that there is no process group: one process is a normal case here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


@contextlib.contextmanager
def without_crc32() -> Iterator[None]:
    """Disable torch's CRC-32 of each tensor, which takes longer than writing: the file is hashed anyway."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
