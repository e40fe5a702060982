"""Copy a checkpoint to another directory or URL: verified, resumable, and visible only when it is complete.

`reshard` writes it with its tensors in another number of files, which as many ranks read at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint import chunks
from phalanx.checkpoint.fetch import write_extents
from phalanx.checkpoint.find import Checkpoint, problem_of, read_index, verify
from phalanx.checkpoint.hashed_files import FileRecord, Leaf
from phalanx.checkpoint.index import INDEX, Index, Part, StoredTensor
from phalanx.checkpoint.layout import Extent, FileLayout, lay_out, shard_name
from phalanx.checkpoint.locations import storage_and_name, storage_at
from phalanx.checkpoint.lock import safe_name
from phalanx.checkpoint.manifest import MANIFEST, manifest_at
from phalanx.checkpoint.plain import rank_file_name
from phalanx.checkpoint.publish import COPYING
from phalanx.checkpoint.read import data_opener
from phalanx.checkpoint.storage import Draft, Storage
from phalanx.errors import CheckpointError, UsageError
from phalanx.observe.best_mark import MARK

_THREADS = 4
_PIECE_BYTES = 16 << 20
_TRIES = 2


@dataclass(frozen=True)
class CopyReport:
    """What a copy has done."""

    path: Path
    files: int
    """How many files were copied; the others were there already."""
    bytes: int


def copy_checkpoint(
    source: Checkpoint, directory: Path, notify: Callable[[str], None] = lambda name: None
) -> CopyReport:
    """Copy a checkpoint into a directory; what an interrupted copy has transferred is kept if its hash is right."""
    storage, name = storage_and_name(source.path)
    target = storage_at(directory)
    records = source.manifest.files
    present = manifest_at(target.path(name))
    if present == source.manifest and not verify(target.path(name), manifest=present):
        return CopyReport(target.path(name), 0, 0)
    is_taken = present is not None and present.run_id != source.manifest.run_id
    writing = _writing(target, f"{name}-{safe_name(source.manifest.run_id)[:6]}" if is_taken else name, records)

    def transfer(file: str) -> int:
        if problem_of(writing.path / file, records[file]) is None:
            return 0
        _copy_file(storage, name, writing, file, records[file])
        notify(file)
        return records[file].size

    with ThreadPoolExecutor(_THREADS) as threads:
        sizes = list(threads.map(transfer, sorted(records)))
        sizes += threads.map(lambda leaf: _copy_chunk(storage, target, *leaf), _chunks(source))
    with contextlib.suppress(FileNotFoundError):  # only the best one has the mark
        mark = storage.read(name, MARK)
        target.put(writing.path.name, MARK, mark)
    published = writing.publish(source.manifest)
    return CopyReport(target.path(published), sum(size > 0 for size in sizes), sum(sizes))


def _chunks(source: Checkpoint) -> set[tuple[str, Leaf]]:
    """Return the chunks of an incremental checkpoint, with their folder."""
    if source.manifest.kind != "incremental":
        return set()
    index = read_index(source)
    return {(index.chunk_folder or "", leaf._replace(start=0)) for of in index.leaves.values() for leaf in of}


def _copy_chunk(storage: Storage, target: Storage, folder: str, leaf: Leaf) -> int:
    if chunks.is_whole(target, folder, leaf.hash, leaf.size):
        return 0
    if not chunks.is_whole(storage, folder, leaf.hash, leaf.size):
        raise CheckpointError(f"the chunk {leaf.hash} of {folder} is missing or does not match its hash")
    location = chunks.location(folder, leaf.hash)
    target.put(*location, storage.read(*location))
    return leaf.size


def _writing(target: Storage, name: str, files: Collection[str]) -> Draft:
    """Return the unfinished copy of a checkpoint, which always has the same name, so that it is found again.

    Files that an earlier one left are removed, apart from those that are wanted; its manifest first.
    """
    writing = target.resume_copy(f"{COPYING}{name}", name)
    for file in [MANIFEST, *target.list(writing.path.name)]:
        if file not in files:
            target.delete(writing.path.name, file)
    return writing


def _copy_file(storage: Storage, name: str, draft: Draft, file: str, record: FileRecord) -> None:
    """Copy one file by pieces and compare its hash with the manifest's; a transfer that failed is tried again."""
    for tries_left in reversed(range(_TRIES)):
        with contextlib.suppress(FileNotFoundError):
            draft.drop(file)
        reader = storage.open(name, file)
        try:
            with draft.create(file) as stream:
                for start in range(0, reader.size, _PIECE_BYTES):
                    piece = bytearray(min(_PIECE_BYTES, reader.size - start))
                    reader.read_into([memoryview(piece)], start)
                    stream.write(piece)
                    stream.flush()
        except OSError:
            if not tries_left:
                raise
            continue
        finally:
            reader.close()
        if draft.records[file] == record:
            return
        raise CheckpointError(f"{storage.path(name)} is damaged: {file} does not match its hash")


def reshard(source: Checkpoint, directory: Path, ranks: int) -> Path:
    """Write a checkpoint into a directory with every tensor cut into `ranks` parts; return its path.

    The state of each rank (random generators, residuals) stays as it was saved, and so does the number of ranks that
    the checkpoint belongs to: it can be resumed by the same number of ranks or by any other.
    """
    if ranks < 1:
        raise UsageError(f"--ranks {ranks}: it must be 1 or more")
    index = read_index(source)
    layouts = [lay_out(pieces) for pieces in _split(index, ranks)]
    target = storage_at(directory)
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
        rows_per_rank = -(-rows // ranks)
        for rank, pieces in enumerate(files):
            first, last = rank * rows_per_rank, min((rank + 1) * rows_per_rank, rows)
            if first < last:
                offsets = (first, *(0 for _ in stored.shape[1:]))
                pieces.append(Extent(name, offsets, (last - first, *stored.shape[1:]), stored.torch_dtype, ranks == 1))
    return files


def _copy_rank_files(source: Checkpoint, draft: Draft) -> None:
    storage, name = storage_and_name(source.path)
    for rank in range(source.manifest.world_size):
        file = rank_file_name(rank)
        with draft.create(file) as stream:
            stream.write(storage.read(name, file))
        if draft.records[file] != source.manifest.files[file]:
            raise CheckpointError(f"{source.path} is damaged: {file} does not match its hash")


def _index_of(index: Index, layouts: list[FileLayout], records: dict[str, FileRecord]) -> Index:
    tensors = {name: StoredTensor(tensor.shape, tensor.dtype, []) for name, tensor in index.tensors.items()}
    for rank, layout in enumerate(layouts):
        for piece in layout.pieces:
            tensors[piece.name].parts.append(Part(piece.offsets, piece.sizes, shard_name(rank), piece.start))
    used = {part.file for tensor in tensors.values() for part in tensor.parts}
    leaves = {name: records[name].cut() for name in sorted(used)}
    return Index(tensors, index.objects, leaves)
