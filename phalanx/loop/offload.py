"""Activations in CPU memory: they leave the device while forward goes on, and are back before backward needs them.

torch's own `save_on_cpu` waits for every copy, moves the weights as well, and moves a tensor once for each operation
that saves it. Here copies run on a stream of their own, weights stay, and each tensor moves once.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALLEST_BYTES = 64 * 1024
"""What is smaller stays: a copy has its price, too."""


class HostMemory:
    """Moves what blocks save for backward. When a block's backward begins, the block before it is fetched."""

    def __init__(self) -> None:
        self._last: weakref.ref[_Block] | None = None

    @contextmanager
    def block(self) -> Iterator[None]:
        """Move what is saved for backward inside this context."""
        if not torch.is_grad_enabled():
            yield
            return
        block = _Block(None if self._last is None else self._last())
        self._last = weakref.ref(block)
        with saved_tensors_hooks(block.pack, block.unpack):
            yield


class _Block:
    """The saved tensors of one block's forward pass."""

    def __init__(self, below: _Block | None) -> None:
        self._below = below
        self._moved: dict[tuple[Any, ...], _Moved] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """Send a tensor to the host, unless it should stay."""
        if not tensor.is_cuda or tensor.nbytes < SMALLEST_BYTES or _is_weight(tensor):
            return tensor
        piece = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # The weak reference keeps the key from being reused by another storage at the same address.
        storage = StorageWeakRef(piece.untyped_storage())  # type: ignore[no-untyped-call]
        key = (storage, piece.storage_offset(), piece.shape, piece.stride(), piece.dtype, piece._version)
        if key not in self._moved:
            self._moved[key] = _Moved(piece)
        return self._moved[key].saved_once_more(), _Layout(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Give a tensor back; meanwhile those of the block below, whose backward is next, are on their way."""
        if isinstance(packed, torch.Tensor):
            return packed
        moved, layout = packed
        if self._below is not None:
            self._below.fetch()
            self._below = None
        tensor: torch.Tensor = layout.restore(moved.take())
        return tensor

    def fetch(self) -> None:
        """Start bringing every tensor back."""
        for moved in self._moved.values():
            moved.fetch()


class _Moved:
    """One tensor on the host, and on the device again from when it is fetched until its last use."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        self._stream = _copy_stream(tensor.device)
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._back: torch.Tensor | None = None
        self._uses = 0
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not given away before the copy is done

    def saved_once_more(self) -> _Moved:
        """Count an operation that will ask for the tensor in backward."""
        self._uses += 1
        return self

    def fetch(self) -> None:
        """Start bringing the tensor back, unless it is there or on its way."""
        if self._back is None:
            with torch.cuda.stream(self._stream):
                self._back = self._host.to(self._device, non_blocking=True)

    def take(self) -> torch.Tensor:
        """Return the tensor on the device, in the order of the work that uses it."""
        self.fetch()
        tensor, here = self._back, torch.cuda.current_stream(self._device)
        assert tensor is not None, "fetched above"
        here.wait_stream(self._stream)
        tensor.record_stream(here)
        self._uses -= 1
        if self._uses <= 0:
            self._back = None
        return tensor


class _Layout:
    """How a tensor lies on the ranks: nothing to say of a plain one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._placed: dict[str, Any] | None = None
        if isinstance(tensor, DTensor):
            self._placed = {
                "device_mesh": tensor.device_mesh,
                "placements": tensor.placements,
                "shape": tensor.shape,
                "stride": tensor.stride(),
            }

    def restore(self, piece: torch.Tensor) -> torch.Tensor:
        """Return the tensor whose piece this is."""
        return piece if self._placed is None else DTensor.from_local(piece, run_check=False, **self._placed)


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _STREAMS[device]


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is a parameter, a view of one, or autocast's copy of one, which is there anyway."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    origin = base.grad_fn
    if origin is None or origin.name() != "ToCopyBackward0":
        return False
    source = origin.next_functions[0][0]
    return source is not None and source.name() == "torch::autograd::AccumulateGrad"
