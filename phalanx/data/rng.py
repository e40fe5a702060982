"""Randomness as a function of a position, so that a resumed run draws what the uninterrupted one drew."""

from __future__ import annotations

import random

import numpy as np
import torch

_MASK = (1 << 64) - 1
_SCOPED = np.random.MT19937()
"""NumPy's generator inside `rng_scope`; it is seeded each time."""


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


class rng_scope:  # noqa: N801 - used like a function
    """Run a block under `seed` and put this process's generators back as they were.

    It runs once per batch. NumPy's generator is exchanged for another one, not copied: copying takes 100 times longer.
    """

    __slots__ = ("_numpy", "_python", "_seed", "_torch")

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.default_generator.get_state()
        self._numpy = np.random.get_bit_generator()
        # A scope within a scope needs a generator of its own.
        np.random.set_bit_generator(_SCOPED if self._numpy is not _SCOPED else np.random.MT19937())
        seed_process(self._seed)

    def __exit__(self, *error: object) -> None:
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)
        np.random.set_bit_generator(self._numpy)
