"""Prompts that a model answers while it is trained: `prompt`, and columns that a reward function reads."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import torch

from phalanx.config.option import limited
from phalanx.data.fetch import GatherDataset
from phalanx.errors import DataError, UsageError
from phalanx.zoo.data.chat_template import Messages, read_template
from phalanx.zoo.data.chats import as_messages, counted_rows
from phalanx.zoo.data.files import read_rows
from phalanx.zoo.data.places import Root
from phalanx.zoo.data.splits import check_fraction
from phalanx.zoo.data.tables import VOCABULARY, read_tokenizer

_END_OF_TEXT = 3
"""The byte that ends a text without a tokenizer, as in chats."""
_HINT = 'A row is {"prompt": a text or a list of messages, ...}; other columns are for the reward function.'


class PromptCode:
    """Prompts as tokens, and what a model answers as text.

    `template`: as that of `chats`; "none" continues a prompt as it is, without roles.
    """

    def __init__(self, tokenizer: str | None, template: str | None) -> None:
        self._tokenizer = None if tokenizer is None else read_tokenizer(tokenizer)
        self._form = None if template == "none" else read_template(tokenizer, template)
        if self._form is not None:
            self.end_tokens = frozenset(self._form.end_tokens)
        elif self._tokenizer is None:
            self.end_tokens = frozenset({_END_OF_TEXT})
        else:
            end = self._tokenizer.eos_token_id
            self.end_tokens = frozenset() if end is None else frozenset({end})
        self.vocab_size = VOCABULARY if self._tokenizer is None else len(self._tokenizer)

    def encode(self, prompt: str | Messages) -> list[int]:
        """Return the tokens of a prompt, up to where the answer begins."""
        if self._form is not None:
            return list(self._form.ask([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt))
        if not isinstance(prompt, str):
            raise UsageError(
                "data.template = 'none' continues texts, and a prompt is a list of messages",
                hint="Give a tokenizer with a chat template, or --set data.template=plain",
            )
        if self._tokenizer is None:
            return list(prompt.encode())
        tokens: list[int] = self._tokenizer(prompt)["input_ids"]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, without special tokens."""
        if self._tokenizer is None:
            return bytes(token for token in tokens if token < VOCABULARY and token != _END_OF_TEXT).decode(
                "utf-8", errors="replace"
            )
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


@limited(seq_len={"minimum": 1})
def prompts(
    split: str = "train",
    root: Root | None = None,
    tokenizer: str | None = None,
    template: str | None = None,
    seq_len: int = 512,
    val_fraction: float = 0.1,
) -> PromptDataset:
    """Return one split of the prompts in a file or folder; `seq_len`: the longest prompt, longer ones are skipped.

    `tokenizer` and `template` are those of `chats`; the template "none" continues a prompt as it is.
    """
    check_fraction(val_fraction, split)
    code = PromptCode(tokenizer, template)
    samples, long = [], []
    for number, row in read_rows(root, split, val_fraction):
        if not row.get("prompt"):
            raise DataError(f"row {number} has no prompt; its columns: {', '.join(row)}", hint=_HINT)
        prompt = row["prompt"] if isinstance(row["prompt"], str) else as_messages(row["prompt"], "user", number)
        tokens = code.encode(prompt)
        if len(tokens) > seq_len:
            long.append(number)
            continue
        try:
            text = json.dumps(row)
        except TypeError as error:
            raise DataError(f"row {number} cannot be given to a reward function: {error}", hint=_HINT) from None
        samples.append((tokens, text.encode()))
    dataset = PromptDataset(samples, code.vocab_size)
    if long:
        dataset.notes += (f"{counted_rows(long, 'prompt')} skipped: longer than seq_len = {seq_len}",)
    if split == "train" and not len(dataset):
        raise DataError(f"{root} has no prompt: {'; '.join(dataset.notes)}", hint=_HINT)
    return dataset


class PromptDataset(GatherDataset):
    """Prompts as tokens, each beside its row as the bytes of a JSON document."""

    def __init__(self, samples: list[tuple[list[int], bytes]], vocab_size: int) -> None:
        self._samples, self.vocab_size = samples, vocab_size
        self._sizes = [max((len(part) for part in parts), default=1) for parts in zip(*samples, strict=True)] or [1, 1]
        self.notes = (f"{len(samples):,} prompts of at most {self._sizes[0]} tokens",)

    def __len__(self) -> int:
        return len(self._samples)

    def gather(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return prompts [batch, time] and rows [batch, bytes], each filled up with -1 and 0."""
        prompts = torch.full((len(index), self._sizes[0]), -1)
        rows = torch.zeros((len(index), self._sizes[1]), dtype=torch.uint8)
        for place, number in enumerate(index.tolist()):
            tokens, row = self._samples[number]
            prompts[place, : len(tokens)] = torch.tensor(tokens)
            rows[place, : len(row)] = torch.from_numpy(np.frombuffer(row, np.uint8).copy())
        return {"prompts": prompts, "rows": rows}
