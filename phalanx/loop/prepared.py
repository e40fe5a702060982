"""What a `Formation` has prepared: models, optimizers, schedulers, loaders, and how they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.loop.gradients import Gradients
from phalanx.loop.precision import Precision

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from phalanx.data.loader import ShardedLoader
    from phalanx.data.order import MicroInfo
    from phalanx.strategies.base import Strategy
    from phalanx.world.world import World


class Prepared:
    """The record of a run on this rank."""

    def __init__(self, strategy: Strategy, world: World, run_id: str) -> None:
        self.strategy = strategy
        self.config = strategy.config
        self.world = world
        self.device = world.device
        self.run_id = run_id
        self.lineage: list[dict[str, Any]] = []
        """The runs that this one continues, as a checkpoint's manifest holds them."""
        self.precision = Precision(self.config, self.device, by_engine=strategy.owns_precision)
        self.notes: list[str] = [self.precision.note] if self.precision.note else []
        """What the user should read when the run starts."""
        self.clear()

    def clear(self) -> None:
        """Forget everything that was prepared."""
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.loaders: list[PreparedLoader] = []
        self.gradients = Gradients(self.config, self.world, self.strategy, self.precision)

    @property
    def rank(self) -> int:
        """This rank's number in the whole job."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return self.world.world_size

    @property
    def is_main(self) -> bool:
        """Whether this rank is the one that prints and publishes."""
        return self.world.is_main

    @property
    def step(self) -> int:
        """Optimizer steps taken; checkpoints are named after it."""
        return self.gradients.steps


class PreparedLoader:
    """This rank's share of a loader; one pass is one epoch.

    Reports each micro-batch's share of the global batch to `Gradients` before yielding it.
    """

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
        """Begin the next epoch where all samples of this one were read, but the iteration stopped before its end."""
        if self.is_consumed:
            self.sharded.set_epoch(self.sharded.epoch + 1)

    @property
    def is_consumed(self) -> bool:
        """Whether every sample of this epoch was yielded; False for a stream of unknown size that has not ended."""
        total = self.sharded.num_samples
        return total is not None and self.sharded.samples_done >= total

    def __len__(self) -> int:
        return len(self.sharded)

    @property
    def current(self) -> MicroInfo:
        """What is known about the batch yielded last."""
        return self.sharded.current

    @property
    def epoch(self) -> int:
        """The epoch that the next pass (or the one under way) belongs to, from 0."""
        return self.sharded.epoch
