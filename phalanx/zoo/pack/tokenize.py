"""`phalanx data tokenize`: corpora become token shards, by several processes; a command that is run again continues."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import DataError
from phalanx.host.files import replace_file
from phalanx.observe.format import duration, size
from phalanx.zoo.data.token_shards import (
    TOKENIZER,
    ShardRecord,
    TokenManifest,
    import_tokenizers,
    read_tokenizer,
    shard_digest,
    token_dtype,
    tokenizer_digest,
    write_shard,
)
from phalanx.zoo.pack.documents import CorpusPart, DocumentOptions, plan_parts, read_documents
from phalanx.zoo.pack.tokenizer import TokenizeJob, end_of, other_input, settle_tokenizer
from phalanx.zoo.token_data import MANIFEST, read_token_manifest

_BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a process needs to write a shard."""

    folder: Path
    dtype: str
    vocab_size: int
    end: int
    options: DocumentOptions
    tokenizer_sha256: str

    def source(self, part: CorpusPart) -> str:
        """Return a hash of all that a shard's content follows from."""
        content = [asdict(part), asdict(self.options), self.end, self.dtype, self.tokenizer_sha256]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def manifest(self, shards: Iterable[ShardRecord]) -> TokenManifest:
        """Return the manifest of shards that were written with these settings."""
        return TokenManifest(
            folder=self.folder,
            dtype=self.dtype,
            vocab_size=self.vocab_size,
            end=self.end,
            tokenizer_sha256=self.tokenizer_sha256,
            shards=tuple(shards),
        )


def tokenize(job: TokenizeJob, say: Callable[[str], None]) -> TokenManifest:
    """Write the shards of a corpus that are not there yet, then the manifest; return it."""
    began = time.monotonic()
    import_tokenizers()
    parts = plan_parts(job.inputs, job.part_bytes)
    job.out.mkdir(parents=True, exist_ok=True)
    settle_tokenizer(job, parts, say)
    settings = _settings_of(job)
    existing = _kept(parts, settings, overwrite=job.overwrite)
    if existing:
        say(f"{len(existing)} of {len(parts)} shards are complete already, and their bytes are intact")
    if len(existing) < len(parts):
        _reopen(job.out, existing.values())
    records = {
        **existing,
        **_write_all([part for part in parts if part.name not in existing], parts, settings, job.workers),
    }
    manifest = settings.manifest(records[part.name] for part in parts)
    if not manifest.total("tokens"):
        raise DataError(f"{', '.join(job.inputs)}: all {manifest.total('empty')} documents are empty")
    manifest.write()
    _remove_others(job.out, {part.name for part in parts})
    say(_summary(manifest, parts, time.monotonic() - began))
    return manifest


def _settings_of(job: TokenizeJob) -> _Settings:
    """Return what follows from the tokenizer in the folder."""
    tokenizer = read_tokenizer(job.out / TOKENIZER)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    end = end_of(tokenizer, job)
    return _Settings(job.out, token_dtype(vocab_size), vocab_size, end, job.options, tokenizer_digest(job.out))


def _summary(manifest: TokenManifest, parts: list[CorpusPart], seconds: float) -> str:
    empty = manifest.total("empty")
    left_out = f", {empty:,} empty left out" if empty else ""
    read = sum(part.bytes for part in parts)
    return (
        f"{manifest.total('tokens'):,} tokens of {manifest.total('documents'):,} documents{left_out}, vocabulary "
        f"{manifest.vocab_size:,}: {manifest.folder} ({size(read)} of text in {duration(seconds)})"
    )


def _kept(parts: list[CorpusPart], settings: _Settings, *, overwrite: bool) -> dict[str, ShardRecord]:
    """Return the shards that are complete and made of the same input; an earlier manifest of other input is refused."""
    document = read_token_manifest(settings.folder)
    written = [ShardRecord(**shard) for shard in (document or {}).get("shards", ())]
    records = (path.read_text(encoding="utf-8") for path in settings.folder.glob("*-[0-9]*.json"))
    written += [ShardRecord(**json.loads(record)) for record in records]
    sources = {part.name: settings.source(part) for part in parts}
    same = [record for record in written if sources.get(record.name) == record.source]
    if document is not None and len(same) < len(written) and not overwrite:
        raise other_input(settings.folder)
    return {
        candidate.name: candidate
        for candidate in same
        if shard_digest(settings.folder, candidate.name) == candidate.sha256
    }


def _reopen(folder: Path, records: Iterable[ShardRecord]) -> None:
    """Take the manifest away while shards are written; the records of those that stay are written again."""
    for record in records:
        replace_file(folder / f"{record.name}.json", json.dumps(asdict(record)))
    (folder / MANIFEST).unlink(missing_ok=True)


def _write_all(
    missing: list[CorpusPart], parts: list[CorpusPart], settings: _Settings, workers: int | None
) -> dict[str, ShardRecord]:
    """Write shards, in this process or in several, and show how far it is."""
    count = min(workers or os.cpu_count() or 1, len(missing))
    total = sum(part.bytes for part in parts)
    done = total - sum(part.bytes for part in missing)
    with _progress(total, done) as advance:
        if count > 1:
            return _write_by_processes(missing, settings, count, advance)
        writer = _Writer(settings, advance)
        return {part.name: writer.write(part) for part in missing}


def _write_by_processes(
    missing: list[CorpusPart], settings: _Settings, count: int, advance: Callable[[int], None]
) -> dict[str, ShardRecord]:
    context = multiprocessing.get_context("spawn")
    counter: Any = context.Value("q", 0)
    pool = ProcessPoolExecutor(count, context, _start_writer, (settings, counter))
    try:
        waiting: set[Future[ShardRecord]] = {pool.submit(_write_part, part) for part in missing}
        records: dict[str, ShardRecord] = {}
        reported = 0
        while waiting:
            finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            records |= {record.name: record for record in (future.result() for future in finished)}
            advance((now := counter.value) - reported)
            reported = now
        return records
    finally:
        pool.shutdown(cancel_futures=True)


_writer: _Writer | None = None
"""That of a process of the pool."""


def _start_writer(settings: _Settings, counter: Any) -> None:
    global _writer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes use the cores already

    def count(more: int) -> None:
        with counter.get_lock():
            counter.value += more

    _writer = _Writer(settings, count)


def _write_part(part: CorpusPart) -> ShardRecord:
    assert _writer is not None, "started before"
    return _writer.write(part)


class _Writer:
    """Writes shards; `advance` is called with the bytes of input that were read since the last call."""

    def __init__(self, settings: _Settings, advance: Callable[[int], None]) -> None:
        self._settings, self._advance = settings, advance
        self._tokenizer = read_tokenizer(settings.folder / TOKENIZER)
        # A document that has "<|endoftext|>" in its text does not end there.
        self._tokenizer.encode_special_tokens = True
        # Files of tokenizers for other models cut texts to 512 tokens, say, or fill them up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._empty = self._counted = 0

    def write(self, part: CorpusPart) -> ShardRecord:
        """Write one shard, then its record: a shard with a record is complete."""
        settings = self._settings
        self._empty = self._counted = 0
        tokens, documents, digest = write_shard(settings.folder, part.name, settings.dtype, self._encoded(part))
        self._advance(part.bytes - self._counted)
        record = ShardRecord(
            name=part.name,
            split=part.split,
            tokens=tokens,
            documents=documents,
            empty=self._empty,
            sha256=digest,
            source=settings.source(part),
        )
        replace_file(settings.folder / f"{part.name}.json", json.dumps(asdict(record)))
        return record

    def _encoded(self, part: CorpusPart) -> Iterator[NDArray[Any]]:
        """Yield the tokens of each document with the end after them; those without a token are counted."""
        texts = (text for piece in part.pieces for text in read_documents(piece, self._settings.options))
        for batch in _batches(texts):
            for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                if encoding.ids:
                    yield np.asarray([*encoding.ids, self._settings.end])
                else:
                    self._empty += 1
            more = min(sum(map(len, batch)), part.bytes - self._counted)
            self._counted += more
            self._advance(more)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    length = 0
    for text in texts:
        batch.append(text)
        length += len(text)
        if length >= _BATCH_BYTES:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


@contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, with bytes per second and the time left; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda more: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("tokens", total=total, completed=done)
        yield lambda more: progress.advance(task, more)


def _remove_others(folder: Path, names: set[str]) -> None:
    """Remove the records, which are in the manifest now, and shards of an earlier input."""
    for path in folder.iterdir():
        is_shard = path.suffix in (".bin", ".idx") and path.stem not in names
        if is_shard or (path.suffix == ".json" and path.stem in names):
            path.unlink()
