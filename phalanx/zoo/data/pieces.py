"""Texts as tokens, with the place of each token in its text: those of a Hugging Face tokenizer, or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.errors import DataError
from phalanx.zoo.data import tables
from phalanx.zoo.data.token_shards import TOKENIZER, read_tokenizer

BYTES_AND_ONE = tables.VOCABULARY + 1
"""The bytes, and one more token: the mask of masked texts; here it begins a text, and separates two of them."""
_NAMES = {"begin": ("[CLS]", "<s>"), "separator": ("[SEP]", "</s>"), "padding": ("[PAD]", "<pad>")}


class Pieces(NamedTuple):
    """A text's tokens, and where in the text each begins and ends."""

    tokens: list[int]
    spans: list[tuple[int, int]]


class TextPieces:
    """Cuts texts into tokens. `tokenizer`: a folder, or a file tokenizer.json; None for bytes."""

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer = None if tokenizer is None else _opened(Path(tokenizer).expanduser())
        self._tokenizer_path = tokenizer
        self.is_bytes = tokenizer is None
        self.vocab_size = BYTES_AND_ONE if self._tokenizer is None else self._tokenizer.get_vocab_size()

    @property
    def begin(self) -> list[int]:
        """The tokens that the tokenizer puts before a text by itself, such as Llama's <s>."""
        if self._tokenizer is None:
            return []
        encoding = self._tokenizer.encode("a")
        added = takewhile(lambda pair: pair[1], zip(encoding.ids, encoding.special_tokens_mask, strict=True))
        return [token for token, _ in added]

    def special(self, name: str) -> int:
        """Return the token that is named "begin", "separator" or "padding"."""
        if self._tokenizer is None:
            return 0 if name == "padding" else BYTES_AND_ONE - 1
        ids = (self._tokenizer.token_to_id(word) for word in _NAMES[name])
        token = next((number for number in ids if number is not None), None)
        if token is None:
            raise DataError(
                f"the tokenizer '{self._tokenizer_path}' has no token for the {name} of a text: looked for "
                f"{' and '.join(_NAMES[name])}.",
                hint="Give the tokenizer of a BERT.",
            )
        return int(token)

    def encode(self, texts: Sequence[str]) -> list[Pieces]:
        """Return the tokens of texts, without any special ones."""
        if self._tokenizer is None:
            return [_bytes_of(text) for text in texts]
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [Pieces(encoding.ids, encoding.offsets) for encoding in encodings]


def _opened(path: Path) -> Any:
    """Return a tokenizer of the library tokenizers that neither cuts nor pads."""
    file = path / TOKENIZER if path.is_dir() else path
    # A folder of an older transformers has a vocabulary alone.
    tokenizer = read_tokenizer(file) if file.is_file() else tables.read_tokenizer(str(path)).backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _bytes_of(text: str) -> Pieces:
    """Return a token per byte; all bytes of a letter have its place."""
    tokens: list[int] = []
    spans: list[tuple[int, int]] = []
    for index, letter in enumerate(text):
        encoded = letter.encode("utf-8", errors="replace")
        tokens += encoded
        spans += [(index, index + 1)] * len(encoded)
    return Pieces(tokens, spans)
