"""Rows of tables (parquet, jsonl, csv) as samples, and the tokenizer of a folder."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from phalanx.data.hints import LoaderHints
from phalanx.errors import DataError, UsageError, first_line, unknown_name
from phalanx.zoo.hub import on_disk

VOCABULARY = 256
"""One token a byte."""
TARGETS = ("label", "labels", "target", "class", "cls", "y")
"""Columns that are the target where none is named."""
_LOOKED_AT = 1000
"""Rows of a column of texts that are looked at."""
_WITHOUT_ROWS = ("corresponds to no data", "No columns to parse from file")
"""What the library datasets, and pandas inside it, raise for files without rows."""
_TARGET_TYPES = ("class", "number")
_MOST_CLASSES = 1000
"""Whole numbers up to here may be labels; a higher one is taken for a quantity's, whose loss the user must name."""
_MOST_TEXTS = 2
_LONGEST_SHOWN = 60
_MOST_SHOWN = 10


def read_tokenizer(folder: str) -> Any:
    """Return the Hugging Face tokenizer in a folder."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UsageError("tokenizer needs transformers", hint="Run: pip install transformers") from None
    try:
        return AutoTokenizer.from_pretrained(on_disk(folder, "tokenizer"), local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"tokenizer = '{folder}' cannot be read: {first_line(error)}",
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
    title = str(chosen[0]) if len(chosen) == 1 else f"{chosen[0]} (or one of {len(chosen) - 1} more)"
    reporter = logging.getLogger("datasets")
    level = reporter.level
    reporter.setLevel(logging.CRITICAL)  # what it logs before it raises is in the error
    try:
        table = datasets.load_dataset(kind, data_files=[str(file) for file in chosen], split="train", **options)
    except Exception as error:  # each format has its own errors
        text = str(error.__cause__ or error)
        if any(words in text for words in _WITHOUT_ROWS):
            raise DataError(f"{title} holds no rows.") from None
        raise DataError(f"{title} cannot be read as {kind}: {_reason(text)}") from error
    finally:
        reporter.setLevel(level)
    if not len(table):
        raise DataError(f"{title} holds no rows.")
    return table


def _reason(text: str) -> str:
    """Return what an error of the library datasets says: of several paragraphs the first one that is not general."""
    paragraphs = text.split("\n\n")
    is_general = len(paragraphs) > 1 and paragraphs[0].startswith("An error occurred while generating")
    return paragraphs[1] if is_general else text


def check_columns(table: Any, names: Sequence[str], title: str) -> None:
    """Refuse names that no column has."""
    missing = [name for name in names if name not in table.column_names]
    if len(missing) == 1:
        parts = [part.strip() for part in missing[0].split(",")]
        several = len(parts) > 1 and not set(parts) - set(table.column_names)
        hint = f"Several columns are a list: '{json.dumps(parts)}'" if several else ""
        raise UsageError(unknown_name("column", missing[0], table.column_names, of=title), hint=hint)
    if missing:
        raise UsageError(f"{title} has no columns {', '.join(missing)}. It has: {', '.join(table.column_names)}")


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return cell is None
    return True


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


def target_type_of(feature: Any) -> str:
    """Return "class" for texts, truth values and whole numbers, and "number" for all else."""
    dtype = getattr(feature, "dtype", "")
    is_class = hasattr(feature, "names") or _is_text(feature) or dtype == "bool" or dtype.startswith(("int", "uint"))
    return "class" if is_class else "number"


def classes_of(kind: str, training: list[Path], table: Any, target: str, *, of_texts: bool) -> list[str]:
    """Return the names of the labels, as the training files have them; empty if there are too many numbers for labels.

    `of_texts`: whole numbers are labels in any case, since a statement about a text is a class.
    """
    feature = table.features.get(target)
    if hasattr(feature, "names"):
        return list(feature.names)
    if getattr(feature, "dtype", "") == "bool":
        return ["False", "True"]
    named = read_table(kind, training)[target]
    if None in named:
        raise DataError(f"row {named.index(None) + 1} of {training[0]} has no value in the column '{target}'.")
    if _is_text(feature):
        return sorted(set(named))
    lowest, highest = int(min(named)), int(max(named))
    is_label = of_texts or (lowest >= 0 and highest < min(_MOST_CLASSES, len(named)))
    return [str(number) for number in range(highest + 1)] if is_label else []


class TableShape(NamedTuple):
    """What the columns of a table mean: learned from the training files, and the same for all others."""

    inputs: str | Sequence[str] | None
    target: str | None
    target_type: str | None
    """ "class" or "number"."""
    classes: list[str]
    texts: tuple[str, ...]
    """The column of texts, or the two of pairs of texts; empty for rows of numbers."""
    tokenizer: str | None
    length: int


class TableDataset(Dataset[Any]):
    """Rows of a table as (inputs, target), or as dicts for a Hugging Face model."""

    deterministic = True

    def __init__(self, table: Any, title: str, shape: TableShape, *, needs_target: bool) -> None:
        """`title`: what the table is called in messages."""
        self._table, self._title, self._shape = table, title, shape
        if shape.target_type not in (None, *_TARGET_TYPES):
            raise UsageError(unknown_name("target_type", shape.target_type, _TARGET_TYPES))
        if shape.classes:
            self.classes = shape.classes
        self._labels = {name: number for number, name in enumerate(shape.classes)}
        loaded: Any = read_tokenizer(shape.tokenizer) if shape.tokenizer else None
        if loaded is not None and loaded.pad_token is None:
            raise UsageError(
                f"tokenizer = '{shape.tokenizer}' has no padding token, and texts are padded to {shape.length} tokens",
                hint="Set one and save it: tokenizer.pad_token = tokenizer.eos_token, and "
                "tokenizer.save_pretrained(folder).",
            )
        self._tokenizer = loaded if loaded is not None else byte_tokenizer if shape.texts else None
        if self._tokenizer is not None:
            self.vocab_size = VOCABULARY + 1 if loaded is None else len(loaded)
        self._reals = False
        """Whether whole numbers are given as reals."""
        self._gives_segments = True
        """Whether each token of a pair of texts comes with the number of its text."""
        self.loader_hints = LoaderHints()
        inputs = shape.inputs
        if inputs is None and self._tokenizer is None:
            self._check_left_out(needs_target=needs_target)
        if inputs is not None:
            self._inputs = [inputs] if isinstance(inputs, str) else list(inputs)
        else:
            self._inputs = [*shape.texts] if shape.texts else self._default_inputs()
        check_columns(table, self._inputs, title)
        if not self._inputs:
            raise UsageError(
                f"{title} has no column of numbers for inputs; its columns: {', '.join(table.column_names)}",
                hint='Name them: --set data.inputs=\'["a", "b"]\' --set data.target=label',
            )
        if self._tokenizer is None:
            for name in self._inputs:
                self._check_numbers(name)
        else:
            self._check_texts()
        if self._labels and shape.target is not None:
            self._check_labels(shape.target)

    @property
    def columns(self) -> dict[str, Any]:
        """What other tables for the same model must have, by name; a checkpoint keeps them."""
        target, kind = self._shape.target, self._shape.target_type
        return {"inputs": self._inputs, **({} if target is None else {"target": target, "target_type": kind})}

    def note_left_out(self) -> None:
        """Let the run begin with a note about columns that are not used."""
        used = {*self._inputs, self._shape.target}
        texts = [name for name, kind in self._table.features.items() if name not in used and _is_text(kind)]
        if texts and self._shape.inputs is None and self._tokenizer is None:
            note = f"columns used: {', '.join(self._inputs)}; left out (text): {', '.join(texts)}"
            self.loader_hints = LoaderHints(notes=(note,))

    def fit_to(self, model: nn.Module) -> None:
        """Give rows as the model takes them.

        Whole numbers are given as reals if it begins with a layer that multiplies them, and the segments of pairs of
        texts if its forward takes them.
        """
        self._gives_segments = "token_type_ids" in inspect.signature(model.forward).parameters
        layers = (module for module in model.modules() if not any(module.children()))
        first = next((layer for layer in layers if any(True for _ in layer.parameters())), None)
        self._reals = isinstance(first, nn.Linear | nn.modules.conv._ConvNd)

    def _default_inputs(self) -> list[str]:
        features = {name: kind for name, kind in self._table.features.items() if name != self._shape.target}
        if self._tokenizer is not None:
            return [name for name, kind in features.items() if _is_text(kind)][:1]
        return [name for name, kind in features.items() if not _is_text(kind)]

    def _check_texts(self) -> None:
        """Refuse more texts than a pair, and columns of something else."""
        if len(self._inputs) > _MOST_TEXTS:
            raise UsageError(
                f"a sample is a text or a pair of texts, and {len(self._inputs)} columns are named: "
                f"{', '.join(self._inputs)}",
                hint="""Write: --set data.text='["sentence1", "sentence2"]'""",
            )
        for name in self._inputs:
            if not _is_text(self._table.features[name]):
                cell = self._table[0][name]
                raise DataError(f"the column '{name}' of {self._title} holds no texts: row 1 has {cell!r}.")

    def _check_numbers(self, name: str) -> None:
        """Refuse a column of inputs with a cell that is not a number, which makes a column of texts."""
        if not _is_text(self._table.features[name]):
            return
        cells = self._table[name]
        wrong = next((number for number, cell in enumerate(cells) if not _is_number(cell)), None)
        if wrong is not None:
            problem = f"row {wrong + 1} of {self._title} holds {cells[wrong]!r} in the column '{name}'"
            raise DataError(
                f"{problem}, which is not a number",
                hint="Correct the file, or leave the column out of data.inputs.",
            )

    def _check_labels(self, target: str) -> None:
        """Refuse a label that the training data do not have, before a step is taken."""
        unknown = {value for value in self._table.unique(target) if self._is_unknown(value)}
        if not unknown:
            return
        index = next(number for number, value in enumerate(self._table[target]) if value in unknown)
        value = self._name_of(self._table[index][target])
        numbered = _is_number(value) and all(name.isdecimal() for name in self._labels)
        is_quantity = numbered and not float(value).is_integer()
        correct = "Correct the file. A new label needs a new model, which is trained with it."
        if value == "-1":
            correct = "In data sets of the Hub -1 stands for no label: leave this file out, such as a test set's."
        labels = [*list(self._labels)[:_MOST_SHOWN], *(["..."] if len(self._labels) > _MOST_SHOWN else [])]
        raise DataError(
            f"row {index + 1} of {self._title} holds {value!r} in the column '{target}', and the labels of the "
            f"training data are {', '.join(labels)}",
            hint="For quantities write: --set data.target_type=number" if is_quantity else correct,
        )

    def _is_unknown(self, value: Any) -> bool:
        return value is not None and self._name_of(value) not in self._labels

    def _name_of(self, value: Any) -> str:
        """Return the name of a label: by it, not by a number that each file may give, labels are compared."""
        names = getattr(self._table.features[str(self._shape.target)], "names", None)
        if names is not None and isinstance(value, int):
            return str(names[value]) if 0 <= value < len(names) else str(value)  # -1 stands for no label
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)

    def _check_left_out(self, *, needs_target: bool) -> None:
        """Refuse to leave out, without a word, numbers with a wrong cell, and what is probably the target."""
        target = self._shape.target
        texts = [name for name, kind in self._table.features.items() if _is_text(kind) and name != target]
        example = """--set data.inputs='["a", "b"]'"""
        for name in texts:
            cells = self._table[:_LOOKED_AT][name]
            if sum(map(_is_number, cells)) * 2 <= len(cells):
                continue
            cells = cells if len(cells) == len(self._table) else self._table[name]
            wrong = [number for number, cell in enumerate(cells) if not _is_number(cell)]
            if wrong:
                problem = f"row {wrong[0] + 1} of {self._title} holds {cells[wrong[0]]!r} in the column '{name}'"
                others = (
                    "its other cells" if len(wrong) == 1 else f"{len(cells) - len(wrong)} of its {len(cells)} cells"
                )
                raise DataError(
                    f"{problem}, and {others} are numbers",
                    hint=f"Correct the file, or name the inputs: {example}",
                )
        if texts and needs_target and target is None:
            raise UsageError(
                f"{self._title} has no column called {', '.join(TARGETS[:-1])} or {TARGETS[-1]}, and columns of texts "
                f"would be left out: {', '.join(texts)}",
                hint=f"Name the target: --set data.target={texts[-1]}, or the inputs: {example}",
            )

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Any:
        row, target = self._table[index], self._shape.target
        if empty := [name for name in (*self._inputs, target) if name is not None and row[name] is None]:
            raise DataError(f"row {index + 1} of {self._title} has no value in the column '{empty[0]}'.")
        label = None if target is None else self._label(row[target], index)
        if self._tokenizer is not None:
            texts = [row[name] for name in self._inputs]
            encoded = self._tokenizer(*texts, truncation=True, padding="max_length", max_length=self._shape.length)
            has_segments = len(texts) > 1 and self._gives_segments and "token_type_ids" in encoded
            names = ["input_ids", "attention_mask", *(["token_type_ids"] if has_segments else [])]
            fields = {name: torch.tensor(encoded[name]) for name in names}
            return fields if label is None else {**fields, "labels": label}
        values = [self._as_tensor(row[name], name, index) for name in self._inputs]
        if len(values) > 1:
            inputs = torch.stack([value.float() for value in values], dim=-1)
        elif values[0].ndim == 0:
            inputs = values[0].float().unsqueeze(0)
        else:
            inputs = values[0].float() if self._reals else values[0]
        return inputs if label is None else (inputs, label)

    def _label(self, value: Any, index: int) -> torch.Tensor:
        target, is_class = str(self._shape.target), self._shape.target_type == "class"
        if not is_class:
            label = self._as_tensor(value, target, index)
            return label.float() if label.ndim == 0 else label
        if self._labels:
            return torch.tensor(self._labels[self._name_of(value)])
        label = self._as_tensor(value, target, index)
        if label.is_floating_point() and not bool((label == label.round()).all()):
            raise DataError(
                f"row {index + 1} of {self._title} holds {value!r} in the column '{target}', and labels are whole "
                "numbers.",
                hint="For quantities write: --set data.target_type=number",
            )
        return label.long()

    def _as_tensor(self, value: Any, name: str, index: int) -> torch.Tensor:
        """Return a value of a table; images as float32 [channels, height, width] from 0 to 1."""
        if hasattr(value, "convert"):  # a PIL image
            return torch.from_numpy(np.array(value.convert("RGB"))).permute(2, 0, 1).float() / 255
        try:
            tensor = torch.as_tensor(float(value) if isinstance(value, str) else value)
        except (TypeError, ValueError, RuntimeError):
            text = repr(value) if len(repr(value)) < _LONGEST_SHOWN else f"{repr(value)[:_LONGEST_SHOWN]}..."
            raise DataError(
                f"row {index + 1} of {self._title} holds {text} in the column '{name}', which is not a number."
            ) from None
        return tensor.float() if tensor.is_floating_point() else tensor


def byte_tokenizer(text: str, second: str | None = None, *, max_length: int, **_: Any) -> dict[str, list[int]]:
    """Return a text, or a pair of texts, as a tokenizer of transformers does: padded, or cut where it is longer.

    The token after all bytes stands before the bytes of each text. Of a pair the longer text is cut first.
    """
    first = [VOCABULARY, *text.encode("utf-8", errors="replace")]
    other = [] if second is None else [VOCABULARY, *second.encode("utf-8", errors="replace")]
    first = first[: max(max_length - len(other), (max_length + 1) // 2)]
    other = other[: max_length - len(first)]
    padding = [0] * (max_length - len(first) - len(other))
    return {
        "input_ids": first + other + padding,
        "attention_mask": [1] * (len(first) + len(other)) + padding,
        "token_type_ids": [0] * len(first) + [1] * len(other) + padding,
    }
