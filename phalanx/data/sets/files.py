"""Files of one's own as a data set: texts, tables (parquet, jsonl, csv), images in class folders, tar shards.

Files or folders named train*, and val*, valid*, dev* or test*, are the two splits; without such names a part of the
samples is held out for validation. `text` is a corpus that every machine has: the sources of Python itself.
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
from torch.utils.data import Subset

from phalanx.data.fetch import GatherDataset
from phalanx.data.sets.image_files import IMAGE_ENDINGS
from phalanx.data.sets.imagefolder import ImageFolder
from phalanx.data.sets.tables import (
    TARGETS,
    VOCABULARY,
    TableDataset,
    check_columns,
    classes_of,
    read_table,
    read_tokenizer,
)
from phalanx.errors import DataError, UsageError

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
_VALIDATION = ("val", "valid", "dev", "test")


def files(
    split: str = "train",
    root: str | Path | None = None,
    inputs: str | Sequence[str] | None = None,
    target: str | None = None,
    text: str | None = None,
    tokenizer: str | None = None,
    seq_len: int = 128,
    size: int = 224,
    val_fraction: float = 0.1,
    class_names: Sequence[str] | None = None,
) -> Any:
    """Return one split of the data in a file or folder.

    Texts become windows of `seq_len` tokens (bytes, or those of the Hugging Face tokenizer in the folder
    `tokenizer`). Rows of tables become (inputs, target): `inputs` and `target` name columns, and without them the
    column "label" or the like is the target and all numbers are inputs. Rows of texts (the column `text`, or with a
    `tokenizer` the first one) become dicts with input_ids, attention_mask and labels. Images are resized to `size`.
    `class_names`: all labels in their order, where the files may lack some.
    """
    if root is None:
        raise UsageError("the data set 'files' needs to know where the files are", hint="Write: --data ./my-files")
    if not 0 <= val_fraction < 1:
        raise UsageError(f"val_fraction = {val_fraction!r}: must be from 0 to below 1")
    path = Path(root).expanduser()
    found, kind = _survey(path)
    if kind == "images":
        return _images(path, split, size, val_fraction, class_names)
    chosen, part = of_split(path, found, split)
    if kind == "text":
        tokens = _tokens("\n".join(file.read_text(encoding="utf-8", errors="replace") for file in chosen), tokenizer)
        return _windows(tokens, seq_len, part, val_fraction, tokenizer)
    table = read_table(kind, chosen)
    text = text if text is not None or target is not None or table.column_names != ["text"] else "text"
    if text is not None and target is None and inputs is None:
        check_columns(table, [text], path)
        return _windows(_tokens("\n".join(table[text]), tokenizer), seq_len, part, val_fraction, tokenizer)
    needs_target = val_fraction > 0  # what is named for evaluate or predict is not split, and may lack a target
    if target is None or (not needs_target and target not in table.column_names):
        target = next((name for name in TARGETS if name in table.column_names), None)
    training = of_split(path, found, "train")[0]
    classes = list(class_names or ())
    if target and class_names is None:
        classes = classes_of(kind, training, table, target, of_texts=text is not None)
    columns = (inputs, target, classes)
    rows = TableDataset(
        table, path, *columns, tokenizer=tokenizer, text=text, length=seq_len, needs_target=needs_target
    )
    return _held_out(rows, part, val_fraction)


def rows_of(root: str | Path, split: str, columns: Sequence[str], val_fraction: float = 0.1) -> Any:
    """Return the rows of a split of table files (jsonl, csv, parquet, ...), a sequence of dicts, with these columns."""
    path = Path(root).expanduser()
    found, kind = _survey(path)
    if kind in ("images", "text", "webdataset"):
        raise DataError(f"{path} holds no table files.", hint="Give .jsonl, .csv or .parquet files.")
    chosen, part = of_split(path, found, split)
    table = read_table(kind, chosen)
    check_columns(table, columns, path)
    return _held_out(table, part, val_fraction)


def _survey(path: Path) -> tuple[list[Path], str]:
    """Return the files of the most frequent kind below a path, and that kind."""
    if not path.exists():
        raise UsageError(f"data = '{path}': there is nothing at that path")
    every = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    every = [file for file in every if not any(part.startswith(".") for part in file.relative_to(path.parent).parts)]
    endings = Counter(file.suffix.lower() for file in every)
    known = [ending for ending in endings if ending in _KINDS or ending in IMAGE_ENDINGS]
    if not known:
        shown = ", ".join(f"{ending or 'no ending'} ({count})" for ending, count in endings.most_common(5)) or "nothing"
        raise DataError(
            f"{path} holds no files that can be read as data; found: {shown}.",
            hint=f"Known endings: {', '.join(sorted({*_KINDS, *IMAGE_ENDINGS}))}. Others: write a function, "
            "--data my_package.data:load",
        )
    # A README.md or a .json file next to one file of data describes it.
    best = max(known, key=lambda ending: endings[ending] / (2 if ending in (".json", ".md") else 1))
    kind = "images" if best in IMAGE_ENDINGS else _KINDS[best]
    # Next to rows in .jsonl files, a .json file describes them.
    endings_read = {best} if kind == "json" else {ending for ending, each in _KINDS.items() if each == kind}
    return [file for file in every if file.suffix.lower() in endings_read], kind


def of_split(path: Path, found: list[Path], split: str) -> tuple[list[Path], str | None]:
    """Return the files of a split, and which part of their samples: None for all, else the split's name."""
    validation = [file for file in found if _names_a(file, path, _VALIDATION)]
    if not validation or len(validation) == len(found):
        return found, split
    return (validation if split == "val" else [file for file in found if file not in validation]), None


def _names_a(file: Path, root: Path, prefixes: tuple[str, ...]) -> bool:
    """Whether the file, or a folder between it and the root, is named after a split."""
    parts = file.relative_to(root).parts if root.is_dir() else ()
    return any(part.lower().startswith(prefixes) for part in parts)


def held_out(length: int, part: str | None, fraction: float) -> list[int] | None:
    """Return the samples of a part; None for all. Every n-th is for validation: sorted files are split evenly."""
    if part is None or fraction == 0:
        return None if part != "val" else []
    every = max(2, round(1 / fraction))
    return [number for number in range(length) if (number % every == every - 1) == (part == "val")]


def _held_out(rows: Any, part: str | None, fraction: float) -> Any:
    """Return a part of the samples as a data set."""
    chosen = held_out(len(rows), part, fraction)
    if chosen is None:
        return rows
    kept = Subset(rows, chosen)
    for name in ("classes", "deterministic", "vocab_size"):
        if hasattr(rows, name):
            setattr(kept, name, getattr(rows, name))
    return kept


def _images(path: Path, split: str, size: int, fraction: float, classes: Sequence[str] | None) -> Any:
    for name in ("train",) if split == "train" else ("val", "valid", "validation", "test"):
        if (path / name).is_dir():
            return ImageFolder(path / name, size=size, classes=classes)
    return _held_out(ImageFolder(path, size=size, classes=classes), split, fraction)


def _tokens(text: str, tokenizer: str | None) -> torch.Tensor:
    if tokenizer is None:
        return torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).copy())
    return torch.tensor(read_tokenizer(tokenizer)(text)["input_ids"], dtype=torch.int32)


def _windows(tokens: torch.Tensor, seq_len: int, part: str | None, fraction: float, tokenizer: str | None) -> Any:
    """Return windows of the tokens; held-out ones are at the end, so that no window overlaps the other split."""
    if part is not None and fraction:
        end = max(seq_len + 1, len(tokens) - max(seq_len + 1, int(len(tokens) * fraction)))
        tokens = tokens[:end] if part == "train" else tokens[end:]
    windows = TextDataset(tokens, seq_len)
    if tokenizer is not None:
        windows.vocab_size = len(read_tokenizer(tokenizer))
    return windows


def read_rows(root: str | Path | None, split: str, fraction: float) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows of one split of the tables (jsonl, json, parquet, ...) at a path, each with its number."""
    if root is None:
        raise UsageError("the data set needs to know where its files are", hint="Write: --data-dir ./my-files")
    path = Path(root).expanduser()
    found, kind = _survey(path)
    if kind not in _TABLES:
        raise DataError(f"{path} holds {kind}, and rows of .jsonl, .json, .parquet or .arrow files are expected.")
    chosen, part = of_split(path, found, split)
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


def text(split: str = "train", seq_len: int = 128, max_bytes: int = 4_000_000) -> TextDataset:
    """Return the corpus cut into windows. Every tenth file is for validation; no file is in both splits."""
    if seq_len < 1 or max_bytes < 1:
        raise UsageError(f"seq_len={seq_len} and max_bytes={max_bytes} must be 1 or more.")
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _sources(root)
    if not files:
        raise DataError(f"no Python sources in {root}: this Python came without them.")
    validation = split != "train"
    chosen = [file for number, file in enumerate(files) if (number % _VALIDATION_EVERY == 0) == validation]
    return TextDataset(_read(chosen, max_bytes), seq_len)


def _sources(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        # Pruned in place: walking through site-packages would take longer than everything else.
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found += [Path(folder, file) for file in files if file.endswith(".py")]
    return sorted(found)


def _read(files: list[Path], max_bytes: int) -> torch.Tensor:
    corpus = bytearray()
    for file in files:
        if len(corpus) >= max_bytes:
            break
        corpus += file.read_bytes() + b"\n"
    return torch.from_numpy(np.frombuffer(corpus, dtype=np.uint8)[:max_bytes].copy())
