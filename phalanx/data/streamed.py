"""Micro-batches of an iterable data set; ranks agree on the blocks of each step, so that none waits for data."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.data.iterable import BlockStream, StreamBlock
from phalanx.data.mapped import Batches
from phalanx.data.order import BatchSplit, MicroInfo
from phalanx.data.source import Source
from phalanx.errors import DataError


@dataclass(frozen=True, slots=True)
class AgreedStep:
    """One optimizer step: this rank's blocks, and the totals over all ranks."""

    local_blocks: list[StreamBlock]
    samples: int
    micro_steps: int
    blocks: int


class _Pending:
    """The counts of one step while they are reduced: for each micro-step the samples and the blocks of all ranks."""

    def __init__(self, blocks: list[StreamBlock], layout: BatchSplit, group: dist.ProcessGroup | None) -> None:
        missing = [0] * (layout.accumulation - len(blocks))
        self._blocks = blocks
        counts = [[*(block.samples for block in blocks), *missing], [*(1 for _ in blocks), *missing]]
        self._counts = torch.tensor(counts, dtype=torch.int64)
        self._work: Any = None
        if layout.dp_size > 1:
            self._counts = self._counts.to(_reducing_device(group))
            self._work = dist.all_reduce(self._counts, group=group, async_op=True)

    def result(self) -> AgreedStep:
        if self._work is not None:
            self._work.wait()
        samples, blocks = self._counts.tolist()
        return AgreedStep(self._blocks, sum(samples), sum(count > 0 for count in blocks), sum(blocks))

    def settle(self) -> None:
        """Let an unused collective finish, but do not wait long, as a peer may have failed."""
        deadline = time.monotonic() + 1.0
        while self._work is not None and not self._work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.001)


def agreed_steps(
    blocks: Iterator[StreamBlock], layout: BatchSplit, group: dist.ProcessGroup | None
) -> Iterator[AgreedStep]:
    """Group a rank's blocks into optimizer steps on which all ranks agree, until no rank has data.

    With several ranks the counts are reduced one step ahead, while the step before is computed.
    """
    if layout.dp_size == 1:
        while (step := _Pending(_next_blocks(blocks, layout), layout, None).result()).blocks:
            yield step
        return
    if not (dist.is_available() and dist.is_initialized()):
        raise DataError(
            f"iterable data on {layout.dp_size} ranks needs torch.distributed: ranks agree on the counts of each step.",
            hint="Call torch.distributed.init_process_group() first, or train through a Phalanx trainer.",
        )
    pending = _Pending(_next_blocks(blocks, layout), layout, group)
    try:
        while (step := pending.result()).blocks:
            pending = _Pending(_next_blocks(blocks, layout), layout, group)
            yield step
    finally:
        pending.settle()


def _next_blocks(blocks: Iterator[StreamBlock], layout: BatchSplit) -> list[StreamBlock]:
    return list(itertools.islice(blocks, layout.accumulation))


def _reducing_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the CPU where the group supports it: reading counts from an accelerator would stall it in each step."""
    config = str(dist.get_backend_config(group))
    return torch.device("cpu" if "cpu:" in config else torch.accelerator.current_accelerator() or "cpu")


class StreamedBatches(Batches):
    """Read a stream of unknown length: every rank takes part in every step until no rank has data."""

    def __init__(
        self,
        source: Source,
        layout: BatchSplit,
        *,
        seed: int,
        drop_last: bool,
        group: dist.ProcessGroup | None,
        in_order: bool = False,
    ) -> None:
        super().__init__(source, layout, seed, drop_last)
        self._stream = BlockStream(
            source.dataset,
            layout,
            source.collate_fn,
            seed=seed,
            ready=source.ready_batches,
            workers=self.num_workers,
            in_order=in_order,
        )
        self._group = group
        self.shards = [layout.dp_size, self.num_workers, layout.batch_size] if self._stream.shards_itself else None
        self.fixes_ranks = self._stream.may_shard

    def batches(self, epoch: int, start: int, skipped: int) -> Iterator[tuple[MicroInfo, Any]]:
        """Yield this rank's micro-batches from sample `start` (of a self-sharding stream, block `skipped`) on."""
        blocks = _OwnBlocks(self._read(epoch, start, skipped), skipped if self.shards else 0)
        has_samples = start > 0
        for step in agreed_steps(blocks, self._layout, self._group):
            if self._drop_last and not self._is_whole(step):
                break
            has_samples = True
            yield from self._micro_batches_of(step, blocks)
        if not has_samples:
            size = self._layout.global_batch
            dropped = (
                f", or drop_last=True dropped it: it is less than a global batch of {size}" if self._drop_last else ""
            )
            raise DataError(f"the data set is empty: its iterator ended at once{dropped}.")

    def micro_batches(self, epoch: int) -> int | None:
        """Micro-batches of this rank in the epoch, where the stream has a length."""
        length = self.num_samples(epoch)
        return None if length is None else -(-length // self._layout.micro_step)

    def steps(self, epoch: int) -> int | None:
        """Optimizer steps in the epoch, where the stream has a length."""
        length = self.num_samples(epoch)
        return None if length is None else -(-length // self._layout.global_batch)

    def num_samples(self, epoch: int) -> int | None:
        """Samples of the epoch, where the stream has a length."""
        if self._source.ready_batches or self.shards or not hasattr(self._source.dataset, "__len__"):
            return None
        length = len(self._source.dataset)
        return length - length % self._layout.global_batch if self._drop_last else length

    def _read(self, epoch: int, start: int, skipped: int) -> Iterator[StreamBlock]:
        self._stream.seek(epoch, start, skipped)
        yield from self._loader_for(self._stream, epoch) if self.num_workers else self._stream

    def _is_whole(self, step: AgreedStep) -> bool:
        layout = self._layout
        if step.blocks < layout.dp_size * layout.accumulation:
            return False
        return self._source.ready_batches or step.samples == layout.global_batch

    def _micro_batches_of(self, step: AgreedStep, blocks: _OwnBlocks) -> Iterator[tuple[MicroInfo, Any]]:
        for micro in range(step.micro_steps):
            block = step.local_blocks[micro] if micro < len(step.local_blocks) else self._placeholder(blocks)
            last = micro == step.micro_steps - 1
            yield self._layout.info(block.samples, step.samples, boundary=last, offset=block.offset), block.batch

    def _placeholder(self, blocks: _OwnBlocks) -> StreamBlock:
        if blocks.latest is None:
            raise DataError(
                f"rank {self._layout.dp_rank} of {self._layout.dp_size} got no data from the data set's shard().",
                hint="Use fewer ranks or worker processes, or more shards.",
            )
        return blocks.latest._replace(samples=0)


class _OwnBlocks:
    """The blocks of this rank that have samples; the latest is kept as a placeholder for the end."""

    def __init__(self, blocks: Iterator[StreamBlock], skipped: int) -> None:
        self._blocks = itertools.islice(blocks, skipped, None)
        self.latest: StreamBlock | None = None

    def __iter__(self) -> _OwnBlocks:
        return self

    def __next__(self) -> StreamBlock:
        for block in self._blocks:
            self.latest = block
            if block.samples:
                return block
        raise StopIteration
