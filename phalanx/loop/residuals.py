"""The per-rank part of a checkpoint: the random state, and the residuals of compressors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx import checkpoint
from phalanx.world.seed import rng_state

if TYPE_CHECKING:
    from phalanx.loop.prepared import Prepared


def rank_state(prepared: Prepared) -> dict[str, Any]:
    """Return this rank's part of a checkpoint."""
    return {**rng_state(), **(prepared.strategy.rank_state() if prepared.strategy.keeps_rank_state else {})}


def restore_residuals(prepared: Prepared, saved: checkpoint.Checkpoint, own: dict[str, Any] | None) -> None:
    """Restore the residuals; `own`: this rank's part, None where the number of ranks changed.

    Then every old rank's residuals go to one of the new ranks, scaled so that their average stays what it was.
    """
    strategy = prepared.strategy
    if not strategy.keeps_rank_state:
        return
    then, now = saved.manifest.world_size, prepared.world_size
    factor = now / then
    parts = (
        [own]
        if own is not None
        else [checkpoint.read_state_of(saved, rank) for rank in range(prepared.rank, then, now)]
    )
    if not parts:  # more ranks than before: this one has no residuals yet, but knows the steps as all do
        factor, parts = 0.0, [checkpoint.read_state_of(saved, 0)]
    if not strategy.load_rank_state(parts, factor):
        prepared.notes.append("the checkpoint was saved without compression: nothing is kept back yet")
