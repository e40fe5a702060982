"""Multiple choice in HellaSwag's format: a language model chooses the ending that it finds most likely."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.config.fields import IGNORED_LABEL
from phalanx.data.fetch import GatherDataset
from phalanx.errors import DataError, UsageError
from phalanx.zoo.data.pieces import TextPieces
from phalanx.zoo.data.tables import VOCABULARY


class ChoiceEnding(NamedTuple):
    """One of the endings of a context."""

    item: int
    number: int
    is_right: bool
    text: str


class Choices(GatherDataset):
    """A sample is a context with one of its endings: (tokens, targets), where targets are the tokens of the ending."""

    def __init__(self, items: dict[int, Any], pieces: TextPieces, seq_len: int, path: Path) -> None:
        """`items`: the rows by their lines in the file."""
        self.seq_len, self.vocab_size = seq_len, VOCABULARY if pieces.is_bytes else pieces.vocab_size
        self.endings: list[ChoiceEnding] = []
        contexts = []
        for item, (line, row) in enumerate(items.items()):
            contexts.append(_context(row, f"{path}, line {line}"))
            self.endings += _endings(row, item, f"{path}, line {line}")
        encoded = pieces.encode([f"{contexts[text.item]} {text.text}" for text in self.endings])
        self._texts = [[*pieces.begin, *text.tokens] for text in encoded]
        # An ending begins with the space before it, or with a token in which a part of it is.
        self._ends = [
            sum(last > len(contexts[ending.item]) for _, last in text.spans)
            for ending, text in zip(self.endings, encoded, strict=True)
        ]
        longest = max(self._ends)
        if longest > seq_len:
            raise DataError(f"{path}: an ending has {longest} tokens, more than seq_len = {seq_len}.")
        cut = sum(len(tokens) > seq_len + 1 for tokens in self._texts)
        self.notes = (f"warning: of {cut} contexts only the end fits into seq_len = {seq_len}",) if cut else ()
        self.metrics = {"choices": ChoiceAccuracy(self.endings)}

    def __len__(self) -> int:
        return len(self.endings)

    def gather(self, index: Tensor) -> list[Tensor]:
        """Return (tokens, targets), int64 of shape [batch, seq_len]."""
        tokens = torch.zeros(len(index), self.seq_len, dtype=torch.long)
        targets = torch.full_like(tokens, IGNORED_LABEL)
        for row, number in enumerate(index.tolist()):
            end = self._ends[number]
            whole = torch.tensor(self._texts[number][-self.seq_len - 1 :])
            tokens[row, : len(whole) - 1] = whole[:-1]
            targets[row, len(whole) - 1 - end : len(whole) - 1] = whole[-end:]
        return [tokens, targets]


class ChoiceAccuracy:
    """How often the right ending has the highest log-likelihood: their sum ("accuracy"), and that divided by the
    number of letters of the ending ("accuracy_norm"), the "acc" and "acc_norm" of the LM evaluation harness.
    """

    def __init__(self, endings: list[ChoiceEnding]) -> None:
        self._endings, self._counts = endings, Counter(ending.item for ending in endings)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the log-likelihood of each sample's ending."""
        # Row by row: scores in float32 for a whole batch may not fit on a GPU.
        losses = [
            F.cross_entropy(scores.float(), row, ignore_index=IGNORED_LABEL, reduction="none").double().sum()
            for scores, row in zip(output, target, strict=True)
        ]
        return -torch.stack(losses)[:, None]

    def combine(self, rows: Tensor, samples: Tensor) -> dict[str, float]:
        """Return both accuracies over the items all of whose endings were measured; NaN where there is none."""
        items: dict[int, list[tuple[ChoiceEnding, float]]] = defaultdict(list)
        for sample, (likelihood,) in zip(samples.tolist(), rows.tolist(), strict=True):
            ending = self._endings[sample]
            items[ending.item].append((ending, likelihood))
        whole = [scored for item, scored in items.items() if len(scored) == self._counts[item]]
        by_sum = [max(scored, key=lambda pair: pair[1])[0].is_right for scored in whole]
        by_letter = [max(scored, key=lambda pair: pair[1] / len(pair[0].text))[0].is_right for scored in whole]
        count = len(whole) or math.nan
        return {"accuracy": sum(by_sum) / count, "accuracy_norm": sum(by_letter) / count}


def _context(row: Any, where: str) -> str:
    """Return the context of one line; an error says what it lacks."""
    if not isinstance(row, dict) or not ("ctx" in row or {"ctx_a", "ctx_b"} <= row.keys()):
        raise DataError(f"{where} has neither ctx nor ctx_a and ctx_b.", hint=_FORMAT)
    parts = [row["ctx"]] if "ctx" in row else [row["ctx_a"], row["ctx_b"]]
    context = " ".join(parts).strip() if all(isinstance(part, str) for part in parts) else ""
    if not context:
        raise DataError(f"{where}: the context is {parts!r}, expected a text that is not empty.", hint=_FORMAT)
    return context


def _endings(row: Any, item: int, where: str) -> list[ChoiceEnding]:
    """Return the endings of one line; an error says what it lacks."""
    endings, label = row.get("endings"), str(row.get("label", ""))
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(e, str) and e for e in endings):
        raise DataError(f"{where}: endings = {endings!r}, expected a list of two or more texts.", hint=_FORMAT)
    if not label.isdecimal() or int(label) >= len(endings):
        raise DataError(f"{where}: label = {row.get('label')!r}, expected 0 to {len(endings) - 1}.", hint=_FORMAT)
    return [ChoiceEnding(item, number, number == int(label), text) for number, text in enumerate(endings)]


_FORMAT = 'A line is: {"ctx": "He opens", "endings": ["the door.", "the sky."], "label": 0}'


def choices(
    split: str = "val", root: str | Path | None = None, tokenizer: str | None = None, seq_len: int = 128
) -> Choices:
    """Return the items of a .jsonl file in HellaSwag's format; both splits are the whole file.

    Tokens are those of the Hugging Face tokenizer in the folder `tokenizer` (or file tokenizer.json), else bytes.
    """
    if root is None or not (path := Path(root).expanduser()).is_file():
        raise UsageError(f"choices are read from a file, not from {root}", hint="Write: --data hellaswag_val.jsonl")
    items = _rows(path)
    if not items:
        raise DataError(f"{path} is empty.", hint=_FORMAT)
    return Choices(items, TextPieces(tokenizer), seq_len, path)


def _rows(path: Path) -> dict[int, Any]:
    """Return the values of a file's lines that are not blank, by the numbers of the lines."""
    rows = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            if line.strip():
                rows[number] = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number} cannot be read: {error}", hint=_FORMAT) from error
    return rows
