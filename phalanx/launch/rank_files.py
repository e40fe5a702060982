"""What a rank writes into the log folder for its launcher, and the signal that asks for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

ASK = signal.SIGRTMIN + 9
"""Asks a rank for its stacks and its record. The fork server ignores it, and so does a rank until it can answer."""


def stack_path(log_dir: Path, rank: int) -> Path:
    """Return where a rank writes its threads' stacks when it is asked."""
    return log_dir / f"rank-{rank}.stack"


def open_stack(log_dir: Path, rank: int) -> int:
    """Create the file of `stack_path`."""
    return os.open(stack_path(log_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)


def calls_path(log_dir: Path, slot: int) -> Path:
    """Return where a rank writes its record."""
    return log_dir / f"rank-{slot}.collectives.json"


def process_path(log_dir: Path, slot: int) -> Path:
    """Return where a rank writes which process it is."""
    return log_dir / f"rank-{slot}.process.json"
