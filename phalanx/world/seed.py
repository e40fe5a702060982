"""Seeds: equal on all ranks for weights, different on each rank for dropout, and states that can be saved."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

RNG_FORMAT = 1


def seed_everything(seed: int, *, rank: int = 0) -> None:
    """Seed Python, NumPy and torch (all devices) from the run's seed and the rank."""
    mixed = np.random.SeedSequence([seed, rank]).generate_state(2)
    random.seed(int(mixed[0]))
    np.random.seed(int(mixed[0]))
    torch.manual_seed(int(mixed[1]))


def rng_state() -> dict[str, Any]:
    """Return every generator's state as tensors and plain values."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "format": RNG_FORMAT,
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys, np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
