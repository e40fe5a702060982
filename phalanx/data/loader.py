"""`shard_loader`: a user's data set or DataLoader as this rank's micro-batches, checked before training starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from phalanx.data.device import staged
from phalanx.data.mapped import Batches, MappedBatches
from phalanx.data.order import BatchSplit, DrawnOrder, MicroInfo, Order, order_of, own_order
from phalanx.data.source import Source, read_source
from phalanx.errors import DataError, UsageError


def open_source(
    source: Source,
    layout: BatchSplit,
    *,
    seed: int,
    training: bool,
    drop_last: bool,
    group: dist.ProcessGroup | None,
    notes: list[str],
    in_order: bool,
) -> Batches:
    """Return the micro-batches of a source: by index where the data set has indices, else as a stream."""

    def stream(items: Source) -> Batches:
        from phalanx.data.streamed import StreamedBatches  # most data has an index

        return StreamedBatches(items, layout, seed=seed, drop_last=drop_last, group=group, in_order=in_order)

    if source.is_stream:
        return stream(source)
    if source.batch_sampler is not None:
        order: Order = DrawnOrder(source.batch_sampler, seed=seed, batches=True)
    elif source.sampler is None:
        order = own_order(source.dataset, len(source.dataset), seed=seed, shuffle=training)
    else:
        order = order_of(source.sampler, source.dataset, seed=seed, training=training, notes=notes)
    if source.ready_batches:
        from phalanx.data.iterable import ReadyItems

        return stream(dataclasses.replace(source, dataset=ReadyItems(source.dataset, order), is_stream=True))
    mapped = MappedBatches(source, order, layout, seed=seed, drop_last=drop_last, group=group)
    if mapped.plan(0).length == 0:
        raise DataError(
            f"the {'training' if training else 'evaluation'} data set is empty: it has 0 samples.",
            hint="Check its path, its filter and its split.",
        )
    if training and source.batch_sampler is None:
        _check_length(mapped.plan(0).length, layout, drop_last=drop_last, notes=notes)
    return mapped


def settle_batch_size(source: Source, batch_size: int | None, notes: list[str]) -> int:
    """Return the batch size per rank: the given one, else the DataLoader's."""
    if source.ready_batches or source.batch_sampler is not None:
        if batch_size is not None:
            maker = "the batch sampler" if source.batch_sampler is not None else "the data"
            notes.append(
                f"batch_size={batch_size} is not used: {maker} makes the batches, and each goes whole to one rank."
            )
        return 1
    if batch_size is None and source.batch_size is None:
        raise UsageError(
            "batch_size is not known: a data set does not say it.", hint="Write batch_size=32 (samples per rank)."
        )
    if batch_size is not None and source.batch_size not in (None, batch_size):
        notes.append(f"batch_size={batch_size} per rank replaces the DataLoader's {source.batch_size}.")
    return batch_size if batch_size is not None else int(source.batch_size or 1)


def checked(layout: BatchSplit) -> BatchSplit:
    """Return `layout` if its numbers make sense."""
    for name in ("batch_size", "dp_size", "accumulation"):
        value = getattr(layout, name)
        if value < 1:
            raise UsageError(f"{name}={value} is not possible: it is 1 or more.")
    if not 0 <= layout.dp_rank < layout.dp_size:
        raise UsageError(
            f"dp_rank={layout.dp_rank} is not possible: with dp_size={layout.dp_size} it is 0 to {layout.dp_size - 1}."
        )
    return layout


def _check_length(length: int, layout: BatchSplit, *, drop_last: bool, notes: list[str]) -> None:
    """Raise for a batch that is larger than the data set; add a note for a global batch that is."""
    if length >= layout.global_batch:
        return
    accumulated = f" x {layout.accumulation} accumulation steps" if layout.accumulation > 1 else ""
    product = f"{layout.batch_size} x {layout.dp_size} rank{'s' if layout.dp_size > 1 else ''}{accumulated}"
    sizes = f"the data set has {length} samples, a global batch is {product} = {layout.global_batch}"
    fitting = length // (layout.dp_size * layout.accumulation)
    if layout.batch_size > length:
        raise DataError(
            f"batch_size = {layout.batch_size} is larger than the data set of {length} samples.",
            hint=f"Lower batch_size to {max(1, fitting)} or less.",
        )
    if drop_last:
        lower = f"Lower batch_size to {fitting} or set" if fitting else "Set"
        raise DataError(f"{sizes}, and drop_last=True drops it all.", hint=f"{lower} drop_last=False.")
    notes.append(f"{sizes}: every epoch is one step of {length} samples.")


class ShardedLoader:
    """Iterate over this rank's micro-batches on the device; `current` describes the last one.

    `notes` are messages for the user. An iteration starts at the position of `load_state_dict`, else at the start of
    the epoch; after a complete epoch the next iteration is the next epoch, unless `set_epoch` chooses another.
    """

    def __init__(
        self,
        batches: Batches,
        layout: BatchSplit,
        device: torch.device,
        notes: list[str],
        *,
        training: bool,
        pin_first: bool,
    ) -> None:
        self.layout, self.device, self.notes = layout, device, notes
        self.epoch = 0
        self.current = MicroInfo(0, 0, 0.0, boundary=False, offset=0)
        self._batches, self._training, self._pin_first = batches, training, pin_first
        self._samples = self._micro_steps = 0
        self._resuming = self._finished = False
        self.leaves_small = False
        """Whether batches of some kilobytes stay on the host: a captured step copies them to where it reads them."""
        self.dataset_metrics: Mapping[str, Any] | None = None
        """The metrics that the data set says it is measured with, its attribute `metrics`."""

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        micro_steps = self._micro_steps
        pairs = self._batches.batches(self._order_epoch, self._samples, self._micro_steps)
        leaves_small = lambda: self.leaves_small  # noqa: E731 - read at every batch
        for info, batch in staged(pairs, self.device, pin_first=self._pin_first, leave_small=leaves_small):
            self.current = info
            micro_steps += 1
            if info.boundary:
                # Before the yield: a checkpoint after this step, while this generator is suspended, must include it.
                self._samples += info.global_samples
                self._micro_steps = micro_steps
            yield batch
        self._finished = True

    def __len__(self) -> int:
        count = self._batches.micro_batches(self._order_epoch)
        if count is None:
            raise TypeError("the length of this stream is unknown")
        return count

    @property
    def num_workers(self) -> int:
        """Processes that load samples; 0: this process does it, between two steps."""
        return self._batches.num_workers

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

    @property
    def fixed_ranks(self) -> str:
        """Why a position within an epoch is valid for this number of ranks only; empty where it is for any."""
        why = "The training data shards itself, and its position is valid for this number of ranks only."
        return why if self._batches.fixes_ranks else ""

    def problems(self) -> str:
        """Return what was wrong with the samples that all ranks have read so far; empty: nothing. All ranks call it."""
        return self._batches.problems()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. The epoch of a loaded state continues at its position."""
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
        if (order := self._batches.fingerprint(self._order_epoch)) is not None:
            state["order"] = order
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position, at any number of ranks, batch size or accumulation."""
        shards = state.get("shards")
        if shards != self._batches.shards and state["samples"]:
            raise DataError(
                f"the data position was saved with {_describe_shards(shards)}, this run has "
                f"{_describe_shards(self._batches.shards)}: a data set that shards itself can continue mid-epoch "
                "in the same layout only.",
                hint="Resume with the same number of ranks, batch_size and num_workers, or from an epoch's end.",
            )
        self.epoch = int(state["epoch"])
        self._samples = int(state["samples"])
        if self._samples:
            self._batches.check_order(self._order_epoch, state.get("order"))
        self._micro_steps = int(state.get("micro_steps", 0))
        self._resuming, self._finished = True, False

    def reread(self, steps_back: int) -> Iterator[Any] | None:
        """Read this rank's micro-batches of an optimizer step again, on the host: 0 is the last whole step.

        None where they cannot be read: of streams, of whole batches, and of the epoch before the last one.
        """
        batches, size = self._batches, self.layout.global_batch
        if not isinstance(batches, MappedBatches) or not batches.cuts_batches:
            return None
        epoch = self._order_epoch if self._samples else self._order_epoch - 1  # which the loop has begun already
        if epoch < 0:
            return None
        total = batches.num_samples(epoch)
        if total is None:
            return None
        done = self._samples or total
        last = done - size if done < total else (total - 1) // size * size  # that of an epoch may be smaller
        start = last - steps_back * size
        return batches.step(epoch, start) if start >= 0 else None

    def fetch_ahead(self, ranks_here: int) -> None:
        """Fetch batches in worker processes from here on where that makes no difference but time."""
        self._batches.fetch_ahead(ranks_here)

    def close(self) -> None:
        """Stop worker processes kept between epochs (`persistent_workers=True`)."""
        self._batches.close()

    @property
    def _order_epoch(self) -> int:
        """The epoch whose order is used: evaluation always uses the same."""
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
    blocks_per_step: int = 0,
    in_order: bool = False,
) -> ShardedLoader:
    """Build the loader of one data-parallel rank from a DataLoader, a Dataset or any re-iterable of batches.

    `batch_size` is per rank and overrides the DataLoader's. A plain Dataset is shuffled when training. Evaluation
    (`training=False`) shuffles nothing, drops nothing and counts every sample once. `group`: a CPU (gloo) group of the
    data-parallel ranks, for the sample counts of iterable data. `whole_blocks`, `blocks_per_step`: see `BatchSplit`.
    `in_order`: offsets are the order of the samples over all ranks, so a stream does not shard itself.
    """
    if isinstance(source, ShardedLoader):
        raise UsageError("this loader is sharded already.", hint="Give its DataLoader or data set.")
    notes: list[str] = []
    device = torch.device(device)
    read = read_source(source, pin_memory=device.type == "cuda", notes=notes)
    size = settle_batch_size(read, batch_size, notes)
    parts = (accumulation, whole_blocks, blocks_per_step) if training else (1, whole_blocks)
    layout = checked(BatchSplit(size, dp_rank, dp_size, *parts))
    drop = training and (read.drop_last if drop_last is None else drop_last)
    batches = open_source(
        read, layout, seed=seed, training=training, drop_last=drop, group=group, notes=notes, in_order=in_order
    )
    pin_first = read.workers.pin_memory and read.workers.num_workers == 0
    sharded = ShardedLoader(batches, layout, device, notes, training=training, pin_first=pin_first)
    metrics = getattr(read.dataset, "metrics", None)
    sharded.dataset_metrics = metrics if isinstance(metrics, Mapping) else None
    return sharded


def _describe_shards(shards: list[int] | None) -> str:
    if shards is None:
        return "no sharding by the data set"
    ranks, workers, batch_size = shards
    return f"{ranks} ranks, {workers} workers and batch_size={batch_size}"
