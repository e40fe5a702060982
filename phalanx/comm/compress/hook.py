"""Compression under torch's DDP: a comm hook that reduces each bucket in a communication thread.

Its collectives and those of the main thread run at the same time and must not mix, so the thread has a separate group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from phalanx import torch_compat
from phalanx.comm.comm_thread import CommThread
from phalanx.comm.compress import Compressor
from phalanx.comm.exchange import Bucket, Exchange


class FixedBuckets(DistributedDataParallel):
    """torch's DDP with buckets that never change: last parameters first, from the first step on.

    torch changes the layout after the first step. What a compressor selects depends on the layout, and a resumed run
    must select the same.
    """

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        torch_compat.rebuild_buckets(self.reducer)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        torch_compat.rebuild_buckets(self.reducer)

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], sparse[::-1]


class CompressionHook:
    """The comm hook, which DDP calls for each complete bucket; it returns a future of the average."""

    def __init__(
        self,
        compressor: Compressor,
        exchange: Exchange,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        device: torch.device,
    ) -> None:
        self.compressor = compressor
        self.exchange = exchange
        self.comm_thread = CommThread("phalanx-compression", device)
        self._names = {id(parameter): name for name, parameter in named_parameters}
        self._device = device

    def take(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Submit a bucket to the communication thread. (torch requires the name `bucket`.)"""
        names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        gradients = Bucket(bucket.index(), bucket.buffer(), names, tuple(bucket.gradients()))
        if gradients.index == 0:  # the first bucket of a backward pass: raise errors at its end
            torch_compat.call_after_backward(self.comm_thread.drain)
        on_gpu = self._device.type == "cuda"  # there the future synchronises the streams
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[self._device] if on_gpu else None)

        def reduce() -> None:
            try:
                self.compressor.reduce(gradients, self.exchange)
            finally:
                # DDP cannot read an error from a Python future: it gets the bucket, and `drain` raises the error.
                future.set_result(gradients.flat)

        self.comm_thread.submit(reduce)
        return future


# torch compares the annotations of a hook with its types; with postponed evaluation they are strings.
CompressionHook.take.__annotations__.clear()
