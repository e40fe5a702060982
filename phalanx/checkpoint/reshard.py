"""Write a checkpoint again with its tensors in another number of files, which as many ranks read at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from phalanx.checkpoint.fetch import write_extents
from phalanx.checkpoint.files import FileRecord
from phalanx.checkpoint.find import Checkpoint, read_index
from phalanx.checkpoint.index import INDEX, Index, Part, StoredTensor
from phalanx.checkpoint.layout import Extent, FileLayout, lay_out, shard_name
from phalanx.checkpoint.place import Writing, located, place_at
from phalanx.checkpoint.plain import rank_file_name
from phalanx.checkpoint.read import data_opener
from phalanx.errors import CheckpointError, UsageError


def reshard(source: Checkpoint, directory: Path, ranks: int) -> Path:
    """Write a checkpoint into a directory with every tensor cut into `ranks` parts; return its path.

    The state of each rank (random generators, residuals) stays as it was saved, and so does the number of ranks that
    the checkpoint belongs to: it can be resumed by the same number of ranks or by any other.
    """
    if ranks < 1:
        raise UsageError(f"--ranks {ranks}: it must be 1 or more")
    index = read_index(source)
    layouts = [lay_out(pieces) for pieces in _split(index, ranks)]
    target = place_at(directory)
    writing = target.begin(source.step)
    try:
        for rank, layout in enumerate(layouts):
            if layout.pieces:
                with writing.create(shard_name(rank)) as stream:
                    write_extents(stream, layout, index, data_opener(source, index))
        _copy_rank_files(source, writing)
        cut = _index_of(index, layouts, writing.records)
        with writing.create(INDEX) as stream:
            stream.write(cut.dump())
        files = dict(writing.records)
        size = sum(record.size for record in files.values())
        manifest = dataclasses.replace(source.manifest, files=files, kind="sharded", bytes=size)
        return target.path(writing.publish(manifest))
    except BaseException:
        writing.discard()
        raise


def _split(index: Index, ranks: int) -> list[list[Extent]]:
    """Return the pieces of each file: equal parts of the first dimension, and whole tensors that are too short."""
    files: list[list[Extent]] = [[] for _ in range(ranks)]
    for name, stored in index.tensors.items():
        rows = stored.shape[0] if stored.shape else 0
        if rows < ranks:
            smallest = min(files, key=lambda pieces: sum(piece.bytes for piece in pieces))
            box = (0,) * len(stored.shape), stored.shape
            smallest.append(Extent(name, *box, stored.torch_dtype, whole=True))
            continue
        each = -(-rows // ranks)
        for rank, pieces in enumerate(files):
            first, last = rank * each, min((rank + 1) * each, rows)
            if first < last:
                offsets = (first, *(0 for _ in stored.shape[1:]))
                pieces.append(Extent(name, offsets, (last - first, *stored.shape[1:]), stored.torch_dtype, ranks == 1))
    return files


def _copy_rank_files(source: Checkpoint, writing: Writing) -> None:
    place, name = located(source.path)
    for rank in range(source.manifest.world_size):
        file = rank_file_name(rank)
        with writing.create(file) as stream:
            stream.write(place.read(name, file))
        if writing.records[file] != source.manifest.files[file]:
            raise CheckpointError(f"{source.path} is damaged: {file} does not match its hash")


def _index_of(index: Index, layouts: list[FileLayout], records: dict[str, FileRecord]) -> Index:
    tensors = {name: StoredTensor(one.shape, one.dtype, []) for name, one in index.tensors.items()}
    for rank, layout in enumerate(layouts):
        for piece in layout.pieces:
            tensors[piece.name].parts.append(Part(piece.offsets, piece.sizes, shard_name(rank), piece.start))
    used = {part.file for one in tensors.values() for part in one.parts}
    leaves = {name: records[name].cut() for name in sorted(used)}
    return Index(tensors, index.objects, leaves)
