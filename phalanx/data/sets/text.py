"""A text corpus that every machine has: the sources of Python's own standard library, as bytes."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch

from phalanx.data.fetch import GatherDataset
from phalanx.errors import DataError, UsageError

VOCABULARY = 256
"""One token a byte."""

_SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"})
_VALIDATION_EVERY = 10


class TextDataset(GatherDataset):
    """Windows of `seq_len` tokens and the same windows one token later."""

    vocab_size = VOCABULARY

    def __init__(self, tokens: torch.Tensor, seq_len: int) -> None:
        if len(tokens) <= seq_len:
            raise DataError(
                f"the text has {len(tokens)} tokens: too few for a window of seq_len={seq_len}.",
                hint="Lower seq_len or raise max_bytes.",
            )
        self.seq_len = seq_len
        self.tokens = tokens
        self._windows = tokens.unfold(0, seq_len + 1, seq_len)

    def __len__(self) -> int:
        return len(self._windows)

    def gather(self, index: torch.Tensor) -> list[torch.Tensor]:
        """Return (inputs, targets), int64 of shape [batch, seq_len]."""
        windows = self._windows.index_select(0, index).long()
        return [windows[:, :-1].contiguous(), windows[:, 1:].contiguous()]


def text(split: str = "train", seq_len: int = 128, max_bytes: int = 4_000_000) -> TextDataset:
    """Return the corpus cut into windows. Every tenth file is for validation; no file is in both splits."""
    if seq_len < 1 or max_bytes < 1:
        raise UsageError(f"seq_len={seq_len} and max_bytes={max_bytes} must be 1 or more.")
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _sources(root)
    if not files:
        raise DataError(f"no Python sources in {root}: this Python came without them.")
    validation = split != "train"
    chosen = [file for number, file in enumerate(files) if (number % _VALIDATION_EVERY == 0) == validation]
    return TextDataset(_read(chosen, max_bytes), seq_len)


def _sources(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        # Pruned in place: walking through site-packages would take longer than everything else.
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found += [Path(folder, file) for file in files if file.endswith(".py")]
    return sorted(found)


def _read(files: list[Path], max_bytes: int) -> torch.Tensor:
    corpus = bytearray()
    for file in files:
        if len(corpus) >= max_bytes:
            break
        corpus += file.read_bytes() + b"\n"
    return torch.from_numpy(np.frombuffer(corpus, dtype=np.uint8)[:max_bytes].copy())
