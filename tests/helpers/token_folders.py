"""Small folders of token shards, written without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from phalanx.zoo.data.token_shards import ShardRecord, TokenManifest, write_shard


def write_folder(
    folder: Path,
    shards: Sequence[Sequence[Sequence[int]]],
    *,
    splits: Sequence[str] | None = None,
    vocab_size: int = 61,
    tokenizer: str = "a",
) -> TokenManifest:
    """Write shards of documents, each a list of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for number, documents in enumerate(shards):
        name, split = f"train-{number:05d}", "train" if splits is None else splits[number]
        tokens, count, digest = write_shard(folder, name, "uint16", (np.asarray(each) for each in documents))
        counts = {"tokens": tokens, "documents": count, "empty": 0}
        records.append(ShardRecord(name=name, split=split, sha256=digest, source="", **counts))
    manifest = TokenManifest(
        folder=folder,
        dtype="uint16",
        vocab_size=vocab_size,
        end=0,
        tokenizer_sha256=tokenizer,
        shards=tuple(records),
    )
    manifest.write()
    return manifest


def make_documents(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Return random documents that end in token 0."""
    draw = np.random.default_rng(seed)
    return [[*draw.integers(1, 61, draw.integers(1, longest)).tolist(), 0] for _ in range(count)]
