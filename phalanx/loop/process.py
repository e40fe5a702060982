"""Saves and restores the process-wide settings that a run changes in the user's process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from phalanx.world.seed import rng_state, set_rng_state

if TYPE_CHECKING:
    from collections.abc import Callable


def remember_process() -> Callable[[], None]:
    """Save the process-wide settings that a run changes; return what restores them."""
    random, threads = rng_state(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()

    def restore() -> None:
        set_rng_state(random)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)

    return restore
