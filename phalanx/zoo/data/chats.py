"""Conversations as a data set for supervised fine-tuning (SFT): only what the assistant says is learned.

Rows are `messages` (role, content), ShareGPT's `conversations` (from, value), `prompt` and `completion`, or Alpaca's
`instruction`, `input` and `output`. A chat template makes one text of them: that of the tokenizer, or "plain".
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from phalanx.config.fields import IGNORED_LABEL
from phalanx.config.option import limited
from phalanx.data.fetch import GatherDataset
from phalanx.errors import DataError
from phalanx.zoo.data.chat_template import EncodedChat, Messages, read_template
from phalanx.zoo.data.files import read_rows
from phalanx.zoo.data.places import Root
from phalanx.zoo.data.splits import check_fraction
from phalanx.zoo.data.tokens import Packing

_PACKINGS = ("documents", "none")
_LEARNED = ("assistant", "all")
_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"}
"""ShareGPT's names of roles, and what they mean."""


@limited(seq_len={"minimum": 1}, packing={"choices": _PACKINGS}, train_on={"choices": _LEARNED})
def chats(
    split: str = "train",
    root: Root | None = None,
    tokenizer: str | None = None,
    template: str | None = None,
    seq_len: int = 512,
    packing: str = "documents",
    train_on: str = "assistant",
    val_fraction: float = 0.1,
) -> ChatDataset:
    """Return one split of the conversations in a file or folder.

    `template`: "plain", the path of a Jinja file, or by default that of the Hugging Face tokenizer in the folder
    `tokenizer`. `packing`: "documents" puts several conversations into a sequence, kept apart by masks; "none" fills
    each up. `train_on`: "assistant", or "all" to learn every token.
    """
    check_fraction(val_fraction, split)
    form = read_template(tokenizer, template)
    rows = {number: messages_of(row, number) for number, row in read_rows(root, split, val_fraction)}
    answered = {number: messages for number, messages in rows.items() if _answers(messages)}
    silent = [number for number in rows if number not in answered]
    dataset = ChatDataset(form.encode(list(answered.values())), seq_len, packing, train_on, form.vocab_size)
    dataset.notes += form.notes
    numbers_of = list(answered)
    unmarked = [numbers_of[index] for index in dataset.unmarked]
    for numbers, why in (
        (silent, "the assistant says nothing there"),
        (unmarked, "the template marks no answer there"),
    ):
        if numbers:
            dataset.notes += (f"{counted_rows(numbers, 'conversation')} skipped: {why}",)
    if split == "train" and not len(dataset):
        raise DataError(
            f"{root} has no conversation that can be learned: {'; '.join(dataset.notes)}",
            hint='A row is {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}',
        )
    return dataset


def messages_of(row: Mapping[str, Any], number: int) -> Messages:
    """Return the messages of a row in any of the known layouts; none for an empty list of them."""
    lists = [row.get("messages"), row.get("conversations")]
    if messages := next(filter(None, lists), None):
        return as_messages(messages, "user", number)
    if [] in lists and not (row.get("completion") or row.get("output")):
        return []
    if "prompt" in row and "completion" in row:
        return [*as_messages(row["prompt"], "user", number), *as_messages(row["completion"], "assistant", number)]
    if "instruction" in row and "output" in row:
        parts = [part for part in (row["instruction"], row.get("input")) if part not in (None, "")]
        texts = [message["content"] for part in parts for message in as_messages(part, "user", number)]
        return [*as_messages("\n\n".join(texts), "user", number), *as_messages(row["output"], "assistant", number)]
    raise DataError(
        f"row {number} is not a conversation; its columns: {', '.join(row)}",
        hint="Known are: messages; conversations; prompt and completion; instruction, input and output.",
    )


def as_messages(value: Any, role: str, number: int) -> Messages:
    """Return a text as a message of a role, or messages as they are, with ShareGPT's names replaced."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages: Messages = []
    for item in value if isinstance(value, list) else [value]:
        fields: Any = {key: part for key, part in item.items() if part is not None} if isinstance(item, Mapping) else {}
        speaker, content = fields.pop("from", None), fields.pop("value", "")
        message = {"role": _SPEAKERS.get(speaker, speaker), "content": content, **fields}
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            raise DataError(
                f"row {number}: {item!r} is not a message", hint='Expected {"role": "user", "content": "a text"}.'
            )
        messages.append(message)
    return messages


def _answers(messages: Messages) -> bool:
    return any(message["role"] == "assistant" for message in messages)


def counted_rows(numbers: list[int], noun: str) -> str:
    """Return how many there are, and the numbers of the first rows: "2 pairs (rows 3, 17)"."""
    plural = "s" if len(numbers) > 1 else ""
    first = ", ".join(map(str, numbers[:3]))
    return f"{len(numbers):,} {noun}{plural} (row{plural} {first}{', ...' if len(numbers) > 3 else ''})"


class ChatDataset(GatherDataset):
    """Conversations, several in a sequence or one; targets are -100 where nothing is to be learned."""

    def __init__(
        self, encoded: list[EncodedChat], seq_len: int, packing: str, train_on: str, vocab_size: int | None
    ) -> None:
        self.seq_len, self.vocab_size, self.is_packed = seq_len, vocab_size, packing == "documents"
        self._for_transformers = False
        fitted = [fit_length(conversation, seq_len + 1, learns_all=train_on == "all") for conversation in encoded]
        self._pieces = [pair for pair in fitted if pair is not None]
        is_cut = [conversation.length > seq_len + 1 for conversation in encoded]
        skipped = [index for index, pair in enumerate(fitted) if pair is None]
        self.unmarked = [index for index in skipped if not is_cut[index]]
        """Conversations that fit, and in which nothing is learned."""
        cut, lost = sum(is_cut), len(skipped) - len(self.unmarked)
        self._pack()
        self.notes = (f"{len(self._pieces):,} conversations: {self._packing}",)
        if cut:
            unanswered = f", {lost:,} of them skipped: not even the first answer begins there" if lost else ""
            self.notes += (f"{cut:,} conversations are longer than seq_len = {seq_len} and cut{unanswered}",)

    def _pack(self) -> None:
        lengths = np.array([len(tokens) for tokens, _ in self._pieces], dtype=np.int64)
        self._packing = Packing(lengths, self.seq_len, alone=not self.is_packed)

    def fit_to(self, model: nn.Module) -> None:
        """Give batches as a model's forward takes them: one of transformers gets a conversation in each row."""
        parameters = inspect.signature(model.forward).parameters
        if "documents" not in parameters and "input_ids" in parameters:
            self._for_transformers, self.is_packed = True, False
            self._pack()

    def __len__(self) -> int:
        return len(self._packing)

    def gather(self, index: torch.Tensor) -> list[torch.Tensor] | dict[str, torch.Tensor]:
        """Return tokens and targets [batch, seq_len]; packed ones with positions and documents."""
        fields = self._packing.gather(index, self._pieces.__getitem__)
        if self._for_transformers:
            return _as_labels(fields)
        return fields if self.is_packed else [fields["tokens"], fields["targets"]]


def fit_length(
    encoded: EncodedChat, longest: int, *, learns_all: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return the tokens and targets of a conversation, at most `longest` tokens; None where nothing is left to learn.

    A longer one ends with the last answer that is whole, or within the first answer. What follows the last answer is
    left out: nothing is learned there.
    """
    ends = [end for _, end in encoded.turns]
    whole = [end for end in ends if end <= longest]
    end = len(encoded.tokens) if learns_all and len(encoded.tokens) <= longest else whole[-1] if whole else longest
    tokens = np.asarray(encoded.tokens[:end], dtype=np.int64)
    learned = np.full(len(tokens), learns_all)
    for first, last in encoded.turns:
        learned[first:last] = True
    if len(tokens) < 2 or not learned[1:].any():
        return None
    return tokens[:-1], np.where(learned[1:], tokens[1:], IGNORED_LABEL)


def _as_labels(fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return sequences as models of transformers take them: labels are not shifted, and one place longer.

    Tokens 5 6 7 of which 6 and 7 are learned are tokens 5 6, targets 6 7 here: input_ids 5 6 7, labels -100 6 7.
    """
    labels = nn.functional.pad(fields["targets"], (1, 0), value=IGNORED_LABEL)
    tokens = nn.functional.pad(fields["tokens"], (0, 1))
    seen = nn.functional.pad(fields["documents"] >= 0, (1, 0), value=True)
    return {"input_ids": tokens.where(labels == IGNORED_LABEL, labels), "attention_mask": seen.long(), "labels": labels}
