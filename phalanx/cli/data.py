"""`phalanx data`: make shards of images and of tokens, draw sets for tests, say what a folder of images holds."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli import data_tokens
from phalanx.cli.flags import FlagParser, pop_action
from phalanx.cli.json_output import add_json_flag, print_json
from phalanx.errors import UsageError, unknown_name
from phalanx.observe.format import duration, size, table
from phalanx.observe.guard import say_to_user

if TYPE_CHECKING:
    from phalanx.zoo.data.shard_index import ShardList, ShardRecord
    from phalanx.zoo.pack.pack import FolderSource
    from phalanx.zoo.pack.shapes import ShapeSource

ACTIONS = {
    "pack": "write the images of class folders as tar shards; run again, it writes what is missing",
    "make": "draw a set for tests and benchmarks: images as tar shards, or questions in SQuAD's format",
    "info": "show the splits, shards and classes of a folder of images",
    "tokenize": "write the tokens of texts (.txt, .md, .jsonl, .parquet, .arrow) as shards for training",
}
SETS = {
    "shapes": "classes of shapes, textures, backgrounds and colours, at random places, sizes and angles",
    "questions": "short stories with questions whose answers are known, their texts, and a tokenizer",
}
_USAGE = {
    "pack": "FOLDER --out DIR",
    "make": "shapes|questions --out DIR",
    "info": "DIR",
    "tokenize": "INPUT... --out DIR --tokenizer PATH | --train-bpe N",
}
_ENDS = """FOLDER holds train/<class>/ and val/<class>/ with images, or <class>/ alone.
Train on the shards with data = {name = "shards", root = "DIR"} in a recipe."""


def parser(action: str = "pack", dataset: str = "shapes") -> FlagParser:
    """Return the parser of one action; `dataset`: the set that `make` is asked for."""
    listed = "\n".join(f"  {name:<9} {text}" for name, text in ACTIONS.items())
    parser = FlagParser(
        prog=f"phalanx data {action}",
        usage=f"phalanx data {action} {_USAGE[action]} [options]",
        description=f"{ACTIONS[action]}.",
        epilog=f"actions:\n{listed}\n\n{_ENDS}",
    )
    add = parser.add_argument
    if action == "tokenize":
        data_tokens.add_flags(parser)
        add_json_flag(parser, "what was written")
        return parser
    if action == "make":
        add("set", metavar="SET", help="\n".join(f"{name}: {text}" for name, text in SETS.items()))
        add("--seed", type=int, default=0, metavar="N", help="another number draws another set [0]")
        add_json_flag(parser, "it")
    if action == "make" and dataset == "questions":
        add("--out", required=True, metavar="DIR", help="the folder to write")
        add("--count", type=int, default=20_000, metavar="N", help="training questions; a tenth of it is dev [20000]")
        add("--unanswerable", type=float, default=0.0, metavar="SHARE", help="questions without an answer [0]")
        return parser
    if action != "make":
        content = "class folders with images" if action == "pack" else "shards, tars or class folders"
        add("folder", metavar=_USAGE[action].split()[0], help=content)
    if action != "info":
        usual = "about 200 MB each" if action == "pack" else "2,500 images each"
        add("--out", required=True, metavar="DIR", help="the folder for the shards")
        add("--shards", type=int, metavar="N", help=f"tars of the training split [{usual}]")
        add("--workers", type=int, metavar="N", help="processes that write [one per core]")
    if action == "make":
        add("--images", type=int, default=50_000, metavar="N", help="images of the training split [50000]")
        add("--val-images", type=int, metavar="N", help="images of the validation split [a tenth of --images]")
        add("--size", type=int, default=64, metavar="N", help="the side of an image in pixels [64]")
        add("--classes", type=int, default=200, metavar="N", help="how many classes, up to 400 [200]")
    else:
        add_json_flag(parser, "it")
    add("--verify", action="store_true", help="read every shard and compare its checksum; exit code 1 if one differs")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    words = list(arguments)
    if words and words[0] in ("-h", "--help"):
        parser().print_help()
        return 0
    action = pop_action(words, "data", ACTIONS, "ACTION")
    dataset = next((word for word in words if word in SETS), "shapes")
    namespace = parser(action, dataset).parse_all(words)
    return {"pack": _pack, "make": _make, "info": _info, "tokenize": data_tokens.run}[action](namespace)


def _pack(namespace: argparse.Namespace) -> int:
    from phalanx.zoo.pack.pack import FolderSource

    folder, out = Path(namespace.folder).expanduser(), Path(namespace.out).expanduser()
    if out.resolve() == folder.resolve() or folder.resolve() in out.resolve().parents:
        hint = f"Give a folder beside it: --out {folder.resolve()}-shards"
        raise UsageError(f"--out {out} is inside of {folder}, whose folders are classes", hint=hint)
    source = FolderSource(folder)
    if source.warning:
        say_to_user(f"warning: {source.warning}")
    return _write(namespace, source)


def _make(namespace: argparse.Namespace) -> int:
    if namespace.set not in SETS:
        raise UsageError(unknown_name("set to make", namespace.set, SETS))
    if namespace.set == "questions":
        return _make_questions(namespace)
    from phalanx.zoo.pack.shapes import ShapeSource

    images, classes = namespace.images, namespace.classes
    val_images = max(classes, images // 10) if namespace.val_images is None else namespace.val_images
    return _write(namespace, ShapeSource(images, val_images, namespace.size, classes, namespace.seed))


def _make_questions(namespace: argparse.Namespace) -> int:
    from phalanx.zoo.pack.questions import QuestionsJob, write_questions

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
    from phalanx.zoo.pack.write import core_count, damaged_shards, write_folder

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
    from phalanx.zoo.data.shard_index import ShardList
    from phalanx.zoo.pack.write import core_count, damaged_shards

    folder = Path(namespace.folder).expanduser()
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
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
    from phalanx.zoo.data.image_files import about_empty, list_splits
    from phalanx.zoo.data.shard_index import foreign_indexes

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
