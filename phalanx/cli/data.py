"""`phalanx data`: make shards of images and of tokens, draw sets for tests, say what a folder of images holds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.flags import FlagParser, pop_action
from phalanx.cli.json_output import add_json_flag
from phalanx.errors import UsageError, unknown_name

ACTIONS = {
    "pack": "write the images of class folders as tar shards; run again, it writes missing ones",
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
        _add_token_flags(parser)
        add_json_flag(parser, "the written files")
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


def _add_token_flags(parser: FlagParser) -> None:
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


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    words = list(arguments)
    if words and words[0] in ("-h", "--help"):
        parser().print_help()
        return 0
    action = pop_action(words, "data", ACTIONS, "ACTION")
    dataset = next((word for word in words if word in SETS), "shapes")
    namespace = parser(action, dataset).parse_all(words)
    _check(action, namespace)
    from phalanx.cli.data_actions import RUN  # with numpy, which help and mistakes do not need

    return RUN[action](namespace)


def _check(action: str, namespace: argparse.Namespace) -> None:
    """Refuse what an action cannot do with these flags."""
    if action == "pack":
        folder, out = Path(namespace.folder).expanduser(), Path(namespace.out).expanduser()
        if out.resolve() == folder.resolve() or folder.resolve() in out.resolve().parents:
            hint = f"Give a folder next to it: --out {folder.resolve()}-shards"
            raise UsageError(f"--out {out} is inside of {folder}, whose folders are classes", hint=hint)
    elif action == "make" and namespace.set not in SETS:
        raise UsageError(unknown_name("set to make", namespace.set, SETS))
    elif action == "info" and not Path(namespace.folder).expanduser().is_dir():
        raise UsageError(f"{Path(namespace.folder).expanduser()} is not a folder")
    elif action == "tokenize":
        _check_tokens(namespace)


def _check_tokens(namespace: argparse.Namespace) -> None:
    if (namespace.tokenizer is None) == (namespace.train_bpe is None):
        raise UsageError(
            "tokenize needs --tokenizer or --train-bpe, and not both",
            hint="Write: --tokenizer path/to/tokenizer.json, or --train-bpe 32000",
        )
    if namespace.workers is not None and namespace.workers < 1:
        raise UsageError(f"--workers {namespace.workers}: at least 1")
    if namespace.shard_mb <= 0:
        raise UsageError(f"--shard-mb {namespace.shard_mb}: must be above 0")
