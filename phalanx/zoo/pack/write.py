"""Write a folder of tar shards by several processes: complete shards stay, so that a second call goes on.

A shard is renamed into place when it is whole, and `index.json` lists it with its checksum after that. The same source
and number of shards give the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import signal
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from phalanx.errors import DataError, UsageError
from phalanx.host.files import replacing
from phalanx.zoo.data.shard_index import (
    HEADER,
    ShardIndex,
    ShardList,
    ShardRecord,
    file_hash,
    index_path,
    locked,
)

_FEW = 2000
"""Samples for which starting processes takes longer than writing them here."""

Report = Callable[[ShardRecord, str], object]
"""Gets each shard when it is done, and how: "written", "intact" or "damaged"."""


class EncodedSample(NamedTuple):
    """An image as the bytes of its file; `name` is what messages call it."""

    name: str
    ending: str
    label: int
    content: bytes


class ShardSource(Protocol):
    """What shards are made of."""

    classes: list[str]
    about: dict[str, Any]
    """Facts for `phalanx data info`."""
    lengths: dict[str, int]
    """Samples of each split."""

    def hash(self) -> str:
        """Return a hash of all samples and their order."""

    def samples(self, split: str, first: int, stop: int) -> Iterable[EncodedSample]:
        """Return some samples of a split: an object that can be pickled, and reads them when it is iterated."""


@dataclass(frozen=True)
class _Shard:
    """A shard to write: the number of its first sample is part of the names in the tar."""

    split: str
    name: str
    first: int
    stop: int


class _HashedFile(io.RawIOBase):
    """Writes to a file and hashes what it writes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._written = 0

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._hash.update(data)
        self._written += len(data)
        return len(data)

    def tell(self) -> int:
        return self._written

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def write_shard(path: Path, samples: Iterable[EncodedSample], first: int = 0) -> ShardRecord:
    """Write one tar and its index."""
    rows: list[tuple[int, int, int, str]] = []
    with replacing(path) as file:
        hashed = _HashedFile(file)
        with tarfile.open(fileobj=hashed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for number, sample in enumerate(samples, first):
                rows.append((hashed.tell() + HEADER, len(sample.content), sample.label, sample.name))
                _add(tar, f"{number:06d}{sample.ending}", sample.content)
                _add(tar, f"{number:06d}.cls", str(sample.label).encode())
    ShardIndex.of(rows, hashed.tell()).write(index_path(path))
    return ShardRecord(path.name, len(rows), hashed.tell(), hashed.hexdigest())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)  # without a time and an owner: the same images give the same tar
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def is_intact(folder: Path, record: ShardRecord) -> bool:
    """Whether a shard has the checksum that `index.json` says, and an index."""
    path = folder / record.name
    if not record.sha256 or not path.exists() or not index_path(path).exists():
        return False
    return path.stat().st_size == record.bytes and file_hash(path) == record.sha256 and _has_index(path, record)


def _has_index(path: Path, record: ShardRecord) -> bool:
    try:
        index = ShardIndex.read(index_path(path))
    except DataError:
        return False
    return index.bytes == record.bytes and len(index.offsets) == record.samples


def damaged_shards(folder: Path, listed: ShardList, report: Report, workers: int = 1) -> list[ShardRecord]:
    """Compare the checksum of every shard; return those that are missing or damaged."""
    intact = _intact_names(folder, listed.records, report, workers)
    return [record for record in listed.records if record.name not in intact]


def _intact_names(folder: Path, records: Sequence[ShardRecord], report: Report, workers: int) -> set[str]:
    intact = set()
    for (_, record), is_whole in _each(is_intact, [(folder, record) for record in records], workers, _total(records)):
        if is_whole:
            intact.add(record.name)
        report(record, "intact" if is_whole else "damaged")
    return intact


def write_folder(out: Path, source: ShardSource, shards: int, report: Report, workers: int = 1) -> ShardList:
    """Write the shards that are missing in `out`; those that are there are kept if their checksums are right."""
    plan = _plan(source, shards)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        for unfinished in out.glob(".*.new"):  # of a process that was killed
            unfinished.unlink()
        return _complete(out, source, plan, report, workers)


def _complete(out: Path, source: ShardSource, plan: Sequence[_Shard], report: Report, workers: int) -> ShardList:
    listed = _begin(out, source, plan)
    intact = _intact_names(out, [record for record in listed.records if record.sha256], report, workers)
    missing = [shard for shard in plan if shard.name not in intact]
    tasks = [(out / item.name, source.samples(item.split, item.first, item.stop), item.first) for item in missing]
    for _, record in _each(write_shard, tasks, workers, sum(item.stop - item.first for item in missing)):
        listed = _with(listed, record)
        listed.write(out)
        report(record, "written")
    return listed


def _with(listed: ShardList, record: ShardRecord) -> ShardList:
    """Return the list with a shard that was written."""
    splits = {
        split: [record if other.name == record.name else other for other in records]
        for split, records in listed.splits.items()
    }
    return replace(listed, splits=splits)


def _begin(out: Path, source: ShardSource, plan: Sequence[_Shard]) -> ShardList:
    """Return what `out` has; raise where it has other shards. An empty folder gets a list of what is to be written."""
    splits = {
        split: [ShardRecord(shard.name, shard.stop - shard.first) for shard in plan if shard.split == split]
        for split in source.lengths
    }
    fresh = ShardList(source.classes, splits, source.hash(), source.about)
    listed = ShardList.read(out)
    if listed is None:
        if other := next(out.glob("*.tar"), None):
            raise UsageError(f"{out} already holds tars that are not listed, such as {other.name}", hint=_OTHER)
        fresh.write(out)
        return fresh
    shape = {split: [(record.name, record.samples) for record in records] for split, records in listed.splits.items()}
    fresh_shape = {split: [(record.name, record.samples) for record in records] for split, records in splits.items()}
    if listed.source != fresh.source or shape != fresh_shape:
        difference = (
            "of other samples" if listed.source != fresh.source else f"in another number: {len(listed.records)}"
        )
        raise UsageError(f"{out} already holds shards {difference}", hint=_OTHER)
    return listed


_OTHER = "Give another folder: --out DIR; or remove this one."


def _plan(source: ShardSource, shards: int) -> list[_Shard]:
    """Cut the splits into shards of equal lengths (by one); the other splits get shards as long as those of "train"."""
    longest = -(-source.lengths["train"] // shards)
    plan = []
    for split, length in source.lengths.items():
        count = min(length, shards if split == "train" else max(1, round(length / longest)))
        bounds = [length * number // count for number in range(count + 1)]
        plan += [
            _Shard(split, f"{split}-{number:05d}.tar", bounds[number], bounds[number + 1]) for number in range(count)
        ]
    return plan


def _total(records: Sequence[ShardRecord]) -> int:
    return sum(record.samples for record in records)


def _each(work: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], workers: int, samples: int) -> Iterator[Any]:
    """Yield (task, result) of each task as it is done: by processes, or here where there is little to do."""
    if workers <= 1 or len(tasks) <= 1 or samples < _FEW:
        for task in tasks:
            yield task, work(*task)
        return
    # Not forked: a progress bar has a thread.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(tasks)), mp_context=context, initializer=_end_on_interrupt) as pool:
        try:
            waiting = {pool.submit(work, *task): task for task in tasks}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _end_on_interrupt() -> None:
    """End this process at Ctrl-C: a process of a pool would go on with its next task."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def core_count() -> int:
    """Return how many processes this machine runs at once."""
    return len(os.sched_getaffinity(0))
