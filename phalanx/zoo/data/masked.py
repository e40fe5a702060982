"""Texts of which a part is hidden, and what it was: whole words (BERT's masked tokens), or spans (T5's corruption).

What is hidden is a hash of the seed, the epoch and the sample: equal on any rank and in any worker, and something else
in every epoch; for validation the same each time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config.fields import IGNORED_LABEL
from phalanx.config.option import Limits, limited
from phalanx.data.fetch import GatherDataset
from phalanx.errors import DataError, UsageError
from phalanx.zoo.data.files import TextDataset, files, text
from phalanx.zoo.data.places import Root
from phalanx.zoo.data.tables import VOCABULARY, read_tokenizer
from phalanx.zoo.t5_tokens import T5_END, T5_PAD

_RATE: Limits = {"above": 0, "below": 1}
_MASKED, _RANDOM = 0.8, 0.1
"""Shares of the tokens of hidden words that become the mask or a random token; the rest stays, as in BERT."""
_SPECIAL = 3
"""Padding, end and unknown come before the bytes, as in ByT5."""
_MULTIPLIER = -7046029254386353131  # 2^64 / the golden ratio, as a signed number


class Words(NamedTuple):
    """What masking must know of a vocabulary, by token."""

    size: int
    mask: int
    joins_left: Tensor
    """Whether a token may continue the word of the token before it."""
    joins_right: Tensor
    """Whether the token after it may continue its word."""
    special: Tensor
    """Tokens that are never hidden."""

    def starts(self, tokens: Tensor) -> Tensor:
        """Return where words begin in [samples, time]; a token that joins nothing is a word."""
        joined = self.joins_left[tokens[:, 1:]] & self.joins_right[tokens[:, :-1]]
        return torch.cat([torch.ones_like(tokens[:, :1], dtype=torch.bool), ~joined], dim=1)


def byte_words() -> Words:
    """Return the words of bytes: runs of letters, digits and underscores. The mask is one token more."""
    inside = torch.zeros(VOCABULARY + 1, dtype=torch.bool)
    inside[[byte for byte in range(VOCABULARY) if chr(byte).isalnum() or byte == ord("_") or byte >= 128]] = True
    return Words(VOCABULARY + 1, VOCABULARY, inside, inside, torch.zeros(VOCABULARY + 1, dtype=torch.bool))


def tokenizer_words(tokenizer: Any, folder: str) -> Words:
    """Return the words of a Hugging Face tokenizer: WordPiece's "##", or the sign for a space before a word."""
    if tokenizer.mask_token_id is None:
        raise DataError(
            f"the tokenizer in {folder} has no mask token, which masked language modelling needs.",
            hint='Add one: tokenizer.add_special_tokens({"mask_token": "[MASK]"}), and save it.',
        )
    size = len(tokenizer)
    pieces = tokenizer.convert_ids_to_tokens(list(range(size)))
    by_space = any(piece.startswith(("Ġ", "▁")) for piece in pieces)
    left = [
        piece[:1].isalnum() and not piece.startswith(("Ġ", "▁")) if by_space else piece.startswith("##")
        for piece in pieces
    ]
    special = torch.zeros(size, dtype=torch.bool)
    special[list(tokenizer.all_special_ids)] = True
    joins = torch.tensor(left) & ~special
    return Words(size, tokenizer.mask_token_id, joins, ~special, special)


class HiddenTokens(GatherDataset):
    """Windows of tokens of which a part is hidden, the same one on every rank."""

    deterministic = True

    def __init__(self, windows: Any, *, rate: float, seed: int, is_fixed: bool) -> None:
        """`windows`: a data set whose first field is tokens; `is_fixed`: hide the same tokens in every epoch."""
        self._windows, self._rate, self._seed = windows, rate, seed
        self._is_fixed, self._epoch = is_fixed, 0

    def __len__(self) -> int:
        return len(self._windows)

    def set_epoch(self, epoch: int) -> None:
        """Hide other tokens from now on."""
        self._epoch = 0 if self._is_fixed else epoch

    def _tokens(self, index: Tensor) -> Tensor:
        return torch.stack([self._windows[number][0] for number in index.tolist()])

    def _chance(self, kind: int, *keys: Tensor) -> Tensor:
        """Return numbers from 0 to 1 that are a hash of the seed, the epoch and the keys."""
        value = torch.full_like(keys[0], self._seed * 1_000_003 + self._epoch * 8 + kind)
        for key in keys:
            value = (value ^ key) * _MULTIPLIER
            value = value ^ (value >> 29)
        return ((value * _MULTIPLIER >> 11) & ((1 << 52) - 1)).double() / 2**52


class MaskedTokens(HiddenTokens):
    """Windows of tokens with hidden words, and targets: the tokens that are hidden, -100 elsewhere."""

    def __init__(self, windows: Any, words: Words, **options: Any) -> None:
        super().__init__(windows, **options)
        self._words = words
        self.vocab_size, self.seq_len = words.size, windows[0][0].shape[0]

    def gather(self, index: Tensor) -> list[Tensor]:
        """Return (tokens, targets), int64 of shape [batch, seq_len]."""
        tokens = self._tokens(index)
        words = self._words.starts(tokens).cumsum(1)
        sample = index[:, None].expand_as(tokens)
        of_word = self._chance(0, sample, words)
        of_word[self._words.special[tokens]] = 2.0
        hidden = (of_word < self._rate) | (of_word == of_word.amin(1, keepdim=True))  # one word at least
        hidden &= of_word < 2.0
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        how, other = self._chance(1, sample, positions), self._chance(2, sample, positions)
        inputs = torch.where(how < _MASKED, self._words.mask, tokens)
        drawn = (other * self._words.size).long()
        inputs = torch.where((how >= _MASKED) & (how < _MASKED + _RANDOM), drawn, inputs)
        return [torch.where(hidden, inputs, tokens), torch.where(hidden, tokens, IGNORED_LABEL)]


class Sentinels(NamedTuple):
    """The tokens of a T5: those that stand for hidden spans, and by how much bytes are shifted."""

    size: int
    spans: Tensor
    shift: int


def byte_sentinels() -> Sentinels:
    """Return ByT5's: padding, end and unknown, then 256 bytes, then 125 tokens for spans."""
    first = VOCABULARY + _SPECIAL
    return Sentinels(384, torch.arange(first, 384), _SPECIAL)


def tokenizer_sentinels(tokenizer: Any, folder: str) -> Sentinels:
    """Return those of a Hugging Face tokenizer: <extra_id_0>, <extra_id_1>, ..."""
    check_t5(tokenizer, folder)
    vocabulary = tokenizer.get_vocab()
    spans = [vocabulary[name] for number in range(len(vocabulary)) if (name := f"<extra_id_{number}>") in vocabulary]
    return Sentinels(len(tokenizer), torch.tensor(spans), 0)


def check_t5(tokenizer: Any, folder: str) -> None:
    """Raise for a tokenizer whose special tokens are not those of T5's."""
    if "<extra_id_0>" not in tokenizer.get_vocab() or (tokenizer.pad_token_id, tokenizer.eos_token_id) != (
        T5_PAD,
        T5_END,
    ):
        raise DataError(
            f"the tokenizer in {folder} is not one of T5: it needs tokens <extra_id_0>, <extra_id_1>, ... for hidden "
            f"spans, and {T5_PAD} for padding and {T5_END} for the end.",
            hint="Give the tokenizer of a T5 folder, or leave tokenizer out: then tokens are bytes.",
        )


class CorruptedSpans(HiddenTokens):
    """Windows with hidden spans, each replaced by one token, and targets: these tokens, each with its span, the end.

    As in T5: `rate` of the tokens, spans of `mean_length` on average, at random places, first a span that is shown.
    Inputs are padded by 0 to a length of `seq_len`, targets by -100 to a multiple of 8.
    """

    def __init__(self, windows: Any, sentinels: Sentinels, *, seq_len: int, mean_length: float, **options: Any) -> None:
        super().__init__(windows, **options)
        self._sentinels = sentinels
        self.vocab_size, self.seq_len = sentinels.size, seq_len
        time = windows[0][0].shape[0]
        self._hidden, self._spans = span_counts(time, self._rate, mean_length)
        if self._spans > len(sentinels.spans):
            raise UsageError(
                f"seq_len = {seq_len} needs {self._spans} tokens for hidden spans, and the tokenizer has "
                f"{len(sentinels.spans)}",
                hint="Lower seq_len or rate, or raise mean_length.",
            )

    def gather(self, index: Tensor) -> list[Tensor]:
        """Return (tokens, targets), int64 [batch, seq_len] and [batch, time]."""
        tokens = self._tokens(index).long() + self._sentinels.shift
        samples, time = tokens.shape
        visible, hidden = (
            self._lengths(kind, index, total) for kind, total in ((3, time - self._hidden), (4, self._hidden))
        )
        # Lengths of shown and hidden spans in turn, and for each token the span that it is in.
        ends = torch.stack([visible, hidden], dim=2).flatten(1).cumsum(1)
        positions = torch.arange(time).expand(samples, time).contiguous()
        span = torch.searchsorted(ends, positions, right=True)
        first = F.pad(span[:, 1:] != span[:, :-1], (1, 0), value=True)
        sign = self._sentinels.spans[span // 2]
        is_hidden = span % 2 == 1
        inputs = torch.where(is_hidden, sign, tokens)[~is_hidden | first].view(samples, -1)
        # A hidden span follows its sign: the sign is written before the span's first token.
        pairs = torch.stack([sign, tokens], dim=2)
        mask = torch.stack([is_hidden & first, is_hidden], dim=2)
        targets = pairs[mask].view(samples, -1)
        return [self._ended(inputs, T5_PAD, self.seq_len), self._ended(targets, IGNORED_LABEL, -8)]

    def _lengths(self, kind: int, index: Tensor, total: int) -> Tensor:
        """Return lengths of at least 1 that add up to `total`, [samples, spans]: all choices are equally likely."""
        cuts = torch.arange(1, total).expand(len(index), total - 1)
        chosen = self._chance(kind, index[:, None].expand_as(cuts), cuts).argsort(1)[:, : self._spans - 1]
        edges = (chosen + 1).sort(1).values
        return F.pad(edges, (0, 1), value=total).diff(dim=1, prepend=edges.new_zeros(len(index), 1))

    @staticmethod
    def _ended(tokens: Tensor, padding: int, length: int) -> Tensor:
        """Return tokens with an end and padding, up to a length or (negative) to a multiple of it."""
        whole = F.pad(tokens, (0, 1), value=T5_END)
        missing = length - whole.shape[1] if length > 0 else whole.shape[1] % length * -1
        return F.pad(whole, (0, missing), value=padding)


def span_counts(time: int, rate: float, mean_length: float) -> tuple[int, int]:
    """Return how many tokens of a window are hidden, and in how many spans."""
    hidden = min(max(round(time * rate), 1), time - 1)
    return hidden, min(max(round(hidden / mean_length), 1), hidden, time - hidden)


def window_length(seq_len: int, rate: float, mean_length: float) -> int:
    """Return the longest window whose shown part, with a token for each hidden span and the end, fits `seq_len`.

    For 8 tokens at a rate of 0.15 that is 7 with spans of 1: 6 shown ones, one for the span, and the end.
    """

    def shown(time: int) -> int:
        hidden, spans = span_counts(time, rate, mean_length)
        return time - hidden + spans + 1

    time = max(seq_len, 2)
    while shown(time + 1) <= seq_len:
        time += 1
    while time > 2 and shown(time) > seq_len:
        time -= 1
    if shown(time) > seq_len:
        raise UsageError(f"seq_len = {seq_len} is too short for a text with a hidden span", hint="Write 3 or more.")
    return time


@limited(rate=_RATE)
def masked(
    split: str = "train",
    root: Root | None = None,
    tokenizer: str | None = None,
    seq_len: int = 128,
    rate: float = 0.15,
    max_bytes: int = 4_000_000,
    val_fraction: float = 0.1,
    seed: int = 0,
) -> MaskedTokens:
    """Return texts with hidden words: the files in `root`, or Python's own sources; bytes, or a tokenizer's tokens."""
    _check_tokenizer(tokenizer, root)
    words = byte_words() if tokenizer is None else tokenizer_words(read_tokenizer(tokenizer), tokenizer)
    windows = _windows(split, root, tokenizer, seq_len, max_bytes, val_fraction)
    return MaskedTokens(windows, words, rate=rate, seed=seed, is_fixed=split == "val")


@limited(rate=_RATE, mean_length={"minimum": 1}, seq_len={"minimum": 8})
def spans(
    split: str = "train",
    root: Root | None = None,
    tokenizer: str | None = None,
    seq_len: int = 128,
    rate: float = 0.15,
    mean_length: float = 3.0,
    max_bytes: int = 4_000_000,
    val_fraction: float = 0.1,
    seed: int = 0,
) -> CorruptedSpans:
    """Return texts with hidden spans for a T5: the files in `root`, or Python's own sources; bytes, or tokens."""
    _check_tokenizer(tokenizer, root)
    sentinels = byte_sentinels() if tokenizer is None else tokenizer_sentinels(read_tokenizer(tokenizer), tokenizer)
    windows = _windows(split, root, tokenizer, window_length(seq_len, rate, mean_length), max_bytes, val_fraction)
    options = {"rate": rate, "seed": seed, "is_fixed": split == "val"}
    return CorruptedSpans(windows, sentinels, seq_len=seq_len, mean_length=mean_length, **options)


def _check_tokenizer(tokenizer: str | None, root: Root | None) -> None:
    if tokenizer is not None and root is None:
        raise UsageError("tokenizer is for your own texts", hint="Write: --data ./my-texts, as well.")


def _windows(
    split: str, root: Root | None, tokenizer: str | None, seq_len: int, max_bytes: int, val_fraction: float
) -> Any:
    if root is None:
        return text(split, seq_len, max_bytes)
    dataset = files(split, root, tokenizer=tokenizer, seq_len=seq_len, val_fraction=val_fraction)
    if not isinstance(dataset, TextDataset | None):
        raise DataError(f"{root} holds no texts, which this data set reads.", hint="Give .txt files.")
    return dataset
