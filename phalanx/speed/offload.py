"""Activation offload: copies saved tensors to CPU memory during forward, and back before backward needs them.

torch's own `save_on_cpu` waits for every copy, moves the weights as well, and moves a tensor once for each operation
that saves it. Here copies run on a separate stream, weights stay, and each tensor moves once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from phalanx import torch_compat

SMALLEST_BYTES = 64 * 1024
"""Smaller tensors stay on the device: a copy has a fixed cost."""

LARGEST_SHARE = 16
"""A tensor stays on the device where its storage is more than this many times larger: all of it would move."""


class HostMemory:
    """Moves what blocks save for backward.

    A block's tensors leave while the next block computes, and come back while that one is in backward. The two blocks
    that ran last are still there when backward begins, and are used as they are.
    """

    def __init__(self, *, with_compiler: bool = False) -> None:
        self._last: weakref.ref[_Block] | None = None
        # torch.compile must not trace these copies. Importing the compiler takes seconds.
        self._untraced: Callable[[Any], Any] = torch.compiler.disable if with_compiler else lambda function: function
        self.block: Callable[[], AbstractContextManager[Any]] = self._untraced(self._block)
        """Returns the context in which what is saved for backward is moved."""

    def _block(self) -> AbstractContextManager[Any]:
        if not torch.is_grad_enabled():
            return nullcontext()
        below = None if self._last is None else self._last()
        if below is not None and below.below is not None:
            below.below.release()
        block = _Block(below)
        self._last = weakref.ref(block)
        return saved_tensors_hooks(self._untraced(block.pack), self._untraced(block.unpack))


class _Block:
    """The saved tensors of one block's forward pass."""

    def __init__(self, below: _Block | None) -> None:
        self.below = below
        self._moved: dict[tuple[Any, int], _OffloadedStorage] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """Start copying a tensor to the host, unless it should stay."""
        if not tensor.is_cuda or _is_weight(tensor):
            return tensor
        piece = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        memory = piece.untyped_storage()
        if piece.nbytes < SMALLEST_BYTES or memory.nbytes() > LARGEST_SHARE * piece.nbytes:
            return tensor
        # The weak reference keeps the key from being reused by another storage at the same address.
        key = (StorageWeakRef(memory), torch_compat.version_of(piece))  # type: ignore[no-untyped-call]
        if key not in self._moved:
            self._moved[key] = _OffloadedStorage(memory)
        return self._moved[key].saved_once_more(), _View(tensor, piece)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return a tensor on the device; start copying those of the block below, whose backward is next."""
        if isinstance(packed, torch.Tensor):
            return packed
        moved, view = packed
        if self.below is not None:
            self.below.fetch()
            self.below = None
        tensor: torch.Tensor = view.of(moved.take())
        return tensor

    def release(self) -> None:
        """Free the device's memory; the copies on the host stay."""
        for moved in self._moved.values():
            moved.release()

    def fetch(self) -> None:
        """Start copying every tensor back."""
        for moved in self._moved.values():
            moved.fetch()


class _OffloadedStorage:
    """A tensor's memory on the host, and on the device until it is released and again from when it is fetched.

    All of the storage, not the tensor alone: its other views need not move, and each keeps its strides, which compiled
    code insists on. Memory is freed only after the compute stream was made to wait for the copy: the host never waits.
    """

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self._device = memory.device
        self._stream = _copy_stream(memory.device)
        self._uses = 0
        self._on_device: torch.Tensor | None = _bytes(memory)
        self._host = torch.empty_like(self._on_device, device="cpu", pin_memory=True)
        self._copying: torch.cuda.Event | None = self._copy(self._on_device, self._host)

    def saved_once_more(self) -> _OffloadedStorage:
        """Count an operation that will need the memory in backward."""
        self._uses += 1
        return self

    def release(self) -> None:
        """Keep the copy on the host only."""
        self._settle()
        self._on_device = None

    def fetch(self) -> None:
        """Start copying the memory back, unless it is on the device."""
        if self._on_device is None:
            self._on_device = torch.empty_like(self._host, device=self._device)
            self._copying = self._copy(self._host, self._on_device)

    def take(self) -> torch.UntypedStorage:
        """Return the memory on the device, for one of the operations that saved it."""
        self.fetch()
        self._settle()
        assert self._on_device is not None, "fetched above"
        memory = self._on_device.untyped_storage()
        self._uses -= 1
        if self._uses <= 0:
            self._on_device = None
        return memory

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = self._stream.record_event()
        return event

    def _settle(self) -> None:
        """Make the compute stream wait for a copy under way."""
        if self._copying is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copying)
            self._copying = None

    def __del__(self) -> None:
        self._settle()  # a graph that is dropped before its backward frees memory as well


class _View:
    """A tensor's offset, shape and strides in its memory, and its placement on the ranks."""

    def __init__(self, tensor: torch.Tensor, piece: torch.Tensor) -> None:
        self._kind: dict[str, Any] = {"dtype": piece.dtype, "device": piece.device}
        self._layout = (piece.storage_offset(), piece.shape, piece.stride())
        self._ranks: dict[str, Any] | None = None
        if isinstance(tensor, DTensor):
            ranks = {"device_mesh": tensor.device_mesh, "placements": tensor.placements}
            self._ranks = {**ranks, "shape": tensor.shape, "stride": tensor.stride()}

    def of(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor in its memory."""
        piece = torch.empty(0, **self._kind).set_(memory, *self._layout)
        return piece if self._ranks is None else DTensor.from_local(piece, run_check=False, **self._ranks)


def _bytes(memory: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _STREAMS[device]


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is a parameter, a view of one, or autocast's copy of one: these stay on the device."""
    base = torch_compat.base_of(tensor)
    if isinstance(base, nn.Parameter):
        return True
    origin = base.grad_fn
    if origin is None or origin.name() != "ToCopyBackward0":
        return False
    source = origin.next_functions[0][0]
    return source is not None and source.name() == "torch::autograd::AccumulateGrad"
