"""Which rank writes which part of the state, and where in its file; planned once, and again when the state changes.

torch.distributed.checkpoint plans (it knows every kind of sharded tensor, and splits replicated ones between ranks).
Each rank's file is laid out here: a safetensors header, then the raw tensors without gaps. `Staging` copies the state
into host memory that is reused between saves: training waits only for this copy.
"""

from __future__ import annotations

import json
import math
import mmap
import secrets
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from phalanx import torch_compat
from phalanx.checkpoint import collectives
from phalanx.checkpoint.hashed_files import LEAF_BYTES
from phalanx.checkpoint.index import Index, Part, StoredTensor

FULL = "state.safetensors"
_HEADER_ALIGN = 4096
_SMALL_BYTES = 4096
_SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def shard_name(rank: int) -> str:
    """Return the name of a rank's data file."""
    return f"shard-{rank:05d}.safetensors"


class Extent(NamedTuple):
    """A box of a tensor, and its place in the file."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    whole: bool
    start: int = 0
    item: WriteItem | None = None

    @property
    def bytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.sizes) * self.dtype.itemsize


class FileLayout(NamedTuple):
    """The content of a data file."""

    header: bytes
    pieces: list[Extent]
    size: int

    def cuts(self) -> list[tuple[int, int]]:
        """Return (start, size) of leaves that begin with a tensor, so that an unchanged tensor has unchanged leaves."""
        ranges: list[tuple[int, int]] = [(0, len(self.header))]
        open_run = False
        for piece in self.pieces:
            small = piece.bytes < _SMALL_BYTES
            if open_run and small and ranges[-1][1] + piece.bytes <= LEAF_BYTES:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + piece.bytes)
                continue
            ends = piece.start + piece.bytes
            ranges += [(at, min(LEAF_BYTES, ends - at)) for at in range(piece.start, ends, LEAF_BYTES)]
            open_run = (small and piece.bytes > 0) or (open_run and piece.bytes == 0)
        return ranges


def lay_out(pieces: Iterable[Extent]) -> FileLayout:
    """Order pieces so that each is aligned to its element size, and write the header."""
    ordered = sorted(pieces, key=lambda piece: (-piece.dtype.itemsize, piece.bytes < _SMALL_BYTES))
    entries: dict[str, Any] = {}
    start = 0
    for piece in ordered:
        label = piece.name if piece.whole else f"{piece.name}@{','.join(map(str, piece.offsets))}"
        type_name = _SAFETENSORS.get(piece.dtype)
        shape = list(piece.sizes) if type_name else [piece.bytes]
        entries[label] = {"dtype": type_name or "U8", "shape": shape, "data_offsets": [start, start + piece.bytes]}
        start += piece.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // _HEADER_ALIGN) * _HEADER_ALIGN
    header = (length - 8).to_bytes(8, "little") + text.ljust(length - 8)
    placed, at = [], length
    for piece in ordered:
        placed.append(piece._replace(start=at))
        at += piece.bytes
    return FileLayout(header, placed, at)


def _pieces(plan: SavePlan) -> list[Extent]:
    pieces = []
    for item in plan.items:
        if (data := item.tensor_data) is not None:
            whole = data.chunk.sizes == data.size
            box = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            pieces.append(Extent(item.index.fqn, *box, data.properties.dtype, whole, item=item))
    return pieces


class StatePlan:
    """The plan of all ranks for one shape of state."""

    def __init__(self) -> None:
        self._planner = dcp.DefaultSavePlanner()
        self._signature: list[Any] | None = None
        self.layout = FileLayout(b"", [], 0)
        self.objects: list[WriteItem] = []
        self.index: Index | None = None
        """On rank 0: the index of all ranks' files, without the hashes."""
        self._series, self._count = "", 0

    def update(self, tensors: dict[str, Any]) -> str:
        """Take a new state, plan where any rank's has changed, and return a name for the save, equal on all ranks.

        Collective with a process group: one number, where nothing has changed.
        """
        changed = collectives.tried(lambda: self._take(tensors))
        if collectives.largest(int(changed is not False)):
            for one in collectives.gather_to_all(changed):
                collectives.unwrapped(one)
            self._make()
            self._series = collectives.from_rank_zero(lambda: secrets.token_hex(8))
        self._count += 1
        return f"{self._series}-{self._count}"

    def own_part(self, rank: int) -> Index:
        """Return the index of this rank's file alone, without the hashes."""
        tensors: dict[str, StoredTensor] = {}
        for piece in self.layout.pieces:
            assert piece.item is not None, "planned"
            assert piece.item.tensor_data is not None, "a tensor"
            shape, dtype = tuple(piece.item.tensor_data.size), str(piece.dtype).removeprefix("torch.")
            stored = tensors.setdefault(piece.name, StoredTensor(shape, dtype, []))
            stored.parts.append(Part(piece.offsets, piece.sizes, shard_name(rank), piece.start))
        return Index(tensors, {item.index.fqn: rank for item in self.objects})

    def _take(self, tensors: dict[str, Any]) -> bool:
        self._planner.set_up_planner(tensors, None, is_coordinator=collectives.rank() == 0)
        self._shapes = [_shape_of(name, value) for name, value in self._planner.state_dict.items()]
        return self._shapes != self._signature

    def _make(self) -> None:
        self._signature = None
        plans = collectives.gather_to_zero(collectives.tried(self._planner.create_local_plan))
        mine: SavePlan = collectives.scatter_from_zero(
            lambda: self._planned([collectives.unwrapped(plan) for plan in plans])
        )
        self._planner.finish_plan(mine)
        self.layout = lay_out(_pieces(mine))
        self.objects = [item for item in mine.items if item.tensor_data is None]
        self._signature = self._shapes

    def _planned(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = self._planner.create_global_plan(plans)
        tensors: dict[str, StoredTensor] = {}
        for rank, plan in enumerate(plans):
            for piece in lay_out(_pieces(plan)).pieces:
                shape = tuple(metadata.state_dict_metadata[piece.name].size)  # type: ignore[union-attr]
                stored = tensors.setdefault(
                    piece.name, StoredTensor(shape, str(piece.dtype).removeprefix("torch."), [])
                )
                stored.parts.append(Part(piece.offsets, piece.sizes, shard_name(rank), piece.start))
        objects = {i.index.fqn: rank for rank, plan in enumerate(plans) for i in plan.items if i.tensor_data is None}
        ordered = {name: tensors[name] for name in metadata.state_dict_metadata if name in tensors}
        self.index = Index(ordered, objects)
        return plans

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of this rank's pieces, in the order of the layout."""
        tensors_here = (
            self._planner.lookup_object(piece.item.index) for piece in self.layout.pieces if piece.item is not None
        )
        return [tensor.detach() for tensor in tensors_here]

    def values(self) -> dict[str, Any]:
        """Return the values of this rank's part that are not tensors, by name."""
        return {item.index.fqn: self._planner.lookup_object(item.index) for item in self.objects}

    def forget(self) -> None:
        """Drop the references to the state."""
        self._planner.state_dict = {}


def _shape_of(name: str, value: Any) -> Any:
    if isinstance(value, DTensor):
        return name, value.shape, value.dtype, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor):
        return name, type(value), value.shape, value.dtype, value.device
    return name


def full_layout(index: Index) -> FileLayout:
    """Return the layout of one file with every tensor whole."""
    pieces = (
        Extent(name, (0,) * len(tensor.shape), tensor.shape, tensor.torch_dtype, whole=True)
        for name, tensor in index.tensors.items()
    )
    return lay_out(pieces)


def model_tensors(index: Index) -> dict[str, StoredTensor]:
    """Return the tensors under "model" by canonical name; names of other models begin with "model1."."""
    of_models = {
        n: tensor for n, tensor in index.tensors.items() if n.partition(".")[0].rstrip("0123456789") == "model"
    }
    return {name.removeprefix("model."): tensor for name, tensor in of_models.items() if "." in name}


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
            non_blocking = all(tensor.device.type in ("cpu", "cuda") for tensor in tensors)
            torch_compat.foreach_copy_(self._targets, tensors, non_blocking=non_blocking)
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
