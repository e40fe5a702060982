"""The loader that `Formation.prepare` returns: this rank's share of the data. It reports the size of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Protocol

import torch

from phalanx.data.device import to_device
from phalanx.data.loader import ShardedLoader
from phalanx.data.order import MicroInfo, SampleKey
from phalanx.loop.gradients import Gradients
from phalanx.observe.heartbeat import current as current_heartbeat
from phalanx.world.abort import raise_if_aborted

Augmentation = Callable[[Any, SampleKey | None], Any]
"""augment(batch, key) -> batch, on the device; `key` is where its samples are in training, None in evaluation."""

_END = object()
_MEASURED_BATCHES = 128
_MUCH_WAITING = 0.2
"""The share of the time in which the device may wait for data before batches are fetched ahead."""


def _work_left(device: torch.device) -> Callable[[], bool]:
    """Return whether the device still computes, without waiting for it: then nothing has waited for the host."""
    if device.type != "cuda":
        return lambda: False
    stream = torch.cuda.current_stream(device)
    return lambda: not stream.query()


class CompiledSwitch(Protocol):
    """Switches compiled models between their graphs and the code as it is written (`speed/compilation.py`)."""

    def use(self, *, compiled: bool) -> None:
        """Let calls from now on run compiled, or as written."""

    def end(self) -> None:
        """Let calls run compiled again."""


class ActiveLoader:
    """The prepared loader that has yielded the last batch."""

    loader: PreparedLoader | None = None


class PreparedLoader:
    """This rank's share of a loader; one pass is one epoch.

    Reports each micro-batch's share of the global batch to `Gradients` before yielding it.
    """

    def __init__(
        self,
        sharded: ShardedLoader,
        gradients: Gradients | None = None,
        calls: CompiledSwitch | None = None,
        active: ActiveLoader | None = None,
    ) -> None:
        """`gradients`: None for evaluation; `calls`: runs a compiled model as written on batches not worth a graph.

        `active`: notes which loader has yielded last.
        """
        self.sharded = sharded
        self._active = ActiveLoader() if active is None else active
        self._gradients, self._calls = gradients, calls
        self._augment: Augmentation | None = None
        self._seed = 0
        self._most_samples = 0
        self.waited_s = 0.0
        """Seconds that training has waited for batches; on CUDA only those in which the device ran out of work."""
        self.ranks_fetching_ahead = 0
        """How many ranks of this node may fetch batches in worker processes; 0: that would make a difference."""

    def __iter__(self) -> Iterator[Any]:
        board = current_heartbeat()
        if self._gradients is None:
            for number, batch in enumerate(self.sharded):
                raise_if_aborted()
                board.count(number)
                if self._calls is not None:
                    self._calls.use(compiled=False)
                self._active.loader = self
                yield self._augmented(batch, None)
            return
        sharded, begin = self.sharded, self._gradients.begin
        batches, device_has_work = iter(sharded), _work_left(sharded.device)
        measured, waited, since = 0, self.waited_s, perf_counter()
        try:
            while True:
                began = perf_counter()
                batch = next(batches, _END)
                if not device_has_work():
                    self.waited_s += perf_counter() - began
                raise_if_aborted()
                if batch is _END:
                    break
                board.alive()
                begin(sharded.current, sharded)
                self._active.loader = self
                if self._calls is not None:
                    self._calls.use(compiled=self._is_whole)
                yield self._augmented(batch, SampleKey(self._seed, sharded.epoch, sharded.current.offset))
                measured += 1
                if measured == _MEASURED_BATCHES:
                    now = perf_counter()
                    if self.ranks_fetching_ahead and self.waited_s - waited > _MUCH_WAITING * (now - since):
                        sharded.fetch_ahead(self.ranks_fetching_ahead)
                        self.ranks_fetching_ahead = 0
                    measured, waited, since = 0, self.waited_s, now
        except GeneratorExit:
            if not sharded.current.boundary:
                self._gradients.abandon()
            raise
        sharded.set_epoch(sharded.epoch + 1)

    def augmented(self, augment: Augmentation | None, seed: int = 0) -> PreparedLoader:
        """Change each batch on the device from here on; in training, random numbers follow from the seed."""
        self._augment, self._seed = augment, seed
        return self

    def _augmented(self, batch: Any, key: SampleKey | None) -> Any:
        if self._augment is None:
            return batch
        return self._augment(to_device(batch, self.sharded.device, non_blocking=True), key)

    @property
    def _is_whole(self) -> bool:
        """Whether the current batch is as large as others of this rank, so that its graph serves these as well.

        In batches of 32 the last one of 100 samples has 4. Of 20 samples on two ranks all have 10. The size of batches
        that the data makes itself (`batch_size` is then 1) may always vary.
        """
        layout, samples = self.sharded.layout, self.sharded.current.samples
        self._most_samples = max(self._most_samples, samples)
        return samples >= min(self._most_samples, layout.batch_size)

    def steps_left(self, epochs: int | None) -> int | None:
        """Return the optimizer steps up to the end of the last epoch; None where that is not known beforehand."""
        sharded, per_epoch = self.sharded, self.sharded.steps_per_epoch
        if per_epoch is None or epochs is None:
            return None
        epochs_left = max(0, epochs - sharded.epoch)
        if not sharded.samples_done or not epochs_left:
            return per_epoch * epochs_left
        unseen = (sharded.num_samples or 0) - sharded.samples_done  # resumed within an epoch
        return per_epoch * (epochs_left - 1) + -(-unseen // sharded.layout.global_batch)

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
        """The description of the batch yielded last."""
        return self.sharded.current

    @property
    def epoch(self) -> int:
        """The epoch that the next pass (or the one under way) belongs to, from 0."""
        return self.sharded.epoch
