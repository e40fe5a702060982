"""Chat templates: the text and tokens of a conversation, and which of them the assistant says."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from phalanx.errors import DataError, UsageError
from phalanx.zoo.data.tables import VOCABULARY, read_tokenizer

Messages = list[dict[str, Any]]
Offsets = list[tuple[int, int]]

PLAIN = (
    "{% for message in messages %}{{ message['role'] + ':\\n' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
"""The template "plain" for tokenizers; for bytes `ByteTemplate` is the same, with the byte 3 as its end token.

A role ends with a newline: a space would become a part of the answer's first token, ":" " I" or ":" " " "I".
"""
_MARKED = re.compile(r"\{%-?\s*generation\b")
_NEAR = 32
"""Letters before a turn whose tokens are compared first."""
_HINT = (
    "Give a tokenizer with one: --set data.tokenizer=FOLDER; or a file: --set data.template=my.jinja; or the plain one "
    "of Phalanx ('user:', a line break, the text): --set data.template=plain"
)


class EncodedChat(NamedTuple):
    """A conversation as tokens."""

    tokens: Sequence[int]
    turns: list[tuple[int, int]]
    """Where the assistant's turns begin and end, end tokens included."""

    @property
    def length(self) -> int:
        """The tokens up to the end of the last answer."""
        return max((end for _, end in self.turns), default=0)


def read_template(tokenizer: str | None, template: str | None) -> ByteTemplate | TokenizerTemplate:
    """Return the template of a tokenizer's folder, the one in a Jinja file, or "plain"; without a tokenizer, of bytes.

    UsageError where none is given and the tokenizer has none.
    """
    if tokenizer is None:
        if template != "plain":
            raise UsageError("the chat template is missing: there is no tokenizer that has one", hint=_HINT)
        return ByteTemplate()
    code = read_tokenizer(tokenizer)
    if not code.is_fast:
        raise UsageError(f"the tokenizer in {tokenizer} has no tokenizer.json, by which answers are found in a text")
    if template == "plain":
        code.chat_template = PLAIN
    elif template is not None:
        file = Path(template).expanduser()
        if not file.is_file():
            raise UsageError(f"data.template = '{template}' is neither 'plain' nor a file", hint=_HINT)
        code.chat_template = file.read_text(encoding="utf-8")
    if not code.chat_template:
        raise UsageError(f"the chat template is missing: the tokenizer in {tokenizer} has none", hint=_HINT)
    return TokenizerTemplate(code)


class ByteTemplate:
    """The template "plain" for bytes: "role:\\ncontent" for each message, and the byte 3 (end of text) after it."""

    vocab_size = VOCABULARY
    notes: tuple[str, ...] = ()
    _END = 3
    end_tokens: Collection[int] = (_END,)

    def encode(self, conversations: list[Messages]) -> list[EncodedChat]:
        """Return conversations as bytes."""
        return [self._encoded(messages) for messages in conversations]

    def _encoded(self, messages: Messages) -> EncodedChat:
        tokens: list[int] = []
        turns = []
        for message in messages:
            tokens += f"{message['role']}:\n".encode()
            begin = len(tokens)
            tokens += [*message["content"].encode(), self._END]
            if message["role"] == "assistant":
                turns.append((begin, len(tokens)))
        return EncodedChat(tokens, turns)

    def ask(self, messages: Messages) -> list[int]:
        """Return the bytes up to where the assistant begins."""
        return [*self._encoded(messages).tokens, *b"assistant:\n"]


def _same_letters(first: str, second: str) -> int:
    """Return how many letters two texts have in common at their beginning."""
    differ = (index for index, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(differ, min(len(first), len(second)))


class TokenizerTemplate:
    """The chat template of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.vocab_size = tokenizer, len(tokenizer)
        self._is_marked = isinstance(tokenizer.chat_template, str) and _MARKED.search(tokenizer.chat_template)
        self._unstable = 0

    @property
    def end_tokens(self) -> Collection[int]:
        """The special tokens that may end a turn: not those of unknown words and masks, nor one for padding alone."""
        code = self._tokenizer
        others = {code.unk_token_id, code.mask_token_id, code.pad_token_id} - {code.eos_token_id}
        return tuple(token for token in code.all_special_ids if token not in others)

    @property
    def notes(self) -> tuple[str, ...]:
        """Whether conversations were changed by the template as they went on."""
        if not self._unstable:
            return ()
        return (
            f"the chat template changes earlier turns when later ones follow: of {self._unstable:,} conversations only "
            "the answers are learned that stay as they are ({% generation %} in the template marks all)",
        )

    def encode(self, conversations: list[Messages]) -> list[EncodedChat]:
        """Return conversations as tokens: by the marks of the template, or by rendering them turn by turn."""
        if not conversations:
            return []
        if self._is_marked:
            return [self._by_marks(messages) for messages in conversations]
        texts = [self._text(messages) for messages in conversations]
        encoding = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        tokenized = zip(conversations, texts, encoding["input_ids"], encoding["offset_mapping"], strict=True)
        return [
            self._split(tokens, offsets, text, self._spans(messages, text))
            for messages, text, tokens, offsets in tokenized
        ]

    def _split(self, tokens: list[int], offsets: Offsets, text: str, spans: list[tuple[int, int]]) -> EncodedChat:
        """Return a text's tokens with its turns; a token that is in part inside of a turn belongs to it.

        The model is asked with the tokens of the text before a turn. Where these are not the first ones of the whole
        text, the turn is tokenized apart: in "bot: Yes" after "bot: ", ":" " Yes" becomes ":" " " "Yes".
        """
        ends = [end for _, end in offsets]
        cuts = []
        for begin in (begin for begin, _ in spans if begin):
            # The last tokens tell whether the whole text before the turn has to be tokenized, too.
            near, index = self._ids(text[max(0, begin - _NEAR) : begin])[-3:], bisect_right(ends, begin)
            if tokens[max(0, index - len(near)) : index] != near and tokens[:index] != self._ids(text[:begin]):
                cuts.append(begin)
        if cuts:
            tokens, offsets = self._apart(text, [0, *cuts, len(text)])
        first, last = np.array(offsets).T
        turns = [
            (
                np.searchsorted(last, begin, "right"),
                max(np.searchsorted(first, end), np.searchsorted(last, end, "right")),
            )
            for begin, end in spans
        ]
        return EncodedChat(tokens, [(int(begin), int(end)) for begin, end in turns])

    def _ids(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def _apart(self, text: str, cuts: list[int]) -> tuple[list[int], Offsets]:
        """Return the tokens of the parts of a text, and where in the text each begins and ends."""
        parts = [text[begin:end] for begin, end in pairwise(cuts)]
        encoding = self._tokenizer(parts, add_special_tokens=False, return_offsets_mapping=True)
        shifted = zip(cuts, encoding["offset_mapping"], strict=False)
        offsets = [(cut + begin, cut + end) for cut, part in shifted for begin, end in part]
        return [token for part in encoding["input_ids"] for token in part], offsets

    def _by_marks(self, messages: Messages) -> EncodedChat:
        encoding = self._rendered(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        steps = np.diff(np.concatenate([[0], encoding["assistant_masks"], [0]]))
        turns = zip(np.flatnonzero(steps == 1).tolist(), np.flatnonzero(steps == -1).tolist(), strict=True)
        return EncodedChat(encoding["input_ids"], list(turns))

    def _spans(self, messages: Messages, text: str) -> list[tuple[int, int]]:
        """Return where the assistant's turns are in the text of a conversation, in letters.

        A turn begins where the question ends with its invitation to answer ("<|im_start|>assistant\\n"), or where the
        two texts begin to differ, and ends where the text ends that has this turn as its last.
        """
        spans, unstable = [], False
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, prompt = (
                ("", "") if number == 0 else (self._text(messages[:number]), self._asked(messages[:number]))
            )
            through = self._text(messages[: number + 1])
            if text.startswith(before) and text.startswith(through):
                spans.append((max(_same_letters(prompt, text), len(before)), len(through)))
            else:
                unstable = True
        self._unstable += unstable
        if not spans:
            raise DataError(
                "the chat template changes earlier turns when later ones follow: answers cannot be found in its text",
                hint="Mark them in the template: {% generation %}{{ message.content }}{% endgeneration %}",
            )
        return spans

    def _text(self, messages: Messages) -> str:
        return str(self._rendered(messages, tokenize=False))

    def _asked(self, messages: Messages) -> str:
        return str(self._rendered(messages, tokenize=False, add_generation_prompt=True))

    def _rendered(self, messages: Messages, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # Jinja's, or the template's own about roles that it does not take
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the chat template does not take a conversation of {roles}: {error}") from error

    def ask(self, messages: Messages) -> list[int]:
        """Return the tokens up to where the assistant begins."""
        return self._ids(self._asked(messages))
