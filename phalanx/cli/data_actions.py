"""The actions of `phalanx data`. This module imports numpy; `cli.data` loads it when an action runs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.cli.json_output import print_json
from phalanx.errors import UsageError
from phalanx.observe.format import duration, size, table
from phalanx.observe.guard import say_to_user
from phalanx.zoo.data.image_files import about_empty, list_splits
from phalanx.zoo.data.shard_index import ShardList, ShardRecord, foreign_indexes
from phalanx.zoo.pack.documents import DocumentOptions
from phalanx.zoo.pack.pack import FolderSource
from phalanx.zoo.pack.questions import QuestionsJob, write_questions
from phalanx.zoo.pack.shapes import ShapeSource
from phalanx.zoo.pack.tokenize import tokenize
from phalanx.zoo.pack.tokenizer import TokenizeJob
from phalanx.zoo.pack.write import core_count, damaged_shards, write_folder


def _pack(namespace: argparse.Namespace) -> int:
    source = FolderSource(Path(namespace.folder).expanduser())
    if source.warning:
        say_to_user(f"warning: {source.warning}")
    return _write(namespace, source)


def _make(namespace: argparse.Namespace) -> int:
    if namespace.set == "questions":
        return _make_questions(namespace)
    images, classes = namespace.images, namespace.classes
    val_images = max(classes, images // 10) if namespace.val_images is None else namespace.val_images
    return _write(namespace, ShapeSource(images, val_images, namespace.size, classes, namespace.seed))


def _make_questions(namespace: argparse.Namespace) -> int:
    out = Path(namespace.out).expanduser()
    counts = write_questions(
        QuestionsJob(out=out, count=namespace.count, unanswerable=namespace.unanswerable, seed=namespace.seed)
    )
    if namespace.json:
        print_json({"out": str(out), "questions": counts})
        return 0
    written = ", ".join(f"{split}.json ({count:,} questions)" for split, count in counts.items())
    print(f"{out}: {written}, texts/, tokenizer/\ntrain on it: phalanx train bert-qa --data {out}")
    return 0


def _write(namespace: argparse.Namespace, source: FolderSource | ShapeSource) -> int:
    """Write the shards of a source, and show what there is then."""
    out, samples = Path(namespace.out).expanduser(), source.lengths["train"]
    shards = source.usual_shards if namespace.shards is None else namespace.shards
    workers = core_count() if namespace.workers is None else namespace.workers
    if not 1 <= shards <= samples or workers < 1:
        raise UsageError(
            f"--shards {shards}, --workers {workers}: there are 1 to {samples} shards (a training image in each), and "
            "1 or more processes"
        )
    began = time.monotonic()
    with _progress(f"writing {out}", sum(source.lengths.values())) as report:
        listed = write_folder(out, source, shards, report, workers)
    damaged = []
    if namespace.verify:
        with _progress(f"reading {out}", sum(source.lengths.values())) as report:
            damaged = damaged_shards(out, listed, report, workers)
    return _show(namespace, out, listed, damaged, f"in {duration(time.monotonic() - began)}")


def _info(namespace: argparse.Namespace) -> int:
    folder = Path(namespace.folder).expanduser()
    listed = ShardList.read(folder)
    if listed is None:
        if namespace.verify:
            raise UsageError(f"{folder} has no checksums to compare", hint="phalanx data pack writes them.")
        return _show_others(namespace, folder)
    damaged = []
    if namespace.verify:
        with _progress(f"reading {folder}", sum(record.samples for record in listed.records)) as report:
            damaged = damaged_shards(folder, listed, report, core_count())
    return _show(namespace, folder, listed, damaged)


def _show(
    namespace: argparse.Namespace, folder: Path, listed: ShardList, damaged: Sequence[ShardRecord], took: str = ""
) -> int:
    """Print what a folder of shards holds; the exit code is 1 where shards are damaged."""
    missing = [record.name for record in listed.records if not record.sha256]
    facts = {
        "path": str(folder),
        "classes": listed.classes,
        "about": listed.about,
        "missing": missing,
        "damaged": [record.name for record in damaged],
        "splits": {split: [record._asdict() for record in records] for split, records in listed.splits.items()},
    }
    if namespace.json:
        print_json(facts)
        return int(bool(damaged))
    rows = [("split", "images", "shards", "size", "per image")]
    for split, records in listed.splits.items():
        images, total = sum(record.samples for record in records), sum(record.bytes for record in records)
        rows.append((split, f"{images:,}", str(len(records)), size(total), size(total / max(1, images))))
    about = ", ".join(f"{name} {value}" for name, value in listed.about.items())
    names = ", ".join(listed.classes[:3]) + (", ..." if len(listed.classes) > 3 else "")
    print(f"{folder}: {len(listed.classes)} classes ({names}), {about} {took}".rstrip())
    print(table(rows))
    for problem, shards in (("not written yet", missing), ("damaged", facts["damaged"])):
        if shards:
            print(
                f"{problem}: {', '.join(shards)}\n  Run the command that wrote the folder again: it writes only these."
            )
    return int(bool(damaged))


def _show_others(namespace: argparse.Namespace, folder: Path) -> int:
    """Print what a folder holds that was not written by this command: tars of WebDataset, or class folders."""
    if tars := sorted(folder.rglob("*.tar")):
        indexes = foreign_indexes(tars)
        counts = {str(tar.relative_to(folder)): len(index.labels) for tar, index in zip(tars, indexes, strict=True)}
        classes = 1 + max(int(index.labels.max()) for index in indexes)
        facts: dict[str, Any] = {"path": str(folder), "kind": "tars", "classes": classes, "images": counts}
        warning = ""
    else:
        names, splits = list_splits(folder)
        counts = {split: len(samples) for split, samples in splits.items()}
        facts = {"path": str(folder), "kind": "class folders", "classes": len(names), "images": counts}
        warning = about_empty(names, splits["train"])
    if namespace.json:
        print_json(facts | {"warning": warning})
        return 0
    print(f"{folder}: {facts['kind']}, {facts['classes']} classes")
    print(table([("", "images"), *((name, f"{count:,}") for name, count in counts.items())]))
    if warning:
        print(f"warning: {warning}")
    return 0


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[ShardRecord, str], None]]:
    """Show shards as they are done: as a bar on a terminal, one line each elsewhere; on standard error."""
    if not sys.stderr.isatty():
        yield lambda record, how: print(f"  {record.name} {how}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("images"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda record, how: bar.advance(task, 0 if how == "damaged" else record.samples)  # it is written again


def _tokenize(namespace: argparse.Namespace) -> int:
    job = TokenizeJob(
        inputs=tuple(namespace.inputs),
        out=Path(namespace.out),
        tokenizer=None if namespace.tokenizer is None else Path(namespace.tokenizer).expanduser(),
        train_bpe=namespace.train_bpe,
        options=DocumentOptions(namespace.column, namespace.paragraphs),
        end=namespace.end,
        workers=namespace.workers,
        part_bytes=max(1, int(namespace.shard_mb * 1e6)),
        overwrite=namespace.overwrite,
    )
    out = sys.stderr if namespace.json else sys.stdout
    manifest = tokenize(job, lambda text: print(text, file=out, flush=True))
    if namespace.json:
        counts = {unit: manifest.total(unit) for unit in ("tokens", "documents", "empty")}
        print_json({"out": str(job.out), **counts, "vocab_size": manifest.vocab_size, "shards": len(manifest.shards)})
    else:
        print(f"train on it: phalanx train gpt --data {job.out if job.out.is_absolute() else f'./{job.out}'}")
    return 0


RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "pack": _pack,
    "make": _make,
    "info": _info,
    "tokenize": _tokenize,
}
