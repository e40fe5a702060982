"""Your own files as a data set: texts, tables (parquet, jsonl, csv), images in class folders, tar shards.

Files or folders named train*, and val*, valid*, dev* or test*, are the two splits; without such names a part of the
samples is held out for validation. The meaning of columns and classes is learned from the training files alone. `text`
is a corpus that every machine has: the sources of Python itself.
"""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.config.option import limited
from phalanx.data.fetch import GatherDataset
from phalanx.errors import DataError, UsageError
from phalanx.zoo.data.image_files import IMAGE_ENDINGS, find_images
from phalanx.zoo.data.imagefolder import ImageFolder
from phalanx.zoo.data.places import FoundFiles, Root, find_files
from phalanx.zoo.data.splits import check_fraction, held_out, held_out_part
from phalanx.zoo.data.tables import (
    TARGETS,
    VOCABULARY,
    TableDataset,
    TableShape,
    check_columns,
    classes_of,
    read_table,
    read_tokenizer,
    target_type_of,
)

_KINDS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".tar": "webdataset",
    ".txt": "text",
    ".md": "text",
}
"""The reader of each ending, by its name in the library datasets."""
_TABLES = ("parquet", "arrow", "json", "csv")
_UNLABELLED = ("unsupervised", "unlabeled", "unlabelled")
"""Beginnings of the names of files that are of no split: their samples have no labels."""
_VALIDATION = (("val",), ("dev",), ("test",))
"""Beginnings of the names of files for validation; the first that any file has are meant."""


def files(
    split: str = "train",
    root: Root | None = None,
    inputs: str | Sequence[str] | None = None,
    target: str | None = None,
    target_type: str | None = None,
    text: str | Sequence[str] | None = None,
    tokenizer: str | None = None,
    seq_len: int = 128,
    size: int = 224,
    channels: int = 3,
    val_fraction: float = 0.1,
    class_names: Sequence[str] | None = None,
    needs_target: bool = True,
) -> Any:
    """Return one split of the data in a file or folder, in files that match a pattern, or in a list of these.

    Texts become windows of `seq_len` tokens (bytes, or those of the Hugging Face tokenizer in the folder
    `tokenizer`). Rows of tables become (inputs, target): `inputs` and `target` name columns, and without them the
    column "label" or the like is the target and all numbers are inputs. `target_type`: "class" for labels, "number"
    for quantities, by default whether the column holds fractions. Rows of texts (the column `text`, or with a
    `tokenizer` the first one) become dicts with input_ids, attention_mask and labels; two columns in `text` are pairs
    of texts, whose token_type_ids say which text each token is of. Images are resized to `size`;
    `channels` = 1 makes them grey. `class_names`: all labels in their order, where the files may lack some.
    `val_fraction`: the part that is held out where no files are for validation; 1 for all. Without `needs_target` the
    samples are inputs alone.
    """
    if root is None:
        raise UsageError("the data set 'files' needs to know where the files are", hint="Write: --data ./my-files")
    check_fraction(val_fraction, split)
    source, kind = _survey(root)
    if kind == "images":
        images = find_images(root, split, class_names, needs_target=needs_target)
        return held_out_part(ImageFolder(images, size=size, channels=channels), images.part, val_fraction)
    chosen, part = of_split(source.folder, source.files, split)
    if kind == "text":
        tokens = _tokens("\n".join(file.read_text(encoding="utf-8", errors="replace") for file in chosen), tokenizer)
        return _windows(tokens, seq_len, part, val_fraction, tokenizer)
    table, title = read_table(kind, chosen), str(chosen[0]) if len(chosen) == 1 else source.title
    text = text if text is not None or target is not None or table.column_names != ["text"] else "text"
    texts = () if text is None else (text,) if isinstance(text, str) else tuple(text)
    if len(texts) == 1 and target is None and inputs is None and class_names is None:
        check_columns(table, texts, title)
        return _windows(_tokens(_joined(table, texts[0], title), tokenizer), seq_len, part, val_fraction, tokenizer)
    if not needs_target:
        target = None
    elif target is None:
        target = next((name for name in TARGETS if name in table.column_names), None)
        if texts and target is None:
            raise UsageError(
                f"{title} has no column called {', '.join(TARGETS[:-1])} or {TARGETS[-1]}; its columns: "
                f"{', '.join(table.column_names)}",
                hint="Name the target: --set data.target=NAME",
            )
    if target is not None:
        check_columns(table, [target], title)
        target_type = target_type or target_type_of(table.features[target])
        if class_names is None and target_type == "class":
            training = of_split(source.folder, source.files, "train")[0]
            class_names = classes_of(kind, training, table, target, of_texts=bool(texts))
    shape = TableShape(inputs, target, target_type, list(class_names or ()), texts, tokenizer, seq_len)
    rows = TableDataset(table, title, shape, needs_target=needs_target)
    if split == "train":
        rows.note_left_out()
    return held_out_part(rows, part, val_fraction)


def rows_of(root: Root, split: str, columns: Sequence[str], val_fraction: float = 0.1) -> Any:
    """Return the rows of a split of table files (jsonl, csv, parquet, ...), a sequence of dicts, with these columns."""
    source, kind = _survey(root)
    if kind in ("images", "text", "webdataset"):
        raise DataError(f"{source.title} holds no table files.", hint="Give .jsonl, .csv or .parquet files.")
    chosen, part = of_split(source.folder, source.files, split)
    table = read_table(kind, chosen)
    check_columns(table, columns, source.title)
    return held_out_part(table, part, val_fraction)


def kind_of_files(root: Root) -> str:
    """Return what the files at a place are: "images", "text", a kind of table, or "webdataset"."""
    return _survey(root)[1]


def _survey(root: Root) -> tuple[FoundFiles, str]:
    """Return the files of the most frequent kind at a place, and that kind."""
    source = find_files(root)
    endings = Counter(file.suffix.lower() for file in source.files)
    readable = [ending for ending in endings if ending in _KINDS or ending in IMAGE_ENDINGS]
    # In a folder other files may lie about; those that were named are all meant.
    strange = [] if source.folder is not None else [ending for ending in endings if ending not in readable]
    if not readable or strange:
        content = (
            ", ".join(f"{ending or 'no ending'} ({count})" for ending, count in endings.most_common(5)) or "nothing"
        )
        holds = "is no file" if source.folder is None else "holds no files"
        raise DataError(
            f"{source.title} {holds} that can be read as data; found: {content}.",
            hint=f"Known endings: {', '.join(sorted({*_KINDS, *IMAGE_ENDINGS}))}. Others: write a function, "
            "--data my_package.data:load",
        )
    kinds = {"images" if ending in IMAGE_ENDINGS else _KINDS[ending] for ending in readable}
    if source.folder is None and len(kinds) > 1:
        raise DataError(f"{source.title} are files of different kinds: {', '.join(sorted(kinds))}.")
    # A README.md or a .json file next to one file of data describes it.
    best = max(readable, key=lambda ending: endings[ending] / (2 if ending in (".json", ".md") else 1))
    kind = "images" if best in IMAGE_ENDINGS else _KINDS[best]
    # Next to rows in .jsonl files, a .json file describes them.
    endings_read = (
        {best} if kind == "json" else {ending for ending, kind_of_ending in _KINDS.items() if kind_of_ending == kind}
    )
    return source._replace(files=[file for file in source.files if file.suffix.lower() in endings_read]), kind


def of_split(folder: Path | None, listed: list[Path], split: str) -> tuple[list[Path], str | None]:
    """Return the files of a split, and which part of their samples: None for all, else the split's name.

    Files for validation are called val* or valid*; where there are none, dev*, else test*. Files called by another of
    these names are in neither split: a test set must not choose the model. Nor are those called unsupervised*.
    """
    if labelled := [file for file in listed if not _names_a(file, folder, _UNLABELLED)]:
        listed = labelled
    by_name = {names: [file for file in listed if _names_a(file, folder, names)] for names in _VALIDATION}
    validation = next(filter(None, by_name.values()), [])
    if not validation or len(validation) == len(listed):
        return listed, split
    named = {file for files in by_name.values() for file in files}
    return (validation if split == "val" else [file for file in listed if file not in named]), None


def _names_a(file: Path, root: Path | None, prefixes: tuple[str, ...]) -> bool:
    """Whether the file, or a folder between it and the root, is named after a split."""
    parts = file.relative_to(root).parts if root is not None else ()
    return any(part.lower().startswith(prefixes) for part in parts)


def _joined(table: Any, column: str, title: str) -> str:
    """Return the texts of a column as one."""
    texts = table[column]
    if (empty := next((number for number, text in enumerate(texts) if not isinstance(text, str)), None)) is not None:
        problem = "no value" if texts[empty] is None else f"{texts[empty]!r}, which is not a text,"
        raise DataError(f"row {empty + 1} of {title} has {problem} in the column '{column}'.")
    return "\n".join(texts)


def _tokens(text: str, tokenizer: str | None) -> torch.Tensor:
    if tokenizer is None:
        return torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).copy())
    return torch.tensor(read_tokenizer(tokenizer)(text)["input_ids"], dtype=torch.int32)


def _windows(tokens: torch.Tensor, seq_len: int, part: str | None, fraction: float, tokenizer: str | None) -> Any:
    """Return windows of the tokens, or None where a split has none.

    Held-out ones are at the end, so that no window overlaps the other split.
    """
    if part is not None and 0 < fraction < 1:
        end = max(seq_len + 1, len(tokens) - max(seq_len + 1, int(len(tokens) * fraction)))
        tokens = tokens[:end] if part == "train" else tokens[end:]
    elif part is not None and (part == "val") != (fraction == 1):
        return None
    windows = TextDataset(tokens, seq_len)
    if tokenizer is not None:
        windows.vocab_size = len(read_tokenizer(tokenizer))
    return windows


def read_rows(root: Root | None, split: str, fraction: float) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows of one split of the tables (jsonl, json, parquet, ...) at a path, each with its number."""
    if root is None:
        raise UsageError("the data set needs to know where its files are", hint="Write: --data ./my-files")
    source, kind = _survey(root)
    if kind not in _TABLES:
        raise DataError(
            f"{source.title} holds {kind}, and rows of .jsonl, .json, .parquet or .arrow files are expected."
        )
    chosen, part = of_split(source.folder, source.files, split)
    table = read_table(kind, chosen)
    numbers = held_out(len(table), part, fraction)
    return list(enumerate(table) if numbers is None else zip(numbers, table.select(numbers), strict=True))


_SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"})
_VALIDATION_EVERY = 10


class TextDataset(GatherDataset):
    """Windows of `seq_len` tokens and the same windows one token later."""

    vocab_size = VOCABULARY

    def __init__(self, tokens: torch.Tensor, seq_len: int) -> None:
        if len(tokens) <= seq_len:
            raise DataError(
                f"the text has {len(tokens)} tokens: too few for a window of seq_len={seq_len}.",
                hint="Lower seq_len or raise max_bytes.",
            )
        self.seq_len = seq_len
        self.tokens = tokens
        self._windows = tokens.unfold(0, seq_len + 1, seq_len)

    def __len__(self) -> int:
        return len(self._windows)

    def gather(self, index: torch.Tensor) -> list[torch.Tensor]:
        """Return (inputs, targets), int64 of shape [batch, seq_len]."""
        windows = self._windows.index_select(0, index).long()
        return [windows[:, :-1].contiguous(), windows[:, 1:].contiguous()]


@limited(seq_len={"minimum": 1}, max_bytes={"minimum": 1})
def text(split: str = "train", seq_len: int = 128, max_bytes: int = 4_000_000) -> TextDataset:
    """Return the corpus cut into windows. Every tenth file is for validation; no file is in both splits."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _sources(root)
    if not files:
        raise DataError(f"no Python sources in {root}: this Python came without them.")
    validation = split != "train"
    chosen = [file for number, file in enumerate(files) if (number % _VALIDATION_EVERY == 0) == validation]
    return TextDataset(_read(chosen, max_bytes), seq_len)


def _sources(root: Path) -> list[Path]:
    paths: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        # Pruned in place: walking through site-packages would take longer than everything else.
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    return sorted(paths)


def _read(files: list[Path], max_bytes: int) -> torch.Tensor:
    corpus = bytearray()
    for file in files:
        if len(corpus) >= max_bytes:
            break
        corpus += file.read_bytes() + b"\n"
    return torch.from_numpy(np.frombuffer(corpus, dtype=np.uint8)[:max_bytes].copy())
