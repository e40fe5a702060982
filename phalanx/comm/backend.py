"""The backend "phalanx" of torch.distributed: `init_process_group("phalanx")`.

Ranks of one node communicate in shared memory. Everything else (point-to-point messages, other operations, several
nodes, a full /dev/shm) uses a gloo group that belongs to each group, so that what runs on gloo runs here.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo

from phalanx import torch_compat
from phalanx.comm.reduction import find_reduction
from phalanx.comm.shm import SharedGroup, share_memory
from phalanx.comm.shm.pages import text_gatherer
from phalanx.errors import UsageError
from phalanx.torch_compat import AllgatherOptions

_OPERATIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}

_Base: Any = ProcessGroup
"""torch's stubs of this class do not match what Python may override."""


class PhalanxGroup(_Base):  # type: ignore[misc]
    """A process group whose calls return when they are done, with a finished work."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._timeout = timeout
        self._gloo: Any = ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        torch_compat.attach_gloo(self, self._gloo)
        self._shared: SharedGroup | None = None
        self._undecided = True

    def getBackendName(self) -> str:
        """Return the name of this backend."""
        return "phalanx"  # as `register_backend` registers it

    def _path(self, tensor: torch.Tensor) -> SharedGroup | None:
        """Return the shared memory where it can be used for a tensor; None: use gloo."""
        shared = self._memory()
        return shared if tensor.layout is torch.strided and tensor.device.type == "cpu" else None

    def _memory(self) -> SharedGroup | None:
        if self._undecided:  # at the first collective: a group that only sends and receives needs no pages
            self._undecided = False

            def all_gather(gathered: list[torch.Tensor], tensor: torch.Tensor) -> None:
                self._gloo.allgather([gathered], [tensor], AllgatherOptions()).wait()

            gather_text = text_gatherer(all_gather, self.size())
            self._shared = share_memory(gather_text, self.rank(), self.size(), timeout=self._timeout.total_seconds())
        return self._shared

    def _by_gloo(self, call: str) -> Any:
        """Return gloo for a collective, after checking in shared memory that all ranks call the same one."""
        shared = self._memory()
        if shared is not None:
            shared.announce(f"{call} (by gloo)")
        return self._gloo

    def allreduce(self, tensors: list[torch.Tensor] | torch.Tensor, opts: Any = None) -> Any:
        """Combine a tensor over the ranks."""
        opts = opts or dist.AllreduceOptions()
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        op, path = _OPERATIONS.get(_kind(opts)), self._path(tensors[0])
        if path is None or op is None or not _can(op, tensors[0].dtype):
            return self._by_gloo(f"all_reduce {op} of {_described(tensors[0])}").allreduce(tensors, opts)
        for tensor in tensors:
            path.all_reduce(tensor, op)
        return torch_compat.finished_work(tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Combine several tensors over the ranks."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor] | torch.Tensor, opts: Any = None) -> Any:
        """Copy the root's tensor to all ranks."""
        opts = opts or dist.BroadcastOptions()
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        path = self._path(tensors[0])
        if path is None:
            return self._by_gloo(f"broadcast of {_described(tensors[0])}").broadcast(tensors, opts)
        for tensor in tensors:
            path.broadcast(tensor, opts.rootRank)
        return torch_compat.finished_work(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        """Collect the ranks' tensors in a list on every rank."""
        path = self._path(inputs[0])
        if path is None or any(part.shape != inputs[0].shape for part in outputs[0]):
            return self._by_gloo("all_gather").allgather(outputs, inputs, opts or AllgatherOptions())
        for parts, tensor in zip(outputs, inputs, strict=True):
            gathered = tensor.new_empty((len(parts), *tensor.shape))
            path.all_gather(gathered, tensor)
            for part, row in zip(parts, gathered, strict=True):
                part.data.copy_(row)
        return torch_compat.finished_work([part for parts in outputs for part in parts])

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Collect the ranks' tensors in one."""
        path = self._path(tensor)
        if path is None:
            return torch_compat.gloo_all_gather(self._by_gloo("all_gather"), output, tensor, opts)
        path.all_gather(output, tensor)
        return torch_compat.finished_work([output])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Collect several tensors of the ranks, each in one."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor, opts).wait()
        return torch_compat.finished_work(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Combine a tensor over the ranks; each gets its part."""
        opts = opts or dist.ReduceScatterOptions()
        op, path = _OPERATIONS.get(_kind(opts)), self._path(tensor)
        if path is None or op is None or not _can(op, tensor.dtype):
            return torch_compat.gloo_reduce_scatter(self._by_gloo(f"reduce_scatter {op}"), output, tensor, opts)
        path.reduce_scatter(output, tensor, op)
        return torch_compat.finished_work([output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Combine several tensors over the ranks; each gets its parts."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts).wait()
        return torch_compat.finished_work(outputs)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Any:
        """Combine lists of tensors over the ranks; each rank gets its one."""
        if any(part.shape != outputs[0].shape for part in inputs[0]):
            return self._by_gloo("reduce_scatter").reduce_scatter(outputs, inputs, opts or dist.ReduceScatterOptions())
        for output, parts in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, torch.stack([part.data for part in parts]), opts).wait()
        return torch_compat.finished_work(outputs)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, outputs: list[int], inputs: list[int], opts: Any = None
    ) -> Any:
        """Send the r-th part to rank r."""
        path = self._path(tensor)
        if path is None or outputs or inputs:  # parts of different sizes
            options = opts or dist.AllToAllOptions()
            return self._by_gloo("all_to_all").alltoall_base(output, tensor, outputs, inputs, options)
        path.all_to_all(output, tensor)
        return torch_compat.finished_work([output])

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Combine a tensor over the ranks, for one of them."""
        opts = opts or dist.ReduceOptions()
        call = f"reduce {_OPERATIONS.get(_kind(opts))} to {opts.rootRank} of {_described(tensors[0])}"
        return self._by_gloo(call).reduce(tensors, opts)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        """Collect the ranks' tensors on one of them."""
        opts = opts or dist.GatherOptions()
        return self._by_gloo(f"gather to {opts.rootRank} of {_described(inputs[0])}").gather(outputs, inputs, opts)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Any:
        """Send each rank its tensor, from one of them."""
        opts = opts or dist.ScatterOptions()
        return self._by_gloo(f"scatter from {opts.rootRank} of {_described(outputs[0])}").scatter(outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        shared = self._memory()
        if shared is None:
            return self._gloo.barrier(opts or dist.BarrierOptions())
        shared.barrier()
        return torch_compat.finished_work([])

    def shutdown(self) -> None:
        """Release the shared memory."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    # The names of these methods before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _kind(opts: Any) -> Any:
    """Return the operation of an options object, which torch may wrap."""
    return getattr(opts.reduceOp, "op", opts.reduceOp)


@functools.cache
def _can(op: str, dtype: torch.dtype) -> bool:
    """Whether an operation of Phalanx is defined for a dtype; otherwise gloo decides."""
    try:
        find_reduction(op, dtype)
    except UsageError:
        return False
    return True
