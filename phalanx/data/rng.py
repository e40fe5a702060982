"""Randomness as a function of a position, so that a resumed run draws what the uninterrupted one drew."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_MASK = (1 << 64) - 1


def derive_seed(*parts: int) -> int:
    """Mix integers into one 64-bit seed (SplitMix64): near positions give unrelated seeds."""
    state = 0
    for part in parts:
        state = ((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_process(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators of this process."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not torch.manual_seed: it also seeds every accelerator, which the data path neither uses nor may disturb.
    torch.default_generator.manual_seed(seed)


@contextmanager
def rng_scope(seed: int) -> Iterator[None]:
    """Run a block under `seed` and put this process's generators back as they were."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_process(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)
