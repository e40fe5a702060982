"""Single answers for preference tuning: `prompt`, `completion` and `label`, whether the answer is desirable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.config.fields import IGNORED_LABEL
from phalanx.config.option import limited
from phalanx.data.fetch import GatherDataset
from phalanx.errors import DataError
from phalanx.zoo.data.chat_template import EncodedChat, Messages, read_template
from phalanx.zoo.data.chats import as_messages, counted_rows
from phalanx.zoo.data.files import read_rows
from phalanx.zoo.data.places import Root
from phalanx.zoo.data.splits import check_fraction

_SIDES = {"chosen": True, "rejected": False}
_HINT = (
    'A row is {"prompt": ..., "completion": ..., "label": true}, or {"prompt": ..., "chosen": ..., "rejected": ...}; '
    "each a text or a list of messages."
)


@limited(seq_len={"minimum": 1})
def ratings(
    split: str = "train",
    root: Root | None = None,
    tokenizer: str | None = None,
    template: str | None = None,
    seq_len: int = 512,
    val_fraction: float = 0.1,
) -> RatingDataset:
    """Return one split of the rated answers in a file or folder; `tokenizer` and `template` as those of `chats`.

    A pair of answers is read as two: the chosen one is desirable.
    """
    check_fraction(val_fraction, split)
    form = read_template(tokenizer, template)
    rated = [rating for number, row in read_rows(root, split, val_fraction) for rating in _ratings(row, number)]
    answered = [rating for rating in rated if rating.answer]
    # The answer of the next row belongs to another prompt: what the model thinks of it tells how far it has moved.
    others = answered[1:] + answered[:1]
    conversations = [
        (one.conversation(one), one.conversation(other)) for one, other in zip(answered, others, strict=True)
    ]
    encoded = form.encode([messages for pair in conversations for messages in pair])
    samples = [
        (_learned(own, seq_len), _learned(other, seq_len), rating.desirable)
        for rating, own, other in zip(answered, encoded[::2], encoded[1::2], strict=True)
    ]
    whole = [(own, other, label) for own, other, label in samples if own is not None and other is not None]
    dataset = RatingDataset(whole, form.vocab_size)
    remarks = {
        "skipped: the answer is empty": [rating.number for rating in rated if not rating.answer],
        f"skipped: the answer begins after seq_len = {seq_len}": [
            rating.number
            for rating, (own, other, _) in zip(answered, samples, strict=True)
            if own is None or other is None
        ],
        f"cut: longer than seq_len = {seq_len}": [
            rating.number for rating, own in zip(answered, encoded[::2], strict=True) if own.length > seq_len + 1
        ],
    }
    dataset.notes += form.notes
    dataset.notes += tuple(f"{counted_rows(numbers, 'row')} {remark}" for remark, numbers in remarks.items() if numbers)
    if split == "train" and not len(dataset):
        raise DataError(f"{root} has no rated answer that can be learned: {'; '.join(dataset.notes)}", hint=_HINT)
    return dataset


class _Rating:
    """An answer to a prompt, and whether it is desirable."""

    def __init__(self, number: int, prompt: Messages, answer: Messages, desirable: bool) -> None:
        self.number, self.prompt, self.answer, self.desirable = number, prompt, answer, desirable

    def conversation(self, other: _Rating) -> Messages:
        """Return the prompt with the answer of a row."""
        return [*self.prompt, *other.answer]


def _ratings(row: Mapping[str, Any], number: int) -> list[_Rating]:
    """Return the rated answer of a row, or the two of a pair."""
    # In a file with rows of both kinds, each has the columns of the other, without a value.
    if row.get("completion") is not None and row.get("label") is not None:
        if not isinstance(row["label"], (bool, int)) or row["label"] not in (0, 1):
            raise DataError(f"row {number}: label = {row['label']!r}: expected true (desirable) or false", hint=_HINT)
        pairs = [(row["completion"], bool(row["label"]))]
    elif all(row.get(side) is not None for side in _SIDES):
        pairs = [(row[side], label) for side, label in _SIDES.items()]
    else:
        raise DataError(f"row {number} is not a rated answer; its columns: {', '.join(row)}", hint=_HINT)
    prompt = as_messages(row["prompt"], "user", number) if row.get("prompt") else []
    answers = [(as_messages(text, "assistant", number) if text else [], label) for text, label in pairs]
    for answer, _ in answers:
        if answer and answer[0]["role"] != "assistant":
            raise DataError(f"row {number}: the answer begins with a message of '{answer[0]['role']}'", hint=_HINT)
    return [_Rating(number, prompt, answer, label) for answer, label in answers]


Tokens = tuple[NDArray[np.int64], NDArray[np.int64]]


def _learned(encoded: EncodedChat, seq_len: int) -> Tokens | None:
    """Return tokens and targets as far as they fit; None where nothing of the answer does."""
    tokens = np.asarray(encoded.tokens[: min(encoded.length, seq_len + 1)], dtype=np.int64)
    counts = np.zeros(len(tokens), dtype=bool)
    for begin, end in encoded.turns[-1:]:
        counts[begin:end] = True
    return (tokens[:-1], np.where(counts[1:], tokens[1:], IGNORED_LABEL)) if counts[1:].any() else None


class RatingDataset(GatherDataset):
    """Rated answers beside the answer of another row to the same prompt, each filled up to the longest of all."""

    def __init__(self, samples: list[tuple[Tokens, Tokens, bool]], vocab_size: int) -> None:
        self._samples, self.vocab_size = samples, vocab_size
        self._length = max((len(tokens) for own, other, _ in samples for tokens, _ in (own, other)), default=1)
        desirable = sum(label for _, _, label in samples)
        self.notes = (f"{len(samples):,} answers of at most {self._length} tokens, {desirable:,} of them desirable",)

    def __len__(self) -> int:
        return len(self._samples)

    def gather(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return tokens and answers (-100 where nothing counts) [batch, time], and labels [batch]."""
        shape = (len(index), self._length)
        fields = {
            "tokens": torch.zeros(shape, dtype=torch.long),
            "answers": torch.full(shape, IGNORED_LABEL),
            "other_tokens": torch.zeros(shape, dtype=torch.long),
            "other_answers": torch.full(shape, IGNORED_LABEL),
            "desirable": torch.zeros(len(index), dtype=torch.bool),
        }
        for row, number in enumerate(index.tolist()):
            own, other, fields["desirable"][row] = self._samples[number]
            for prefix, (tokens, targets) in (("", own), ("other_", other)):
                fields[f"{prefix}tokens"][row, : len(tokens)] = torch.from_numpy(tokens)
                fields[f"{prefix}answers"][row, : len(targets)] = torch.from_numpy(targets)
        return fields
