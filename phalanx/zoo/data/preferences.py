"""Pairs of answers for preference tuning: `prompt`, `chosen` and `rejected`, as texts or as messages."""

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

_SIDES = ("chosen", "rejected")


@limited(seq_len={"minimum": 1})
def preferences(
    split: str = "train",
    root: Root | None = None,
    tokenizer: str | None = None,
    template: str | None = None,
    seq_len: int = 512,
    val_fraction: float = 0.1,
) -> PreferenceDataset:
    """Return one split of the preferences in a file or folder; `tokenizer` and `template` as those of `chats`."""
    check_fraction(val_fraction, split)
    form = read_template(tokenizer, template)
    rows = {number: _conversations(row, number) for number, row in read_rows(root, split, val_fraction)}
    encoded = form.encode([messages for pair in rows.values() for messages in pair])
    whole = [number for number, pair in rows.items() if pair]
    both = dict(zip(whole, zip(encoded[::2], encoded[1::2], strict=True), strict=True))
    learned = {number: _learned(*pair, seq_len) for number, pair in both.items()}
    dataset = PreferenceDataset([pair for pair in learned.values() if pair is not None], form.vocab_size)
    dataset.notes += form.notes
    remarks = {
        "skipped: an answer is empty": [number for number in rows if number not in both],
        f"skipped: the two answers are the same, or begin after seq_len = {seq_len}": [
            number for number, pair in learned.items() if pair is None
        ],
        f"cut: longer than seq_len = {seq_len}": [
            number for number, pair in both.items() if learned[number] and _longest(pair) > seq_len + 1
        ],
    }
    dataset.notes += tuple(
        f"{counted_rows(numbers, 'pair')} {remark}" for remark, numbers in remarks.items() if numbers
    )
    if split == "train" and not len(dataset):
        raise DataError(f"{root} has no pair that can be learned: {'; '.join(dataset.notes)}")
    return dataset


def _conversations(row: Mapping[str, Any], number: int) -> list[Messages]:
    """Return the conversations that end with the chosen and with the rejected answer; none where one is empty."""
    if not all(side in row for side in _SIDES):
        raise DataError(
            f"row {number} is not a pair of answers; its columns: {', '.join(row)}",
            hint='A row is {"prompt": ..., "chosen": ..., "rejected": ...}, each a text or a list of messages.',
        )
    if not all(row[side] for side in _SIDES):
        return []
    prompt = as_messages(row["prompt"], "user", number) if row.get("prompt") else []
    conversations = []
    for side in _SIDES:
        messages = as_messages(row[side], "assistant", number)
        is_whole = messages[0]["role"] != "assistant"  # it begins with the prompt
        conversations.append(messages if is_whole else [*prompt, *messages])
        if conversations[-1][-1]["role"] != "assistant":
            raise DataError(f"row {number}: '{side}' does not end with an answer of the assistant.")
    return conversations


def _longest(pair: tuple[EncodedChat, EncodedChat]) -> int:
    return max(encoded.length for encoded in pair)


Pair = list[tuple[NDArray[np.int64], NDArray[np.int64]]]


def _learned(chosen: EncodedChat, rejected: EncodedChat, seq_len: int) -> Pair | None:
    """Return tokens and targets of both, as far as they fit; None where nothing is left to compare.

    The turns count in which the two differ, and those that follow: earlier ones belong to the prompt.
    """
    shortest = min(len(chosen.tokens), len(rejected.tokens))
    differ = np.flatnonzero(np.not_equal(chosen.tokens[:shortest], rejected.tokens[:shortest]))
    first = int(differ[0]) if len(differ) else shortest
    pair = []
    for encoded in (chosen, rejected):
        tokens = np.asarray(encoded.tokens[: min(encoded.length, seq_len + 1)], dtype=np.int64)
        counts = np.zeros(len(tokens), dtype=bool)
        for begin, end in encoded.turns:
            counts[begin:end] = end > first
        if not counts[max(first, 1) :].any():
            return None
        pair.append((tokens[:-1], np.where(counts[1:], tokens[1:], IGNORED_LABEL)))
    return pair


class PreferenceDataset(GatherDataset):
    """Pairs of answers, each filled up to the longest of all."""

    def __init__(self, pairs: list[Pair], vocab_size: int) -> None:
        self._pairs, self.vocab_size = pairs, vocab_size
        self._length = max((len(tokens) for pair in pairs for tokens, _ in pair), default=1)
        self.notes = (f"{len(pairs):,} pairs of at most {self._length} tokens",)

    def __len__(self) -> int:
        return len(self._pairs)

    def gather(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return tokens and answers (-100 where nothing counts), [batch, 2, time]: chosen and rejected."""
        shape = (len(index), 2, self._length)
        fields = {"tokens": torch.zeros(shape, dtype=torch.long), "answers": torch.full(shape, IGNORED_LABEL)}
        for row, number in enumerate(index.tolist()):
            for side, (tokens, targets) in enumerate(self._pairs[number]):
                fields["tokens"][row, side, : len(tokens)] = torch.from_numpy(tokens)
                fields["answers"][row, side, : len(targets)] = torch.from_numpy(targets)
        return fields
