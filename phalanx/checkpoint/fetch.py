"""Read boxes of stored tensors in parallel, straight into their target where possible, and verify them on the way."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import NamedTuple

import torch

from phalanx.checkpoint.hashed_files import FileRecord, HashedFile, Leaf
from phalanx.checkpoint.index import DamagedError, Index, Part, StoredTensor
from phalanx.checkpoint.layout import FULL, Extent, FileLayout, full_layout
from phalanx.checkpoint.storage import Draft, Reader

_SCRATCH_BYTES = 512 << 20
_THREADS = 8

Opener = Callable[[str, "Leaf | None"], Reader]
"""Opens a data file, or the file of one leaf of it."""


class Box(NamedTuple):
    """A box of a stored part, and the tensor of its shape that receives it."""

    part: Part
    dtype: torch.dtype
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    target: torch.Tensor


class _FileRange(NamedTuple):
    """A range of a data file and the memory that receives it."""

    file: str
    start: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.start + self.memory.nbytes


def read_boxes(index: Index, opener: Opener, boxes: Iterable[Box]) -> None:
    """Fill the targets; DamagedError where a hash does not match."""
    wants: list[_FileRange] = []
    later: list[tuple[torch.Tensor, torch.Tensor]] = []
    used = 0
    for box in boxes:
        if box.target.numel() == 0:
            continue
        want, scratch = _wanted(box)
        wants.append(want)
        if scratch is not None:
            later.append((box.target, scratch))
            used += want.memory.nbytes
        if used > _SCRATCH_BYTES:
            _fetch(index, opener, wants)
            _copy(later)
            wants, later, used = [], [], 0
    _fetch(index, opener, wants)
    _copy(later)


def _wanted(box: Box) -> tuple[_FileRange, torch.Tensor | None]:
    """Return the range of the file that covers a box, and the box in scratch memory where the target cannot be used."""
    sizes, item = box.part.sizes, box.dtype.itemsize
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    last = first + sum((length - 1) * stride for length, stride in zip(box.lengths, strides, strict=True))
    start, size = box.part.start + first * item, (last - first + 1) * item
    target = box.target
    fits = target.dtype == box.dtype and target.device.type == "cpu" and target.is_contiguous()
    if fits and size == target.numel() * item:
        return _FileRange(box.part.file, start, memory_of(target)), None
    scratch = torch.empty(size, dtype=torch.uint8, pin_memory=target.device.type == "cuda")
    box_view = scratch.view(box.dtype).as_strided(box.lengths, strides)
    return _FileRange(box.part.file, start, memory_of(scratch)), box_view


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    for device in {target.device for target, _ in pairs if target.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def _fetch(index: Index, opener: Opener, wants: list[_FileRange]) -> None:
    by_leaf: dict[tuple[str, int], list[_FileRange]] = {}
    for want in wants:
        leaves = index.leaves[want.file]
        number = bisect.bisect_right(leaves, want.start, key=lambda leaf: leaf.start) - 1
        while number < len(leaves) and leaves[number].start < want.end:
            by_leaf.setdefault((want.file, number), []).append(want)
            number += 1
    with ExitStack() as opened:
        readers: dict[str, Reader] = {}
        if index.chunk_folder is None:
            for name in {want.file for want in wants}:
                readers[name] = opened.enter_context(closing(_opened(opener, name, None)))
        workers = opened.enter_context(ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)))

        def one(job: tuple[tuple[str, int], list[_FileRange]]) -> None:
            (name, number), parts = job
            leaf = index.leaves[name][number]
            if name in readers:
                _read_leaf(readers[name], leaf, leaf.start, name, parts)
                return
            with closing(_opened(opener, name, leaf)) as reader:
                _read_leaf(reader, leaf, 0, leaf.hash, parts)

        for _ in workers.map(one, by_leaf.items()):
            pass


def _opened(opener: Opener, name: str, leaf: Leaf | None) -> Reader:
    try:
        return opener(name, leaf)
    except OSError as error:
        raise DamagedError(f"{leaf.hash if leaf else name} cannot be read: {error.strerror or error}") from error


def _hash(parts: list[memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _read_leaf(reader: Reader, leaf: Leaf, offset: int, name: str, wants: list[_FileRange]) -> None:
    """Read a whole leaf, to be able to verify it: into the wanted memory, and the gaps into scratch memory."""
    wants = sorted(wants, key=lambda want: want.start)
    parts: list[memoryview] = []
    copies: list[tuple[memoryview, int]] = []
    at, end = leaf.start, leaf.start + leaf.size
    for want in wants:
        begin, stop = max(want.start, leaf.start), min(want.end, end)
        memory = want.memory[begin - want.start : stop - want.start]
        if begin < at:  # two targets want the same bytes
            copies.append((memory, begin))
            continue
        if begin > at:
            parts.append(memoryview(bytearray(begin - at)))
        parts.append(memory)
        at = stop
    if at < end:
        parts.append(memoryview(bytearray(end - at)))
    try:
        reader.read_into(parts, offset)
    except OSError as error:
        raise DamagedError(f"{name} cannot be read: {error.strerror or error}") from error
    if leaf.hash and _hash(parts) != leaf.hash:  # what is in memory has none
        raise DamagedError(f"{name} does not match its hash: it was changed after it was written")
    if copies:
        content = b"".join(parts)
        for memory, begin in copies:
            memory[:] = content[begin - leaf.start :][: memory.nbytes]


def write_full(draft: Draft, index: Index, records: dict[str, FileRecord]) -> Index:
    """Replace the ranks' shards by one file with every tensor whole, one in memory at a time; return its index."""
    if set(index.leaves) <= {FULL}:
        return index  # one rank has written it as it is
    layout = full_layout(index)
    with draft.create(FULL) as stream:
        write_extents(stream, layout, index, lambda name, leaf: draft.read(name))
    for name in index.leaves:
        draft.drop(name)
        del records[name]
    tensors = {
        piece.name: StoredTensor(
            piece.sizes, index.tensors[piece.name].dtype, [Part(piece.offsets, piece.sizes, FULL, piece.start)]
        )
        for piece in layout.pieces
    }
    ordered = {name: tensors[name] for name in index.tensors}
    return dataclasses.replace(index, tensors=ordered, leaves={FULL: draft.records[FULL].cut()})


def write_extents(stream: HashedFile, layout: FileLayout, index: Index, opener: Opener) -> None:
    """Write a data file of this layout from stored parts, with one tensor of it in memory at a time."""
    stream.write(layout.header)
    for piece in layout.pieces:
        target = torch.empty(piece.sizes, dtype=piece.dtype)
        read_boxes(index, opener, _boxes(index.tensors[piece.name], piece, target))
        stream.write(memory_of(target))
        stream.flush()


def _boxes(stored: StoredTensor, piece: Extent, target: torch.Tensor) -> Iterator[Box]:
    """Yield what the stored parts contribute to a piece."""
    for part in stored.parts:
        box, into = [], target
        for axis, (offset, size, first, length) in enumerate(
            zip(part.offsets, part.sizes, piece.offsets, piece.sizes, strict=True)
        ):
            start, end = max(offset, first), min(offset + size, first + length)
            if start >= end:
                break
            box.append((start - offset, end - start))
            into = into.narrow(axis, start - first, end - start)
        else:
            yield Box(part, stored.torch_dtype, tuple(at for at, _ in box), tuple(count for _, count in box), into)
