"""Rows of tables (parquet, jsonl, csv) as samples, and the tokenizer of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from phalanx.errors import DataError, UsageError, unknown_name

VOCABULARY = 256
"""One token a byte."""
TARGETS = ("label", "labels", "target", "class", "cls", "y")
"""Columns that are the target where none is named."""
_LOOKED_AT = 1000
"""Rows of a column of texts that are looked at."""


def read_tokenizer(folder: str) -> Any:
    """Return the Hugging Face tokenizer in a folder."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UsageError("tokenizer needs transformers", hint="Run: pip install transformers") from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"tokenizer = '{folder}' cannot be read: {str(error).splitlines()[0]}",
            hint="Give a local folder with tokenizer.json, as transformers' save_pretrained writes it.",
        ) from None


def read_table(kind: str, chosen: list[Path]) -> Any:
    """Return the rows of files by the reader of the library datasets."""
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"reading {chosen[0].suffix} files needs the library datasets", hint="Run: pip install 'phalanx[data]'"
        ) from None
    datasets.disable_progress_bars()
    options = {"sep": "\t"} if chosen[0].suffix == ".tsv" else {}
    try:
        return datasets.load_dataset(kind, data_files=[str(file) for file in chosen], split="train", **options)
    except Exception as error:  # each format has its own errors
        raise DataError(f"{chosen[0]} cannot be read as {kind}: {error.__cause__ or error}") from error


def check_columns(table: Any, names: Sequence[str], path: Path) -> None:
    """Refuse names that no column has."""
    for name in names:
        if name not in table.column_names:
            raise UsageError(unknown_name("column", name, table.column_names, of=str(path)))


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return cell is None
    return True


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


def classes_of(kind: str, training: list[Path], table: Any, target: str, *, of_texts: bool) -> list[str]:
    """Return the names of labels that are texts, as the training files have them; empty for numbers.

    `of_texts`: whole numbers are labels, too, since what is said of a text is a class.
    """
    feature = table.features.get(target)
    if hasattr(feature, "names"):
        return list(feature.names)
    if of_texts and getattr(feature, "dtype", "").startswith(("int", "uint")):
        return [str(number) for number in range(max(read_table(kind, training)[target]) + 1)]
    if not _is_text(feature):
        return []
    named = read_table(kind, training)[target]
    if None in named:
        raise DataError(f"row {named.index(None) + 1} of {training[0]} has no value in the column '{target}'.")
    return sorted(set(named))


class TableDataset(Dataset[Any]):
    """Rows of a table as (inputs, target), or as dicts for a Hugging Face model."""

    deterministic = True

    def __init__(
        self,
        table: Any,
        path: Path,
        inputs: str | Sequence[str] | None,
        target: str | None,
        classes: list[str],
        *,
        tokenizer: str | None,
        text: str | None,
        length: int,
        needs_target: bool,
    ) -> None:
        self._table, self._path = table, path
        self._target = target
        if classes:
            self.classes = classes
        self._labels = {name: number for number, name in enumerate(classes)}
        own: Any = read_tokenizer(tokenizer) if tokenizer else None
        self._tokenizer = own if own is not None else byte_tokenizer if text else None
        if self._tokenizer is not None:
            self.vocab_size = VOCABULARY + 1 if own is None else len(own)
        self._length = length
        if inputs is None and self._tokenizer is None:
            self._check_left_out(needs_target=needs_target)
        if inputs is not None:
            self._inputs = [inputs] if isinstance(inputs, str) else list(inputs)
        else:
            self._inputs = [text] if text else self._default_inputs()
        check_columns(table, [*self._inputs, *([target] if target else [])], path)
        if not self._inputs:
            raise UsageError(
                f"{path} has no column of numbers for inputs; its columns: {', '.join(table.column_names)}",
                hint='Name them: --set data.inputs=\'["a", "b"]\' --set data.target=label',
            )

    @property
    def columns(self) -> dict[str, Any]:
        """What other tables for the same model must have, by name; none for texts, which have their own option."""
        named = {"inputs": self._inputs, "target": self._target} if self._tokenizer is None else {}
        return {name: value for name, value in named.items() if value is not None}

    def _default_inputs(self) -> list[str]:
        features = {name: kind for name, kind in self._table.features.items() if name != self._target}
        if self._tokenizer is not None:
            return [name for name, kind in features.items() if _is_text(kind)][:1]
        return [name for name, kind in features.items() if not _is_text(kind)]

    def _check_left_out(self, *, needs_target: bool) -> None:
        """Refuse to leave out, without a word, numbers with a wrong cell, and what is probably the target."""
        texts = [name for name, kind in self._table.features.items() if _is_text(kind) and name != self._target]
        example = """--set data.inputs='["a", "b"]'"""
        for name in texts:
            cells = self._table[:_LOOKED_AT][name]
            wrong = [number for number, cell in enumerate(cells) if not _is_number(cell)]
            if 0 < len(wrong) <= len(cells) // 10:
                given = f"row {wrong[0] + 1} of {self._path} holds {cells[wrong[0]]!r} in the column '{name}'"
                raise DataError(
                    f"{given}, and its other cells are numbers",
                    hint=f"Correct the file, or name the inputs: {example}",
                )
        if texts and needs_target and self._target is None:
            raise UsageError(
                f"{self._path} has no column called {', '.join(TARGETS[:-1])} or {TARGETS[-1]}, and columns of texts "
                f"would be left out: {', '.join(texts)}",
                hint=f"Name the target: --set data.target={texts[-1]}, or the inputs: {example}",
            )

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Any:
        row = self._table[index]
        if empty := [name for name in (*self._inputs, self._target) if name is not None and row[name] is None]:
            raise DataError(f"row {index + 1} of {self._path} has no value in the column '{empty[0]}'.")
        label = None if self._target is None else self._label(row[self._target])
        if self._tokenizer is not None:
            encoded = self._tokenizer(
                row[self._inputs[0]], truncation=True, padding="max_length", max_length=self._length
            )
            found = {name: torch.tensor(encoded[name]) for name in ("input_ids", "attention_mask")}
            return found if label is None else {**found, "labels": label}
        values = [_as_tensor(row[name]) for name in self._inputs]
        stacked = values[0] if len(values) == 1 else torch.stack([value.float() for value in values], dim=-1)
        return stacked if label is None else (stacked, label)

    def _label(self, value: Any) -> torch.Tensor:
        if isinstance(value, str):
            if value not in self._labels:
                raise DataError(f"the label {value!r} is in the validation data, but not in the training data.")
            return torch.tensor(self._labels[value])
        return _as_tensor(value)


def byte_tokenizer(text: str, *, max_length: int, **_: Any) -> dict[str, list[int]]:
    """Return a text as a tokenizer of transformers does: the token after all bytes, then its first bytes, padded."""
    tokens = [VOCABULARY, *text.encode("utf-8", errors="replace")][:max_length]
    padding = [0] * (max_length - len(tokens))
    return {"input_ids": tokens + padding, "attention_mask": [1] * len(tokens) + padding}


def _as_tensor(value: Any) -> torch.Tensor:
    """Return a value of a table; images as float32 [channels, height, width] from 0 to 1."""
    if hasattr(value, "convert"):  # a PIL image
        return torch.from_numpy(np.array(value.convert("RGB"))).permute(2, 0, 1).float() / 255
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"a column holds {value!r}, which is not a number: {error}.") from error
    return found.float() if found.is_floating_point() else found
