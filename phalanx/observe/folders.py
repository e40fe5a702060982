"""Folders of a run: what is in them is for their owner, until the owner decides otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def make_private(path: Path, *, exist_ok: bool = True) -> None:
    """Make a folder, with its parents, that only its owner can open; one that exists keeps its permissions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=exist_ok)
