"""Token shards as a data set: windows of the stream or packed documents, of one corpus or of several by weights.

An epoch of one corpus visits every window, or every packed sequence, once. An epoch of a mixture is as long as the
corpus that ends first allows: with weights 3 and 1 and corpora of 900 and 200 sequences it takes 600 and 200. The next
epoch goes on where this one ended, so that every sequence of a corpus is used before one is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.config.fields import IGNORED_LABEL
from phalanx.config.option import limited
from phalanx.data.fetch import GatherDataset
from phalanx.errors import DataError, UsageError
from phalanx.world.seed import derive_seed
from phalanx.zoo.data.splits import check_fraction
from phalanx.zoo.data.token_shards import TokenManifest, TokenStream, tokenizer_digest

_PACKINGS = ("windows", "documents")
_GOLDEN = (5**0.5 - 1) / 2


@limited(seq_len={"minimum": 1}, packing={"choices": _PACKINGS})
def tokens(
    split: str = "train",
    root: str | Path | None = None,
    sources: Sequence[Mapping[str, Any]] = (),
    seq_len: int = 128,
    packing: str = "windows",
    val_fraction: float = 0.1,
    tokenizer: str | None = None,
    seed: int = 0,
) -> GatherDataset:
    """Return one split of a folder of token shards, or of several `sources` of (path, weight).

    `packing` is "windows" (tokens and targets of `seq_len` from anywhere in the stream) or "documents" (whole documents
    next to each other, with what keeps them apart). Without shards for validation the last documents are held out.
    `tokenizer`, if given, must be the one that the shards were made with. `seed` decides where a mixture begins.
    """
    check_fraction(val_fraction, split)
    places, weights = _places(root, sources)
    manifests = [TokenManifest.read(path) for path in places]
    _check_tokenizers(manifests, tokenizer)
    sets: list[TokenDataset] = []
    for manifest in manifests:
        manifest.check_sizes()
        kind = WindowDataset if packing == "windows" else PackedDataset
        sets.append(kind(manifest, *_span(manifest, split, val_fraction), seq_len))
    if split == "train" and (short := next((dataset for dataset in sets if not len(dataset)), None)) is not None:
        raise DataError(
            f"{short.manifest.folder} has {short.num_tokens:,} tokens for training: too few for seq_len = {seq_len}",
            hint="Lower seq_len, or give more text.",
        )
    return sets[0] if len(sets) == 1 else MixedDataset(sets, weights if split == "train" else None, seed)


def _places(root: str | Path | None, sources: Sequence[Mapping[str, Any]]) -> tuple[list[Path], list[float]]:
    """Return the folders and their weights."""
    if (root is None) == (not sources):
        raise UsageError(
            "the data set 'tokens' needs a folder of token shards, or several sources",
            hint='Write root = "DIR", or sources = [{path = "DIR", weight = 3}, {path = "OTHER", weight = 1}]',
        )
    if root is not None:
        return [Path(root).expanduser()], [1.0]
    weights = [source.get("weight", 1.0) for source in sources]
    wrong = [weight for weight in weights if isinstance(weight, bool) or not isinstance(weight, (int, float))]
    unknown = {key for source in sources for key in source} - {"path", "weight"}
    if wrong or unknown or min(weights) <= 0:
        raise UsageError(
            f"data.sources = {list(sources)!r}: expected tables with a path and a weight above 0",
            hint='Write: sources = [{path = "code", weight = 3}, {path = "prose", weight = 1}]',
        )
    return [Path(source["path"]).expanduser() for source in sources], [float(weight) for weight in weights]


def _check_tokenizers(manifests: Sequence[TokenManifest], tokenizer: str | None) -> None:
    """Raise where shards come from different tokenizers, or from another than the given one."""
    first = manifests[0]
    for other in manifests[1:]:
        if other.tokenizer_sha256 != first.tokenizer_sha256:
            raise DataError(
                f"{first.folder} and {other.folder} were made with different tokenizers",
                hint=f"Write one again: phalanx data tokenize ... --tokenizer {first.folder / 'tokenizer.json'}",
            )
    if tokenizer is not None and tokenizer_digest(Path(tokenizer).expanduser()) != first.tokenizer_sha256:
        raise DataError(
            f"the shards in {first.folder} were made with another tokenizer than {tokenizer}",
            hint=f"Leave data.tokenizer out: theirs is {first.folder / 'tokenizer.json'}",
        )


def _span(manifest: TokenManifest, split: str, fraction: float) -> tuple[TokenStream, int, int]:
    """Return the tokens of a split: those of its shards, or a part that ends or begins at a document's border."""
    validation = [shard for shard in manifest.shards if shard.split == "val"]
    if 0 < len(validation) < len(manifest.shards):
        chosen = validation if split == "val" else [shard for shard in manifest.shards if shard.split != "val"]
        stream = TokenStream(manifest, chosen)
        return stream, 0, len(stream)
    stream = TokenStream(manifest, manifest.shards)
    border = stream.next_document(int(len(stream) * (1 - fraction)))
    return (stream, 0, border) if split == "train" else (stream, border, len(stream))


class TokenDataset(GatherDataset):
    """Sequences of one corpus: the tokens of a stream from `low` to `high`."""

    def __init__(self, manifest: TokenManifest, stream: TokenStream, low: int, high: int, seq_len: int) -> None:
        self.manifest, self.vocab_size, self.seq_len = manifest, manifest.vocab_size, seq_len
        self.is_packed = isinstance(self, PackedDataset)
        self.num_tokens = high - low
        self._stream, self._low, self._high = stream, low, high


class WindowDataset(TokenDataset):
    """Windows of `seq_len` tokens, and the same windows one token later; they do not heed documents."""

    def __len__(self) -> int:
        return max(0, (self.num_tokens - 1) // self.seq_len)

    def gather(self, index: torch.Tensor) -> list[torch.Tensor]:
        """Return (tokens, targets), int64 [batch, seq_len]."""
        length = self.seq_len
        read = [self._stream.read(self._low + number * length, length + 1) for number in index.tolist()]
        windows = torch.from_numpy(np.stack(read))
        return [windows[:, :-1].contiguous(), windows[:, 1:].contiguous()]


class PackedDataset(TokenDataset):
    """Sequences of whole documents; one that is longer than `seq_len` is cut, and its parts are separate documents.

    A document of n tokens takes n - 1 places, as its last token is only a target.
    """

    def __init__(self, manifest: TokenManifest, stream: TokenStream, low: int, high: int, seq_len: int) -> None:
        super().__init__(manifest, stream, low, high, seq_len)
        starts = stream.document_starts()
        starts = starts[np.searchsorted(starts, low) : np.searchsorted(starts, high) + 1]
        self._starts, self._lengths, cut = _pieces(starts, seq_len)
        self._packing = Packing(self._lengths, seq_len)
        several = f", {cut:,} of them cut because they are longer" if cut else ""
        documents = max(0, len(starts) - 1)
        self.notes = (f"{documents:,} documents{several}: {self._packing}, from {manifest.folder}",)

    def __len__(self) -> int:
        return len(self._packing)

    def gather(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return tokens, targets (-100 where nothing is to be learned), positions and documents; [batch, seq_len]."""
        return self._packing.gather(index, self._piece)

    def _piece(self, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
        read = self._stream.read(int(self._starts[number]), int(self._lengths[number]) + 1)
        return read[:-1], read[1:]


class Packing:
    """Which pieces of text share a sequence: computed once, the same in every process and epoch."""

    def __init__(self, lengths: NDArray[np.int64], seq_len: int, *, alone: bool = False) -> None:
        """`alone`: a sequence for each piece."""
        owners = np.arange(len(lengths)) if alone else pack_lengths(lengths, seq_len)
        self._order = np.argsort(owners, kind="stable")
        self._firsts = np.concatenate([[0], np.cumsum(np.bincount(owners))]) if len(owners) else np.zeros(1, np.int64)
        self._seq_len, self._filled = seq_len, lengths.sum() / max(1, len(self) * seq_len)

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __str__(self) -> str:
        return f"{len(self):,} sequences of {self._seq_len}, {self._filled:.1%} filled"

    def gather(
        self, index: torch.Tensor, piece: Callable[[int], tuple[NDArray[Any], NDArray[Any]]]
    ) -> dict[str, torch.Tensor]:
        """Return the fields of sequences; `piece` returns the tokens and targets of a piece by its number."""
        shape = (len(index), self._seq_len)
        fill_values = {"tokens": 0, "targets": IGNORED_LABEL, "positions": 0, "documents": -1}
        fields = {name: np.full(shape, value, dtype=np.int64) for name, value in fill_values.items()}
        for row, sequence in enumerate(index.tolist()):
            offset = 0
            numbers = self._order[self._firsts[sequence] : self._firsts[sequence + 1]]
            for document, number in enumerate(numbers.tolist()):
                tokens, targets = piece(number)
                here = (row, slice(offset, offset + len(tokens)))
                fields["tokens"][here], fields["targets"][here] = tokens, targets
                fields["positions"][here], fields["documents"][here] = np.arange(len(tokens)), document
                offset += len(tokens)
        return {name: torch.from_numpy(values) for name, values in fields.items()}


def _pieces(starts: NDArray[np.int64], seq_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return where the pieces of documents begin, their lengths in targets, and how many documents are cut.

    A document of tokens 0..9 and seq_len 4 has 9 targets: pieces of 4, 4 and 1 begin at 0, 4 and 8.
    """
    targets = np.maximum(np.diff(starts) - 1, 0)
    counts = -(-targets // seq_len)
    document = np.repeat(np.arange(len(targets)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    lengths = np.minimum(targets[document] - number * seq_len, seq_len)
    return starts[:-1][document] + number * seq_len, lengths, int((counts > 1).sum())


def pack_lengths(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return which sequence of `capacity` places each length goes to: the longest first, each where it fits best.

    All lengths that are equal, and all sequences with equal room, are handled at once: millions take a second.
    """
    owners = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    distinct, begins = np.unique(-lengths[order], return_index=True)
    rooms: dict[int, NDArray[np.int64]] = {}
    has_room = np.zeros(capacity + 1, dtype=bool)
    total = 0

    def leave(numbers: NDArray[np.int64], room: int) -> None:
        rooms[room] = np.concatenate([rooms[room], numbers]) if has_room[room] else numbers
        has_room[room] = room > 0 and len(rooms[room]) > 0

    for length, items in zip((-distinct).tolist(), np.split(order, begins)[1:], strict=True):
        while len(items):
            room = length + int(has_room[length:].argmax())  # the least room that is enough
            if has_room[room]:
                chosen, rest = np.split(rooms.pop(room), [len(items)])
                has_room[room] = False
                leave(rest, room)
                leave(chosen, room - length)
                owners[items[: len(chosen)]] = chosen
                items = items[len(chosen) :]
                continue
            per_sequence = capacity // length  # new sequences, with as many as they can take
            new = total + np.arange(-(-len(items) // per_sequence))
            owners[items] = new[np.arange(len(items)) // per_sequence]
            last = len(items) - per_sequence * (len(new) - 1)
            leave(new[:-1], capacity - per_sequence * length)
            leave(new[-1:], capacity - last * length)
            total += len(new)
            break
    return owners


class MixedDataset(GatherDataset):
    """Several corpora by weights: how many sequences of an epoch come from each. Without weights each is read once.

    The sequences of a corpus are used in steps that are spread over it, from a place that the seed decides: an epoch
    that takes a tenth of a corpus takes it from everywhere.
    """

    def __init__(self, sets: Sequence[TokenDataset], weights: Sequence[float] | None, seed: int) -> None:
        self._sets, self._epoch = [dataset for dataset in sets if len(dataset)], 0
        self.vocab_size, self.is_packed = sets[0].vocab_size, sets[0].is_packed
        sizes = [len(dataset) for dataset in self._sets]
        self._counts, self._strides, self._begins = sizes, [1] * len(sizes), [0] * len(sizes)
        if weights is not None:
            shortest = min(size / weight for size, weight in zip(sizes, weights, strict=True))
            self._counts = [
                min(size, max(1, round(shortest * weight))) for size, weight in zip(sizes, weights, strict=True)
            ]
            self._strides = [_stride(size) for size in sizes]
            self._begins = [derive_seed(seed, number) % size for number, size in enumerate(sizes)]
        self._bounds = np.cumsum([0, *self._counts])
        self.notes = tuple(note for dataset in self._sets for note in dataset.notes)
        if weights is not None:
            shares = ", ".join(
                f"{count:,} of {size:,} from {dataset.manifest.folder}"
                for dataset, count, size in zip(self._sets, self._counts, sizes, strict=True)
            )
            self.notes += (f"sequences of an epoch: {shares}",)

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def set_epoch(self, epoch: int) -> None:
        """Take the sequences of an epoch: they follow those of the epoch before it."""
        self._epoch = epoch

    def gather(self, index: torch.Tensor) -> Any:
        """Return the batch as the corpora do."""
        numbers = index.numpy()
        sources = np.searchsorted(self._bounds, numbers, side="right") - 1
        batch: dict[Any, torch.Tensor] = {}
        fields: Any = []
        for source in np.unique(sources).tolist():
            rows = torch.from_numpy(np.flatnonzero(sources == source))
            fields = self._sets[source].gather(torch.from_numpy(self._samples(source, numbers[sources == source])))
            for name, values in fields.items() if isinstance(fields, dict) else enumerate(fields):
                batch.setdefault(name, values.new_empty(len(index), *values.shape[1:]))[rows] = values
        return batch if isinstance(fields, dict) else list(batch.values())

    def _samples(self, source: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sequences of a corpus behind numbers of this epoch."""
        size = len(self._sets[source])
        index = (numbers - self._bounds[source] + self._epoch * self._counts[source]) % size
        samples: NDArray[np.int64] = (index * self._strides[source] + self._begins[source]) % size
        return samples


def _stride(size: int) -> int:
    """Return a step that visits all of `size` places before it comes back, and spreads the first ones evenly."""
    stride = max(1, round(size * _GOLDEN))
    while gcd(stride, size) > 1:
        stride += 1
    return stride
