"""Copy a rank's state into host memory that is reused between saves: training waits only for this copy."""

from __future__ import annotations

import mmap
import threading
from typing import Any

import torch

from phalanx import torch_compat
from phalanx.checkpoint.layout import FileLayout


class Staging:
    """Host memory with the bytes of a rank's data file, page-locked where the state is on a GPU."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._bytes: torch.Tensor | None = None
        self._pinned = False
        self._warming: threading.Thread | None = None
        self._layout: FileLayout | None = None
        self._targets: list[torch.Tensor] = []

    def warm(self, size: int, *, pinned: bool) -> None:
        """Get memory in the background, before the first save: new pages and page-locking take seconds."""
        self._warming = threading.Thread(target=self._reserve, args=(size,), kwargs={"pinned": pinned}, daemon=True)
        self._warming.start()

    def fill(self, layout: FileLayout, tensors: list[torch.Tensor]) -> None:
        """Copy the tensors to their places in the file; returns when the state may change again."""
        self._settle()
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        if layout is not self._layout:
            self._prepare(layout, pinned=bool(devices))
        if tensors:
            known = all(tensor.device.type in ("cpu", "cuda") for tensor in tensors)
            torch_compat.foreach_copy_(self._targets, tensors, non_blocking=known)
        for device in devices:
            torch.cuda.synchronize(device)

    def view(self) -> memoryview:
        """Return the bytes of the file."""
        assert self._memory is not None, "after fill"
        assert self._layout is not None
        return memoryview(self._memory)[: self._layout.size]

    def _prepare(self, layout: FileLayout, *, pinned: bool) -> None:
        if self._bytes is None or self._bytes.numel() < layout.size or (pinned and not self._pinned):
            self._free()
            self._reserve(layout.size, pinned=pinned)
        assert self._memory is not None
        assert self._bytes is not None
        self._memory[: len(layout.header)] = layout.header
        self._layout = layout
        self._targets = [_target(self._bytes, piece) for piece in layout.pieces]

    def _reserve(self, size: int, *, pinned: bool) -> None:
        # Not torch's allocator: it rounds page-locked memory up to a power of two.
        self._memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(self._memory, dtype=torch.uint8).zero_()
        self._pinned = pinned and _registered(memory)
        self._bytes = memory

    def release(self) -> None:
        """Give the memory back."""
        self._settle()
        self._free()

    def _settle(self) -> None:
        if self._warming is not None:
            self._warming.join()
            self._warming = None

    def _free(self) -> None:
        if self._pinned and self._bytes is not None:
            torch_compat.cuda_runtime().cudaHostUnregister(self._bytes.data_ptr())
        self._memory, self._bytes, self._layout, self._targets, self._pinned = None, None, None, [], False


def _target(memory: torch.Tensor, piece: Any) -> torch.Tensor:
    return memory[piece.start : piece.start + piece.bytes].view(piece.dtype).view(piece.sizes)


def _registered(memory: torch.Tensor) -> bool:
    """Page-lock memory; without it (a limit of the system) copies are slower, and correct."""
    return int(torch_compat.cuda_runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0
