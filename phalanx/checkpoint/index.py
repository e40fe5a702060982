"""The index of a checkpoint: where each part of each tensor is, and the hash of every leaf of the data files.

A data file is raw tensors behind a safetensors header. It is hashed in leaves, so that a rank verifies what it reads
and reads only what it needs. In an incremental checkpoint the leaves are separate files, named by their hash.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from phalanx.checkpoint.hashed_files import LEAF_BYTES, Leaf, checked_name
from phalanx.errors import CheckpointError

INDEX = "index.json"
_HASH = re.compile(r"[0-9a-f]{64}")
_CHUNKS = re.compile(r"\.chunks-[\w.]{0,32}")


class DamagedError(CheckpointError):
    """A checkpoint's content is not what was written."""


class Part(NamedTuple):
    """A box of a tensor, contiguous in a data file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int


@dataclass(frozen=True)
class StoredTensor:
    """Global shape and type of a tensor, and its parts."""

    shape: tuple[int, ...]
    dtype: str
    parts: list[Part]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type as torch names it."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{self.dtype!r} is not a type of tensors")
        return dtype

    @property
    def bytes(self) -> int:
        """The size of the whole tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Index:
    """Everything that is needed to read a checkpoint's tensors in any layout."""

    tensors: dict[str, StoredTensor]
    objects: dict[str, int]
    """Values that are not tensors, by name: the rank in whose state file they are."""
    leaves: dict[str, list[Leaf]] = field(default_factory=dict)
    """By data file."""
    chunk_folder: str | None = None
    """Of an incremental checkpoint: the entry of the checkpoint directory that has its leaves."""

    def metadata(self) -> Metadata:
        """Return the index as torch's planners read it."""
        entries: dict[str, Any] = {name: BytesStorageMetadata() for name in self.objects}
        for name, tensor in self.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.parts]
            properties = TensorProperties(dtype=tensor.torch_dtype)
            entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return Metadata(entries)

    def dump(self) -> bytes:
        """Return the index as JSON."""
        files = list(self.leaves)
        number = {name: position for position, name in enumerate(files)}
        body = {
            "files": files,
            "leaves": [[[leaf.size, leaf.hash] for leaf in self.leaves[name]] for name in files],
            "chunk_folder": self.chunk_folder,
            "objects": self.objects,
            "tensors": {
                name: [
                    tensor.dtype,
                    tensor.shape,
                    [[p.offsets, p.sizes, number[p.file], p.start] for p in tensor.parts],
                ]
                for name, tensor in self.tensors.items()
            },
        }
        return json.dumps(body, separators=(",", ":")).encode()


def parse_index(data: bytes, where: str) -> Index:
    """Read an index; a CheckpointError where it is not one, whatever its content."""
    try:
        return _parsed(json.loads(data))
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} is not an index of tensors: {type(error).__name__}: {error}") from error


def _parsed(body: Any) -> Index:
    files = [checked_name(name) for name in body["files"]]
    folder = body["chunk_folder"]
    if folder is not None and not _CHUNKS.fullmatch(folder):
        raise ValueError(f"{folder[:200]!a} is not a folder of chunks")
    leaves = {name: _leaves(listed) for name, listed in zip(files, body["leaves"], strict=True)}
    tensors = {}
    for name, (dtype, shape, parts) in body["tensors"].items():
        placed = [
            Part(_sizes(offsets), _sizes(sizes), files[file], int(start)) for offsets, sizes, file, start in parts
        ]
        tensors[name] = StoredTensor(_sizes(shape), dtype, placed)
        _check_parts(name, tensors[name], leaves)
    objects = dict(zip(body["objects"], _sizes([*body["objects"].values()]), strict=True))
    return Index(tensors, objects, leaves, folder)


def _check_parts(name: str, stored: StoredTensor, leaves: dict[str, list[Leaf]]) -> None:
    """Raise where a tensor's parts are outside of it or of their files, or leave some of it without a value."""
    item = stored.torch_dtype.itemsize
    for part in stored.parts:
        ends = (offset + size for offset, size in zip(part.offsets, part.sizes, strict=True))
        if any(end > most for end, most in zip(ends, stored.shape, strict=True)):
            raise ValueError(f"a part is outside of {name!a}")
        last = leaves[part.file][-1:]
        size = math.prod(part.sizes) * item
        if size and (part.start < 0 or part.start + size > sum(leaf.start + leaf.size for leaf in last)):
            raise ValueError(f"a part of {name!a} is outside of {part.file}")
    if sum(math.prod(part.sizes) for part in stored.parts) < math.prod(stored.shape):
        raise ValueError(f"parts of {name!a} are missing")


def _leaves(listed: list[Any]) -> list[Leaf]:
    leaves, start = [], 0
    for size, digest in listed:
        if not 0 <= size <= LEAF_BYTES or not _HASH.fullmatch(digest):
            raise ValueError("a leaf has an impossible size or hash")
        leaves.append(Leaf(start, size, digest))
        start += size
    return leaves


def _sizes(numbers: list[Any]) -> tuple[int, ...]:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a shape is not a list of sizes")
    return tuple(numbers)
