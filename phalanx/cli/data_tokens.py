"""`phalanx data tokenize`: write the tokens of texts as shards for training."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import print_json
from phalanx.errors import UsageError


def add_flags(parser: FlagParser) -> None:
    """Add the flags of the action."""
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="files, and folders of files; val*, dev* and test* are for validation",
    )
    add("--out", required=True, metavar="DIR", help="the folder to write; run again, a command continues there")
    add("--tokenizer", metavar="PATH", help="a tokenizer.json, or the folder of a tokenizer of transformers")
    add("--train-bpe", type=int, metavar="N", help="train a byte-level BPE of N tokens on the input instead")
    add("--column", default="text", metavar="NAME", help="the key or column that holds the text [text]")
    add("--paragraphs", action="store_true", help="blank lines separate the documents of a text file")
    add("--end", metavar="TOKEN", help="the token after each document [the tokenizer's own]")
    add("--shard-mb", type=float, default=64, metavar="N", help="megabytes of input for each shard [64]")
    add("--workers", type=int, metavar="N", help="processes [one for each core]")
    add("--overwrite", action="store_true", help="replace shards of other files or settings in --out")


def run(namespace: argparse.Namespace) -> int:
    """Write token shards."""
    if (namespace.tokenizer is None) == (namespace.train_bpe is None):
        raise UsageError(
            "tokenize needs --tokenizer or --train-bpe, and not both",
            hint="Write: --tokenizer path/to/tokenizer.json, or --train-bpe 32000",
        )
    if namespace.workers is not None and namespace.workers < 1:
        raise UsageError(f"--workers {namespace.workers}: at least 1")
    if namespace.shard_mb <= 0:
        raise UsageError(f"--shard-mb {namespace.shard_mb}: must be above 0")
    from phalanx.zoo.pack.documents import DocumentOptions
    from phalanx.zoo.pack.tokenize import tokenize
    from phalanx.zoo.pack.tokenizer import TokenizeJob

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
