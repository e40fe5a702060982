"""The loader of one rank: the user's data, re-sharded, resumable, weighed and on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from phalanx.data.assemble import Batches, checked, open_source, settle_batch_size
from phalanx.data.device import staged
from phalanx.data.order import Layout, MicroInfo
from phalanx.data.source import read_source
from phalanx.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist

__all__ = ["MicroInfo", "ShardedLoader", "shard_loader"]


class ShardedLoader:
    """Iterate over this rank's micro-batches, already on the device; `current` tells what the last one counts for.

    `notes` holds what the user should be told once. An iteration starts where `load_state_dict` said, else at the
    beginning of the epoch; after an epoch was read to its end, the next iteration is the next epoch unless `set_epoch`
    chooses another.
    """

    def __init__(
        self,
        batches: Batches,
        layout: Layout,
        device: torch.device,
        notes: list[str],
        *,
        training: bool,
        pin_first: bool,
    ) -> None:
        self.layout = layout
        self.device = device
        self.notes = notes
        self.epoch = 0
        self.current = MicroInfo(0, 0, 0.0, boundary=False, offset=0)
        self._batches = batches
        self._training = training
        self._pin_first = pin_first
        self._samples = 0
        self._micro_steps = 0
        self._resuming = False
        self._finished = False

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        micro_steps = self._micro_steps
        pairs = self._batches.batches(self._order_epoch, self._samples, self._micro_steps)
        for info, batch in staged(pairs, self.device, pin_first=self._pin_first):
            self.current = info
            micro_steps += 1
            if info.boundary:
                # Before the yield: a checkpoint taken after this step, while we are suspended here, must include it.
                self._samples += info.global_samples
                self._micro_steps = micro_steps
            yield batch
        self._finished = True

    def __len__(self) -> int:
        count = self._batches.micro_batches(self._order_epoch)
        if count is None:
            raise TypeError("the length of this stream is unknown: it ends when its data end")
        return count

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch; None when the length of the data is unknown."""
        return self._batches.steps(self._order_epoch)

    @property
    def num_samples(self) -> int | None:
        """Samples that all ranks together visit in an epoch; None when unknown."""
        return self._batches.num_samples(self._order_epoch)

    @property
    def samples_done(self) -> int:
        """Samples of this epoch that all ranks consumed in whole optimizer steps."""
        return self._samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. The epoch of a loaded state goes on where the state says."""
        if epoch != self.epoch:
            self._samples = self._micro_steps = 0
            self._resuming = False
        self.epoch = epoch
        self._finished = False

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the samples of this epoch that all ranks consumed in whole optimizer steps."""
        state: dict[str, Any] = {"epoch": self.epoch, "samples": self._samples}
        if self._batches.shards is not None:
            state |= {"micro_steps": self._micro_steps, "shards": list(self._batches.shards)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, at any number of ranks, batch size or accumulation."""
        shards = state.get("shards")
        if shards != self._batches.shards and state["samples"]:
            raise DataError(
                f"the data position was saved with {_describe_shards(shards)}, this run has "
                f"{_describe_shards(self._batches.shards)}: a data set that shards itself goes on mid-epoch "
                "in the same layout only.",
                hint="Resume with the same number of ranks, batch_size and num_workers, or from an epoch's end.",
            )
        self.epoch = int(state["epoch"])
        self._samples = int(state["samples"])
        self._micro_steps = int(state.get("micro_steps", 0))
        self._resuming, self._finished = True, False

    def close(self) -> None:
        """Stop worker processes kept between epochs (`persistent_workers=True`)."""
        self._batches.close()

    @property
    def _order_epoch(self) -> int:
        """Evaluation visits the samples in one order, always."""
        return self.epoch if self._training else 0

    def _begin(self) -> None:
        if self._finished:
            self.epoch += 1
        if not self._resuming:
            self._samples = self._micro_steps = 0
        self._resuming = self._finished = False


def shard_loader(
    source: Any,
    *,
    batch_size: int | None,
    dp_rank: int = 0,
    dp_size: int = 1,
    accumulation: int = 1,
    seed: int = 0,
    device: torch.device | str = "cpu",
    training: bool = True,
    drop_last: bool | None = None,
    group: dist.ProcessGroup | None = None,
    whole_blocks: bool = False,
    in_order: bool = False,
) -> ShardedLoader:
    """Build the loader of one data-parallel rank from a DataLoader, a Dataset or any re-iterable of batches.

    `batch_size` is per rank and wins over the DataLoader's own. A plain Dataset is shuffled when training. Evaluation
    (`training=False`) shuffles nothing, drops nothing and counts every sample once. `group` carries the sample counts
    of iterable data; give a CPU (gloo) group of the data-parallel ranks. `whole_blocks`: see `Layout`.
    `in_order`: offsets tell the order of the samples over all ranks, so a stream is not asked for shards of its own.
    """
    if isinstance(source, ShardedLoader):
        raise UsageError("this loader is sharded already.", hint="Give the DataLoader or data set it was made from.")
    notes: list[str] = []
    device = torch.device(device)
    read = read_source(source, pin_memory=device.type == "cuda", notes=notes)
    size = settle_batch_size(read, batch_size, notes)
    layout = checked(Layout(size, dp_rank, dp_size, accumulation if training else 1, whole_blocks))
    drop = training and (read.drop_last if drop_last is None else drop_last)
    batches = open_source(
        read, layout, seed=seed, training=training, drop_last=drop, group=group, notes=notes, in_order=in_order
    )
    pin_first = read.workers.pin_memory and read.workers.num_workers == 0
    return ShardedLoader(batches, layout, device, notes, training=training, pin_first=pin_first)


def _describe_shards(shards: list[int] | None) -> str:
    if shards is None:
        return "no sharding by the data set"
    ranks, workers, batch_size = shards
    return f"{ranks} ranks, {workers} workers and batch_size={batch_size}"
