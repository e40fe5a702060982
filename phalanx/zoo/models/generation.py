"""Continue token sequences: how a token is drawn, a cache of keys and values, and the loop over both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.zoo.models.attention import DocumentMask, InnerAttention

LOOK_EVERY = 8
"""Steps between two looks at whether all rows have ended: each look waits for the device."""
_COLDEST = 1e-4
"""Below this temperature the most likely token is taken: logits / 1e-45 overflow, and their softmax is NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is drawn from logits."""

    temperature: float = 1.0
    """0 (or less than 1e-4) takes the most likely token; higher values make unlikely tokens more frequent."""
    top_k: int | None = None
    """Only this many of the most likely tokens are drawn."""
    top_p: float = 1.0
    """Only the most likely tokens are drawn whose probabilities together reach this."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UsageError(f"temperature = {self.temperature}: it must be 0 or more.")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k = {self.top_k}: it must be at least 1.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p = {self.top_p}: it must be more than 0 and at most 1.")

    def draw(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return a token [rows, 1] for each row of logits [rows, vocabulary]."""
        if self.temperature < _COLDEST:
            return logits.argmax(dim=-1, keepdim=True)
        scaled = logits / self.temperature
        if self.top_k is not None:
            least = scaled.topk(min(self.top_k, scaled.shape[-1])).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        chances = scaled.softmax(dim=-1)
        if self.top_p < 1:
            chances = self._nucleus(chances)
        return torch.multinomial(chances, 1, generator=generator)

    def _nucleus(self, chances: Tensor) -> Tensor:
        """Return the chances without the least likely tokens.

        With top_p = 0.8 and chances 0.5 0.2 0.2 0.1, the likelier ones of each add up to 0 0.5 0.7 0.9: three stay.
        """
        ordered, tokens = chances.sort(dim=-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= self.top_p, 0.0)
        return torch.zeros_like(chances).scatter(-1, tokens, ordered)


class CachedAttention(nn.Module):
    """Takes the place of an `InnerAttention`: stores keys and values, and lets a new token see those of its row."""

    def __init__(self, inner: InnerAttention, cache: KVCache) -> None:
        super().__init__()
        self.inner = inner
        self._of_new_token = InnerAttention(causal=False).eval()
        self._cache = cache
        self._stored: tuple[Tensor, Tensor] | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mix the values of whole prompts, or for one new token per row those of all its earlier tokens."""
        cache = self._cache
        stored = self._stored = self._with_room(key, value)
        for buffer, new in zip(stored, (key, value), strict=True):
            buffer[cache.index] = new[:, :, cache.real]
        if cache.is_prefill:
            return self.inner(query, key, value)  # type: ignore[no-any-return]
        keys, values = (buffer[: len(key), :, : cache.longest] for buffer in stored)
        return self._of_new_token(query, keys, values, cache.mask)  # type: ignore[no-any-return]

    def _with_room(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffers, after a copy into larger ones where the cache has reserved more."""
        rows, length = self._cache.reserved
        old = self._stored
        if old is not None and old[0].shape[0] >= rows and old[0].shape[2] >= length:
            return old
        # Zeros: a place that no query sees has the weight 0, and 0 x NaN would be NaN.
        first, second = (new.new_zeros(rows, new.shape[1], length, new.shape[3]) for new in (key, value))
        for buffer, before in zip((first, second), old or (), strict=False):
            buffer[: before.shape[0], :, : before.shape[2]] = before
        return first, second


class KVCache:
    """The keys and values of several rows of tokens, in each layer of a decoder; `with cache:` puts it in place.

    `model` is a `Decoder`. A token's place in the buffers is its position: rows of different lengths begin at place 0,
    and a row sees places up to its own last token. Under tensor parallelism a rank stores its own heads. There the
    length of a sequence must be a `multiple` of the ranks: a step has one real token per row, then padding that is not
    stored.
    """

    def __init__(self, model: Any, *, through: Callable[..., Any] | None = None, multiple: int = 1) -> None:
        self._model = model
        self._call = through or model
        self._multiple = multiple
        self._attentions = [_attention_of(layer) for layer in model.layers]
        self.reserved = (0, 0)
        """Rows and places that the buffers have, or will have with the next call."""
        self.is_prefill = True
        """Whether a call has whole prompts, or else one new token per row."""
        self.index: tuple[Any, ...] = ()
        """Of a call: the part [rows, heads, places] of the buffers that takes its keys and values."""
        self.real: slice | int = 0
        """Which tokens of a call are stored: without padding."""
        self.longest = 0
        self.mask: DocumentMask | None = None

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether all layers are here with attention that sees whole sequences: no pipeline, no context parallelism."""
        return all(
            layer is not None and type(getattr(_attention_of(layer), "inner", None)) is InnerAttention
            for layer in model.layers
        )

    def __enter__(self) -> Self:
        for attention in self._attentions:
            attention.inner = CachedAttention(attention.inner, self)
        return self

    def __exit__(self, *_: object) -> None:
        for attention in self._attentions:
            attention.inner = attention.inner.inner

    def reserve(self, rows: int, length: int) -> None:
        """Make room for rows and places; what is stored stays."""
        self.reserved = max(rows, self.reserved[0]), max(length, self.reserved[1])

    def prefill(self, tokens: Tensor, lengths: Tensor, first_row: int = 0) -> Tensor:
        """Store whole prompts [rows, time], padded on the right, from `first_row` on.

        Returns the logits [rows, vocabulary] after the last token of each.
        """
        self.is_prefill, self.real = True, slice(0, tokens.shape[1])
        self.index = (slice(first_row, first_row + len(tokens)), slice(None), self.real)
        rows = torch.arange(len(tokens), device=tokens.device)
        padded = F.pad(tokens, (0, -tokens.shape[1] % self._multiple))
        if self._model.sequence_shards > 1 or self._model.head is None:
            return _precise(self._call(padded)[rows, lengths - 1])
        # Logits of all tokens of a prompt would need much memory, and only the last ones are used.
        last = self._model.head.register_forward_pre_hook(lambda _, inputs: (inputs[0][rows, lengths - 1][:, None],))
        try:
            return _precise(self._call(padded)[:, 0])
        finally:
            last.remove()

    def step(self, tokens: Tensor, places: Tensor, longest: int, *, ragged: bool) -> Tensor:
        """Store a token [rows, 1] at its place [rows] in each row, and return the logits [rows, vocabulary] after it.

        `longest`: the tokens of the longest row, with its new one. `ragged`: rows may be shorter.
        """
        self.is_prefill, self.real, self.longest, self.mask = False, 0, longest, None
        self.index = (slice(0, len(tokens)), slice(None), longest - 1)
        if ragged:
            self.index = (torch.arange(len(tokens), device=places.device), slice(None), places)
            seen = torch.arange(longest, device=places.device) <= places[:, None]
            self.mask = DocumentMask(places, seen[:, None, None, :])
        padding = (0, self._multiple - 1)
        return _precise(self._call(F.pad(tokens, padding), positions=F.pad(places[:, None], padding))[:, 0])


def _attention_of(layer: nn.Module) -> Any:
    return getattr(layer, "attention", None)


def _precise(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _Rows:
    """Texts while they are continued: prompts on the left, then tokens, one per call of `add`."""

    def __init__(self, prompts: Sequence[Sequence[int]] | Tensor, count: int, ends: Sequence[int], device: Any) -> None:
        lengths = [len(prompt) for prompt in prompts]
        if not lengths or min(lengths) == 0:
            raise UsageError("a prompt has no token", hint="Give at least one prompt, each with at least one token.")
        self.longest = max(lengths)
        self.ragged = min(lengths) < self.longest
        self.tokens = torch.zeros(len(lengths), self.longest + count, dtype=torch.long, device=device)
        for row, prompt in zip(self.tokens, prompts, strict=True):
            row[: len(prompt)] = torch.as_tensor(prompt)
        self.lengths = torch.tensor(lengths, device=device)
        self.last = self.tokens[:, :1]
        self._ends = torch.tensor(list(ends), dtype=torch.long, device=device)
        self._ended = torch.zeros(len(lengths), 1, dtype=torch.bool, device=device)
        self._added = 0

    def add(self, token: Tensor) -> None:
        """Add a token [rows, 1]; a row that has ended repeats its end token."""
        if len(self._ends):
            token = torch.where(self._ended, self.last, token)
            self._ended |= torch.isin(token, self._ends)
        self.tokens.scatter_(1, self.lengths[:, None], token)
        self.last = token
        self.lengths += 1
        self.longest += 1
        self._added += 1

    @property
    def is_over(self) -> bool:
        """Whether all rows have ended, as far as that is looked at."""
        return len(self._ends) > 0 and self._added % LOOK_EVERY == 0 and bool(self._ended.all())

    def recomputed(self, call: Callable[..., Any], window: int, multiple: int) -> Tensor:
        """Return the logits after each row, from its last tokens, at most `window`, without a cache."""
        time = min(self.longest, window)
        starts = (self.lengths - window).clamp(min=0)
        places = starts[:, None] + torch.arange(time, device=starts.device)
        # What is padded on the right, none of the tokens can see.
        window_tokens = F.pad(self.tokens.gather(1, places), (0, -time % multiple))
        rows = torch.arange(len(window_tokens), device=starts.device)
        return _precise(call(window_tokens)[rows, self.lengths - starts - 1])

    def lists(self) -> list[list[int]]:
        """Return each row as numbers, up to its first end token after the prompt."""
        rows: list[list[int]] = self.tokens[:, : self.longest].tolist()
        ends = set(self._ends.tolist())
        begins = (self.lengths - self._added).tolist()
        for number, begin in enumerate(begins):
            row = rows[number][: begin + self._added]
            stop = next((index + 1 for index in range(begin, len(row)) if row[index] in ends), len(row))
            rows[number] = row[:stop]
        return rows


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]] | Tensor,
    count: int,
    *,
    sampling: Sampling,
    end_tokens: Sequence[int] = (),
    generator: torch.Generator | None = None,
    multiple: int = 1,
    through: Callable[..., Any] | None = None,
    cached: bool = True,
) -> _Rows:
    """Continue prompts; see `Decoder.generate`. A text that outgrows the model's window is recomputed from there on."""
    rows = _Rows(prompts, count, end_tokens, next(model.parameters()).device)
    window = model.config.seq_len - model.config.seq_len % multiple
    with_cache = max(0, min(count, window - rows.longest + 1)) if cached and KVCache.fits(model) else 0
    was_training = model.training
    model.eval()
    try:
        with KVCache(model, through=through, multiple=multiple) if with_cache else nullcontext() as cache:
            if cache is not None:
                _with_cache(cache, rows, with_cache, sampling, generator)
        for _ in range(count - with_cache):
            if rows.is_over:
                break
            rows.add(sampling.draw(rows.recomputed(through or model, window, multiple), generator))
    finally:
        model.train(was_training)
    return rows


def _with_cache(cache: KVCache, rows: _Rows, count: int, sampling: Sampling, generator: torch.Generator | None) -> None:
    cache.reserve(len(rows.tokens), rows.longest + count)
    logits = cache.prefill(rows.tokens[:, : rows.longest], rows.lengths)
    for number in range(count):
        rows.add(sampling.draw(logits, generator))
        if rows.is_over:
            return
        if number + 1 < count:
            logits = cache.step(rows.last, rows.lengths - 1, rows.longest, ragged=rows.ragged)
