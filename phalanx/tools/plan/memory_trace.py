"""What a step allocates and communicates: every storage by kind and by module, every collective by group and size.

`Recorder` is a dispatch mode. It sees each operation on plain tensors (under DTensors and FSDP too), and counts the
bytes of storages from their first appearance until they are freed. It works on tensors without memory as on real ones.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx import torch_compat, torch_fakes
from phalanx.observe.format import size as size_text
from phalanx.strategies.base import local
from phalanx.torch_compat import pytree

_FSDP = "fsdp"
"""The name space of fully_shard's operations in torch.ops."""
KINDS = ("parameters", "gradients", "optimizer", "activations", "communication", "workspace")
"""Activations: made by a forward pass; workspace: by backward and by the optimizer, and not one of the others."""

_COLLECTIVES = {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    "send": "send",
    "recv": "receive",
}
"""Names of operators, without prefixes and endings, and those of collectives."""


class Collective(NamedTuple):
    """One kind of call: the operation, its group, and the bytes of the whole message (the larger side)."""

    op: str
    ranks: tuple[int, ...]
    bytes: int


@dataclass
class _Held:
    """A storage that is alive."""

    unit: str
    kind: str
    bytes: int


class Recorder(torch_fakes.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that appear inside, and the collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit = "model"
        """The part of the model that runs now."""
        self.depth = 0
        self.collectives: Counter[Collective] = Counter()
        self.total = 0
        self.peak = 0
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._at_peak: dict[tuple[str, str], int] = {}
        self._held: dict[int, _Held] = {}
        self._waiting: dict[nn.Parameter, str] = {}
        self._watched: set[nn.Parameter] = set()

    @property
    def at_peak(self) -> dict[tuple[str, str], int]:
        """The bytes by (unit, kind) when most were held."""
        return {key: size for key, size in self._at_peak.items() if size}

    def restart(self) -> None:
        """Forget the collectives and the peak: what is held now is the first one."""
        self.collectives = Counter()
        self.peak = 0
        self._note_peak()

    def mark(self, tensors: Iterable[Tensor | None], kind: str, unit: str | None = None) -> None:
        """Set the kind of storages that are held."""
        for tensor in tensors:
            held = None if tensor is None else self._find(local(tensor))
            if held is not None:
                self._move(held, kind, unit)

    def mark_all(self, kind: str, unit: str) -> None:
        """Set the kind of everything that is held."""
        for held in self._held.values():
            self._move(held, kind, unit)

    def _move(self, held: _Held, kind: str, unit: str | None) -> None:
        self._bytes[held.unit, held.kind] -= held.bytes
        held.kind, held.unit = kind, held.unit if unit is None else unit
        self._bytes[held.unit, held.kind] += held.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) or kind.__name__ == "AsyncCollectiveTensor" for kind in types):
            return NotImplemented  # their own operations come here later
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._find(leaf)
        space, _, name = func.name().partition("::")
        if space in ("c10d", "_c10d_functional") and "wait" not in name:
            self._collective(name, args, result)
        elif name == "_to_copy" and self._is_gradient(args[0]):  # fsdp adds them up in fp32
            self._count_as(result, "gradients")
        elif space == _FSDP:  # gathered parameters, and gradients before they are reduced
            self._count_as((args, kwargs, result), "communication")
        return result

    def _collective(self, name: str, args: Any, result: Any) -> None:
        plain = name.partition(".")[0].strip("_").removesuffix("_base")
        op = next((title for start, title in _COLLECTIVES.items() if plain.startswith(start)), None)
        if op is None:
            return
        self._take_gradients()
        if op == "reduce-scatter":  # by fsdp: its output is the gradient's shard
            self.mark(_tensors(args[0]), "gradients")
        elif op == "all-reduce" and plain != name:  # what fsdp has reduced already, between groups of ranks
            self._count_as(args[0], "gradients")
        elif op in ("all-gather", "receive") and plain != name:
            self._count_as(args[0], "communication")
        ranks = next((found for arg in args if (found := torch_fakes.group_ranks(arg)) is not None), [])
        size = max(sum(_nbytes(tensor) for tensor in _tensors(part)) for part in (*args, result))
        self.collectives[Collective(op, tuple(ranks), size)] += 1

    def _count_as(self, values: Any, kind: str) -> None:
        """Set the kind of what has none of its own: an operation may also read parameters."""
        held = (self._find(tensor) for tensor in _tensors(values))
        for one in (one for one in held if one is not None and one.kind in ("activations", "workspace")):
            self._move(one, kind, None)

    def _is_gradient(self, tensor: Tensor) -> bool:
        held = self._find(tensor)
        return held is not None and held.kind == "gradients"

    def _take_gradients(self) -> None:
        """Attribute gradients that have been set since to their parameters: fsdp sets them without a hook."""
        for parameter, unit in list(self._waiting.items()):
            if parameter.grad is not None:
                self.mark([parameter.grad], "gradients", unit)
                del self._waiting[parameter]

    def _find(self, tensor: Tensor) -> _Held | None:
        """Return the entry of a tensor's storage, a new one where it is not known."""
        if tensor.device.type == "meta" or isinstance(tensor, DTensor):
            return None
        storage = tensor.untyped_storage()
        key = id(storage)
        held = self._held.get(key)
        if held is None:
            in_backward = torch_compat.backward_pass_id() != -1 and not self.depth
            kind = "workspace" if in_backward or self.unit == "optimizer" else "activations"
            held = self._held[key] = _Held("backward" if in_backward else self.unit, kind, storage.nbytes())
            self._add(held, held.bytes)
            weakref.finalize(storage, self._free, key)
        elif held.bytes != storage.nbytes():  # fsdp frees and allocates by resizing
            self._resize(held, storage.nbytes())
        return held

    def _resize(self, held: _Held, size: int) -> None:
        self._add(held, size - held.bytes)
        held.bytes = size

    def _free(self, key: int) -> None:
        held = self._held.pop(key)
        self._add(held, -held.bytes)

    def _add(self, held: _Held, size: int) -> None:
        self.total += size
        self._bytes[held.unit, held.kind] += size
        if size > 0:
            self._note_peak()

    def _note_peak(self) -> None:
        if self.total > self.peak:
            self.peak, self._at_peak = self.total, dict(self._bytes)

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """See storages that are resized in place, which no operation reports."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            found = original(storage, size)
            held = self._held.get(id(storage))
            if held is not None:
                self._resize(held, storage.nbytes())
            return found

        kind: Any = torch.UntypedStorage
        kind.resize_ = resize
        try:
            yield
        finally:
            kind.resize_ = original

    def watch(self, units: Mapping[nn.Module, str], named: Mapping[str, list[nn.Parameter]]) -> Callable[[], None]:
        """Attribute what forward passes of modules allocate to their names, and gradients to parameters.

        Returns what ends it.
        """
        handles: list[Any] = []
        for module, name in units.items():
            enter, leave = self._visit(name)
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
        for unit, parameters in named.items():
            self._waiting.update(dict.fromkeys(parameters, unit))
            self._adopt(unit, parameters)

        def stop() -> None:
            for handle in handles:
                handle.remove()

        return stop

    def _adopt(self, unit: str, parameters: Iterable[nn.Parameter]) -> None:
        """Attribute the gradients of parameters; those that fsdp gathers are other objects than its shards."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._watched:
                self._watched.add(parameter)
                take = partial(self._take_gradient, unit)
                parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def _take_gradient(self, unit: str, parameter: Tensor) -> None:
        self.mark([parameter.grad], "gradients", unit)

    def _visit(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        before: list[str] = []

        def enter(module: nn.Module, _: Any) -> None:
            self._adopt(name, module.parameters())
            before.append(self.unit)
            self.unit = name
            self.depth += 1

        def leave(*_: Any) -> None:
            self.unit = before.pop()
            self.depth -= 1

        return enter, leave


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind in a step of one rank."""

    op: str
    axis: str
    ranks: int
    bytes: int
    """The whole message: what an all-gather returns, what a reduce-scatter takes."""
    count: float

    @property
    def total(self) -> float:
        """Bytes of all calls."""
        return self.bytes * self.count


@dataclass(frozen=True)
class FakeRank:
    """What one kind of rank holds and sends."""

    kind: str
    rank: int
    peak_bytes: int
    memory: dict[str, dict[str, int]]
    """Part of the model to bytes by kind (`KINDS`), when most was held."""
    collectives: tuple[Sent, ...]
    seconds: float

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind at the peak."""
        return {kind: sum(parts.get(kind, 0) for parts in self.memory.values()) for kind in KINDS}


@dataclass(frozen=True)
class DryRun:
    """The ranks that were tried, and what was assumed."""

    world_size: int
    mesh: dict[str, int]
    ranks: tuple[FakeRank, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def peak_bytes(self) -> int:
        """Bytes of the rank that holds the most."""
        return max(rank.peak_bytes for rank in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        ranks = [
            {
                **{name: getattr(rank, name) for name in ("kind", "rank", "peak_bytes", "memory", "seconds")},
                "by_kind": rank.by_kind(),
                "collectives": [{**vars(sent), "total": sent.total} for sent in rank.collectives],
            }
            for rank in self.ranks
        ]
        return {"world_size": self.world_size, "mesh": self.mesh, "ranks": ranks, "notes": list(self.notes)}

    def text(self) -> str:
        """Return the result for a terminal."""
        axes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1) or "one rank"
        lines = [f"dry run: {self.world_size} ranks ({axes}) start, and each kind takes a step"]
        for rank in self.ranks:
            lines += _rank_lines(rank)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _rank_lines(rank: FakeRank) -> Iterator[str]:
    yield f"{rank.kind} (rank {rank.rank}): peak {size_text(rank.peak_bytes)} ({rank.seconds:.0f} s)"
    for kind, size in rank.by_kind().items():
        yield f"  {kind:<16}{size_text(size):>12}"
    yield f"  {'by module':<24}" + "".join(f"{kind:>15}" for kind in KINDS)
    for unit, parts in rank.memory.items():
        yield f"  {unit:<24}" + "".join(f"{size_text(parts[kind]) if kind in parts else '-':>15}" for kind in KINDS)
    yield "  per step:"
    for sent in rank.collectives:
        yield (
            f"  {sent.count:>8g} x {sent.op:<15}{size_text(sent.bytes):>12}  over {sent.axis} ({sent.ranks} ranks), "
            f"{size_text(round(sent.total))} in all"
        )
