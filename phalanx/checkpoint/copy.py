"""Copy a checkpoint to another directory or URL: verified, resumable, and visible only when it is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint import chunks
from phalanx.checkpoint.files import FileRecord, Leaf
from phalanx.checkpoint.find import Checkpoint, problem_of, read_index, verify
from phalanx.checkpoint.lock import safe_name
from phalanx.checkpoint.manifest import MANIFEST, manifest_at
from phalanx.checkpoint.place import LocalPlace, LocalWriting, Place, Writing, located, place_at
from phalanx.checkpoint.publish import COPYING
from phalanx.checkpoint.remote import RemotePlace, RemoteWriting
from phalanx.errors import CheckpointError
from phalanx.host.files import make_private
from phalanx.observe.best import MARK

_THREADS = 4
_PIECE_BYTES = 16 << 20
_TRIES = 2


@dataclass(frozen=True)
class Copied:
    """What a copy has done."""

    path: Path
    files: int
    """How many files were copied; the others were there already."""
    bytes: int


def copy_checkpoint(source: Checkpoint, directory: Path, notify: Callable[[str], None] = lambda name: None) -> Copied:
    """Copy a checkpoint into a directory; what an interrupted copy has transferred is kept if its hash is right."""
    place, name = located(source.path)
    target = place_at(directory)
    wanted = source.manifest.files
    present = manifest_at(target.path(name))
    if present == source.manifest and not verify(target.path(name), manifest=present):
        return Copied(target.path(name), 0, 0)
    is_taken = present is not None and present.run_id != source.manifest.run_id
    writing = _writing(target, f"{name}-{safe_name(source.manifest.run_id)[:6]}" if is_taken else name, wanted)

    def transfer(file: str) -> int:
        if problem_of(writing.path / file, wanted[file]) is None:
            return 0
        _copy_file(place, name, writing, file, wanted[file])
        notify(file)
        return wanted[file].size

    with ThreadPoolExecutor(_THREADS) as threads:
        sizes = list(threads.map(transfer, sorted(wanted)))
        sizes += threads.map(lambda leaf: _copy_chunk(place, target, *leaf), _chunks(source))
    with contextlib.suppress(FileNotFoundError):  # only the best one has the mark
        mark = place.read(name, MARK)
        target.put(writing.path.name, MARK, mark)
    published = writing.publish(source.manifest)
    return Copied(target.path(published), sum(size > 0 for size in sizes), sum(sizes))


def _chunks(source: Checkpoint) -> set[tuple[str, Leaf]]:
    """Return the chunks of an incremental checkpoint, with their folder."""
    if source.manifest.kind != "incremental":
        return set()
    index = read_index(source)
    return {(index.chunk_folder or "", leaf._replace(start=0)) for of in index.leaves.values() for leaf in of}


def _copy_chunk(place: Place, target: Place, folder: str, leaf: Leaf) -> int:
    if chunks.is_whole(target, folder, leaf.hash, leaf.size):
        return 0
    if not chunks.is_whole(place, folder, leaf.hash, leaf.size):
        raise CheckpointError(f"the chunk {leaf.hash} of {folder} is missing or does not match its hash")
    location = chunks.location(folder, leaf.hash)
    target.put(*location, place.read(*location))
    return leaf.size


def _writing(target: Place, name: str, wanted: Collection[str]) -> LocalWriting | RemoteWriting:
    """Return the unfinished copy of a checkpoint, which always has the same name, so that it is found again.

    Files that an earlier one left are removed, apart from those that are wanted; its manifest first.
    """
    token = f"{COPYING}{name}"
    writing: LocalWriting | RemoteWriting
    if isinstance(target, RemotePlace):
        target.path(token).write_bytes(b"")
        writing = RemoteWriting(target.directory, token, name)
    else:
        assert isinstance(target, LocalPlace)
        make_private(target.directory)
        writing = LocalWriting(target.directory, token)
        writing.path.mkdir(exist_ok=True)
    for file in [MANIFEST, *target.list(writing.path.name)]:
        if file not in wanted:
            target.delete(writing.path.name, file)
    return writing


def _copy_file(place: Place, name: str, writing: Writing, file: str, record: FileRecord) -> None:
    """Copy one file by pieces and compare its hash with the manifest's; a transfer that failed is tried again."""
    for left in reversed(range(_TRIES)):
        with contextlib.suppress(FileNotFoundError):
            writing.drop(file)
        reader = place.open(name, file)
        try:
            with writing.create(file) as stream:
                for start in range(0, reader.size, _PIECE_BYTES):
                    piece = bytearray(min(_PIECE_BYTES, reader.size - start))
                    reader.read_into([memoryview(piece)], start)
                    stream.write(piece)
                    stream.flush()
        except OSError:
            if not left:
                raise
            continue
        finally:
            reader.close()
        if writing.records[file] == record:
            return
        raise CheckpointError(f"{place.path(name)} is damaged: {file} does not match its hash")
