"""Compression under torch's DDP: a comm hook that hands each bucket to a courier, with ranks of a group of its own.

The courier's collectives and those of the main thread run at the same time. In one group they could meet each other's
partners; so the courier has a group of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from phalanx import torch_compat
from phalanx.comm.buckets import Bucket
from phalanx.comm.comm_thread import CommThread
from phalanx.comm.compress.base import Compressor
from phalanx.comm.exchange import Exchange


class FixedBuckets(DistributedDataParallel):
    """torch's DDP with buckets that never change: last parameters first, from the first step on.

    Torch begins with a guess and lays its buckets out anew after one step, in the order in which gradients came. What a
    compressor selects depends on what lies in a bucket, and a resumed run must select what it would have selected.
    """

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        torch_compat.rebuild_buckets(self.reducer)

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], sparse[::-1]


class CompressionHook:
    """What DDP calls for each bucket whose gradients are there; it returns a future of their average."""

    def __init__(
        self,
        compressor: Compressor,
        exchange: Exchange,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        device: torch.device,
    ) -> None:
        self.compressor = compressor
        self.exchange = exchange
        self.courier = CommThread("phalanx-compression", device)
        self._names = {id(parameter): name for name, parameter in named_parameters}
        self._device = device

    def take(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hand a bucket to the courier. (Torch insists on the name `bucket`.)"""
        names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        ours = Bucket(bucket.index(), bucket.buffer(), names, tuple(bucket.gradients()))
        if ours.index == 0:  # DDP hands buckets over in order: once a backward pass, errors are raised at its end
            torch_compat.call_after_backward(self.courier.drain)
        on_gpu = self._device.type == "cuda"  # there the future carries the order of the streams on to DDP
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[self._device] if on_gpu else None)
        self.courier.submit(lambda: self._reduce(ours, future))
        return future

    def _reduce(self, bucket: Bucket, future: torch.futures.Future[torch.Tensor]) -> None:
        try:
            self.compressor.reduce(bucket, self.exchange)
        finally:
            # DDP cannot read an error out of a Python future: it gets the bucket, and `drain` the error.
            future.set_result(bucket.flat)


# Torch compares the annotations of a hook with its own types, and with postponed evaluation they are strings.
CompressionHook.take.__annotations__.clear()
