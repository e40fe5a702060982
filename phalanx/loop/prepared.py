"""A loader that tells the gradients, before every batch, which share of the global batch it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phalanx.data.loader import ShardedLoader
    from phalanx.data.order import MicroInfo
    from phalanx.loop.gradients import Gradients


class PreparedLoader:
    """This rank's share of a loader. One pass is one epoch; the next pass is the next epoch."""

    def __init__(self, sharded: ShardedLoader, gradients: Gradients | None = None) -> None:
        self.sharded = sharded
        self._gradients = gradients

    def __iter__(self) -> Iterator[Any]:
        if self._gradients is None:
            yield from self.sharded
            return
        sharded, begin = self.sharded, self._gradients.begin
        try:
            for batch in sharded:
                begin(sharded.current)
                yield batch
        except GeneratorExit:
            if not sharded.current.boundary:
                self._gradients.abandon()
            raise
        sharded.set_epoch(sharded.epoch + 1)

    def roll_over(self) -> None:
        """Begin the next epoch when this one was read to its last sample but left before its end was seen."""
        if self.is_consumed:
            self.sharded.set_epoch(self.sharded.epoch + 1)

    @property
    def is_consumed(self) -> bool:
        """Whether every sample of this epoch was handed out; unknown, so False, for a stream that has not ended."""
        total = self.sharded.num_samples
        return total is not None and self.sharded.samples_done >= total

    def __len__(self) -> int:
        return len(self.sharded)

    @property
    def current(self) -> MicroInfo:
        """What is known about the batch handed out last."""
        return self.sharded.current

    @property
    def epoch(self) -> int:
        """The epoch that the next pass (or the one under way) belongs to, from 0."""
        return self.sharded.epoch
