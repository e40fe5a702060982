"""From the description of the data to where its micro-batches come from, with the checks that can be made before."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.data.iterable import ReadyItems
from phalanx.data.mapped import MappedBatches
from phalanx.data.sampler import DrawnOrder, IndexOrder, Order, order_of
from phalanx.data.streamed import StreamedBatches
from phalanx.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist

    from phalanx.data.order import Layout, MicroInfo
    from phalanx.data.source import Source


class Batches(Protocol):
    """Where the micro-batches of an epoch come from."""

    shards: list[int] | None

    def batches(self, epoch: int, start: int, skipped: int) -> Iterator[tuple[MicroInfo, Any]]:
        """Yield what is left of the epoch after `start` samples (and `skipped` micro-batches of this rank)."""
        ...

    def micro_batches(self, epoch: int) -> int | None:
        """Micro-batches of this rank in the epoch."""
        ...

    def steps(self, epoch: int) -> int | None:
        """Optimizer steps in the epoch."""
        ...

    def num_samples(self, epoch: int) -> int | None:
        """Samples that all ranks together visit in the epoch."""
        ...

    def close(self) -> None:
        """Stop worker processes kept between epochs."""
        ...


def open_source(
    source: Source,
    layout: Layout,
    *,
    seed: int,
    training: bool,
    drop_last: bool,
    group: dist.ProcessGroup | None,
    notes: list[str],
    in_order: bool,
) -> Batches:
    """Choose how the data are read: by positions where the data set has them, else as a stream."""
    if source.is_stream:
        return StreamedBatches(source, layout, seed=seed, drop_last=drop_last, group=group, in_order=in_order)
    order = _order(source, seed=seed, training=training, notes=notes)
    if source.ready_batches:
        stream = dataclasses.replace(source, dataset=ReadyItems(source.dataset, order), is_stream=True)
        return StreamedBatches(stream, layout, seed=seed, drop_last=drop_last, group=group, in_order=in_order)
    mapped = MappedBatches(source, order, layout, seed=seed, drop_last=drop_last)
    if mapped.plan(0).length == 0:
        raise DataError(
            f"the {'training' if training else 'evaluation'} data set is empty: it has 0 samples.",
            hint="Check its path, its filter and its split.",
        )
    if training and source.batch_sampler is None:
        _check_length(mapped.plan(0).length, layout, drop_last=drop_last, notes=notes)
    return mapped


def settle_batch_size(source: Source, wanted: int | None, notes: list[str]) -> int:
    """Return the batch size per rank: the one asked for, else the DataLoader's own."""
    if source.ready_batches or source.batch_sampler is not None:
        if wanted is not None:
            maker = "the batch sampler" if source.batch_sampler is not None else "the data"
            notes.append(
                f"batch_size={wanted} is not used: {maker} makes the batches, and each is dealt whole to one rank."
            )
        return 1
    if wanted is None and source.batch_size is None:
        raise UsageError(
            "batch_size is not known: a data set does not say it.", hint="Write batch_size=32 (samples per rank)."
        )
    if wanted is not None and source.batch_size not in (None, wanted):
        notes.append(f"batch_size={wanted} per rank replaces the DataLoader's {source.batch_size}.")
    return wanted if wanted is not None else int(source.batch_size or 1)


def checked(layout: Layout) -> Layout:
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


def _order(source: Source, *, seed: int, training: bool, notes: list[str]) -> Order:
    if source.batch_sampler is not None:
        return DrawnOrder(source.batch_sampler, seed=seed, batches=True)
    if source.sampler is None:
        return IndexOrder(len(source.dataset), seed=seed, shuffle=training)
    return order_of(source.sampler, source.dataset, seed=seed, training=training, notes=notes)


def _check_length(length: int, layout: Layout, *, drop_last: bool, notes: list[str]) -> None:
    """Refuse a batch that the data cannot fill once; note a global batch that they cannot."""
    if length >= layout.global_batch:
        return
    said = f"the data set has {length} samples, a global batch is {_describe(layout)} = {layout.global_batch}"
    fitting = length // (layout.dp_size * layout.accumulation)
    if layout.batch_size > length:
        raise DataError(
            f"batch_size = {layout.batch_size} is larger than the data set of {length} samples.",
            hint=f"Lower batch_size to {max(1, fitting)} or less.",
        )
    if drop_last:
        lower = f"Lower batch_size to {fitting} or set" if fitting else "Set"
        raise DataError(f"{said}, and drop_last=True drops it all.", hint=f"{lower} drop_last=False.")
    notes.append(f"{said}: every epoch is one step of {length} samples.")


def _describe(layout: Layout) -> str:
    accumulated = f" x {layout.accumulation} accumulation steps" if layout.accumulation > 1 else ""
    return f"{layout.batch_size} x {layout.dp_size} rank{'s' if layout.dp_size > 1 else ''}{accumulated}"
