"""Ranks agreeing on what each optimizer step of a stream holds, so that none waits for what another does not have."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from phalanx.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phalanx.data.iterable import Block
    from phalanx.data.order import Layout


@dataclass(frozen=True, slots=True)
class AgreedStep:
    """One optimizer step: this rank's blocks, and what all ranks together hold."""

    own: list[Block]
    samples: int
    micro_steps: int
    blocks: int


class _Pending:
    """The counts of one step, on their way: for each micro-step the samples and the blocks of all ranks."""

    def __init__(self, own: list[Block], layout: Layout, group: dist.ProcessGroup | None) -> None:
        missing = [0] * (layout.accumulation - len(own))
        self._own = own
        counts = [[*(block.samples for block in own), *missing], [*(1 for _ in own), *missing]]
        self._counts = torch.tensor(counts, dtype=torch.int64)
        self._work: Any = None
        if layout.dp_size > 1:
            self._counts = self._counts.to(_reducing_device(group))
            self._work = dist.all_reduce(self._counts, group=group, async_op=True)

    def result(self) -> AgreedStep:
        if self._work is not None:
            self._work.wait()
        samples, blocks = self._counts.tolist()
        return AgreedStep(self._own, sum(samples), sum(count > 0 for count in blocks), sum(blocks))

    def settle(self) -> None:
        """Let a collective that nobody will read finish, but do not wait for a peer that is gone."""
        deadline = time.monotonic() + 1.0
        while self._work is not None and not self._work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.001)


def agreed_steps(blocks: Iterator[Block], layout: Layout, group: dist.ProcessGroup | None) -> Iterator[AgreedStep]:
    """Group a rank's blocks into optimizer steps on which all ranks agree, until the last rank has run out.

    With several ranks the counts travel one step ahead, while the step before is computed.
    """
    if layout.dp_size == 1:
        while (step := _Pending(_take(blocks, layout), layout, None).result()).blocks:
            yield step
        return
    _require_group(layout)
    pending = _Pending(_take(blocks, layout), layout, group)
    try:
        while (step := pending.result()).blocks:
            pending = _Pending(_take(blocks, layout), layout, group)
            yield step
    finally:
        pending.settle()


def _take(blocks: Iterator[Block], layout: Layout) -> list[Block]:
    own: list[Block] = []
    while len(own) < layout.accumulation and (block := next(blocks, None)) is not None:
        own.append(block)
    return own


def _reducing_device(group: dist.ProcessGroup | None) -> torch.device:
    """Count on the CPU where the group can: reading counts off an accelerator would stop it at every step."""
    config = str(dist.get_backend_config(group))
    return torch.device("cpu" if "cpu:" in config else torch.accelerator.current_accelerator() or "cpu")


def _require_group(layout: Layout) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise DataError(
            f"iterable data on {layout.dp_size} ranks needs torch.distributed: ranks agree on the counts of each step.",
            hint="Call torch.distributed.init_process_group() first, or train through a Phalanx trainer.",
        )
