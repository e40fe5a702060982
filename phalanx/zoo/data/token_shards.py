"""Token shards: the tokens of documents in flat files that are mapped into memory, and the tokenizer that made them.

A folder has `manifest.json`, `tokenizer.json`, and two files for each shard: `NAME.bin` (the tokens of all documents
one after the other, little-endian uint16 or uint32) and `NAME.idx` (where each document begins, and the end of the
last, little-endian uint64). `phalanx data tokenize` writes such folders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import DataError, UsageError
from phalanx.host.files import replace_file, replacing
from phalanx.zoo.token_data import MANIFEST, TOKEN_FORMAT, read_token_manifest

TOKENIZER = "tokenizer.json"
_INDEX = np.dtype("<u8")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """What the manifest says of one shard."""

    name: str
    split: str
    """"train" or "val", by the names of the input files."""
    tokens: int
    documents: int
    empty: int
    """Documents without a token, which were left out."""
    sha256: str
    """Of the tokens' file and the index, one after the other."""
    source: str
    """A hash of the input (files, sizes, times, parts) and of the settings that made it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenManifest:
    """A folder of token shards."""

    folder: Path
    dtype: str
    vocab_size: int
    end: int
    """The token after each document."""
    tokenizer_sha256: str
    shards: tuple[ShardRecord, ...]

    def total(self, unit: str) -> int:
        """Return the sum of a count ("tokens", "documents", "empty") over all shards."""
        return sum(getattr(shard, unit) for shard in self.shards)

    def write(self) -> None:
        """Write the manifest: from then on the folder is complete."""
        document = {
            "format": TOKEN_FORMAT,
            "version": 1,
            "dtype": self.dtype,
            "tokens": self.total("tokens"),
            "documents": self.total("documents"),
            "empty_documents": self.total("empty"),
            "tokenizer": {"sha256": self.tokenizer_sha256, "vocab_size": self.vocab_size, "end": self.end},
            "shards": [asdict(shard) for shard in self.shards],
        }
        replace_file(self.folder / MANIFEST, json.dumps(document, indent=1) + "\n")

    @staticmethod
    def read(folder: Path) -> TokenManifest:
        """Read the manifest of a folder; DataError where it has none, or not all that it names."""
        document = read_token_manifest(folder)
        if document is None:
            raise DataError(
                f"{folder} is not a folder of token shards: it has no {MANIFEST}",
                hint=f"Write one: phalanx data tokenize ./my-texts --out {folder} --train-bpe 32000",
            )
        tokenizer = document["tokenizer"]
        return TokenManifest(
            folder=folder,
            dtype=document["dtype"],
            vocab_size=tokenizer["vocab_size"],
            end=tokenizer["end"],
            tokenizer_sha256=tokenizer["sha256"],
            shards=tuple(ShardRecord(**shard) for shard in document["shards"]),
        )

    def check_sizes(self) -> None:
        """Raise where a file is missing or shorter than the manifest says; its bytes are not read."""
        for shard in self.shards:
            sizes = {".bin": shard.tokens * np.dtype(self.dtype).itemsize, ".idx": (shard.documents + 1) * 8}
            for ending, expected in sizes.items():
                path = self.folder / (shard.name + ending)
                actual = path.stat().st_size if path.is_file() else None
                if actual != expected:
                    problem = "is missing" if actual is None else f"has {actual} bytes"
                    raise DataError(
                        f"{path} {problem}, and the manifest says {expected} bytes",
                        hint="Write it again with the command that made the folder: finished shards are kept.",
                    )


def token_dtype(vocab_size: int) -> str:
    """Return the name of the type of the tokens on disk."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _on_disk(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def write_shard(folder: Path, name: str, dtype: str, documents: Iterable[NDArray[Any]]) -> tuple[int, int, str]:
    """Write the tokens of documents and their offsets; return the numbers of tokens and documents, and the hash."""
    offsets, digest = [0], hashlib.sha256()
    with replacing(folder / f"{name}.bin") as file:
        for tokens in documents:
            content = tokens.astype(_on_disk(dtype)).tobytes()
            digest.update(content)
            file.write(content)
            offsets.append(offsets[-1] + len(tokens))
    index = np.asarray(offsets, dtype=_INDEX).tobytes()
    digest.update(index)
    replace_file(folder / f"{name}.idx", index)
    return offsets[-1], len(offsets) - 1, digest.hexdigest()


def shard_digest(folder: Path, name: str) -> str | None:
    """Return the hash of a shard's two files as they are now; None where one is missing."""
    digest = hashlib.sha256()
    for path in (folder / f"{name}.bin", folder / f"{name}.idx"):
        if not path.is_file():
            return None
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


class TokenStream:
    """The tokens of several shards as one sequence, read from memory maps that are opened when they are needed."""

    def __init__(self, manifest: TokenManifest, shards: Iterable[ShardRecord]) -> None:
        self._folder, self._dtype = manifest.folder, _on_disk(manifest.dtype)
        self._names = [shard.name for shard in shards]
        counts = {shard.name: shard.tokens for shard in manifest.shards}
        self._starts = np.cumsum([0, *(counts[name] for name in self._names)])
        self._maps: dict[int, NDArray[Any]] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # numpy would copy the mapped files into the pickle

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Return `count` tokens from `start` on, over the borders of shards; int64."""
        tokens = np.empty(count, dtype=np.int64)
        number, filled = int(np.searchsorted(self._starts, start, side="right")) - 1, 0
        while filled < count:
            offset = start + filled - int(self._starts[number])
            part = self._mapped(number)[offset : offset + count - filled]
            tokens[filled : filled + len(part)] = part
            filled, number = filled + len(part), number + 1
        return tokens

    def next_document(self, position: int) -> int:
        """Return where the first document at or after a position begins; the end where none does."""
        if position >= len(self):
            return len(self)
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        starts = np.fromfile(self._folder / f"{self._names[number]}.idx", dtype=_INDEX).astype(np.int64)
        index = np.searchsorted(starts, position - self._starts[number])
        return int(starts[index] + self._starts[number])

    def document_starts(self) -> NDArray[np.int64]:
        """Return where the documents begin in the sequence, and its end."""
        parts = [np.zeros(1, dtype=np.int64)]
        for name, start in zip(self._names, self._starts, strict=False):
            parts.append(np.fromfile(self._folder / f"{name}.idx", dtype=_INDEX)[1:].astype(np.int64) + start)
        return np.concatenate(parts)

    def _mapped(self, number: int) -> NDArray[Any]:
        if number not in self._maps:
            path = self._folder / f"{self._names[number]}.bin"
            empty = np.empty(0, dtype=self._dtype)  # an empty file cannot be mapped
            self._maps[number] = np.memmap(path, dtype=self._dtype, mode="r") if path.stat().st_size else empty
        return self._maps[number]


def tokenizer_digest(path: Path) -> str:
    """Return the hash by which shards know their tokenizer: that of a tokenizer.json, or of the one in a folder."""
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            f"tokenizer = '{path}': there is no {TOKENIZER}",
            hint="Give the file or folder that the shards were made with.",
        )
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a file tokenizer.json."""
    tokenizers = import_tokenizers()
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain exceptions
        raise UsageError(
            f"tokenizer = '{path}' cannot be read: {error}",
            hint="Give a tokenizer.json as the library tokenizers writes it, or a folder with one.",
        ) from error


def import_tokenizers() -> Any:
    """Return the library tokenizers; UsageError with the extra where it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise UsageError("token shards need the library tokenizers", hint="Run: pip install 'phalanx[data]'") from None
    return tokenizers
