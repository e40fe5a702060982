"""Which shard holds which part of the parameters: the largest first, each on the shard with the least load so far.

It depends on names and sizes only, so every rank computes the same placement.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from phalanx.engines.parameter_server.protocol import name_of
from phalanx.errors import UsageError

_BY_ELEMENT = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.SparseAdam,
)
"""Optimizers whose update of an element depends on that element only, so a parameter may be cut between its rows."""
_GRAINS = 4
"""The least number of pieces of a shard's share where one parameter is larger than it."""


@dataclass(frozen=True)
class Piece:
    """Some rows of one parameter, or all of it: the unit that is placed on a shard."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    group: int = 0
    """Which of the optimizer's parameter groups it belongs to."""
    start: int = 0
    """Its first row in the parameter."""
    lazy: bool = False
    """Whether an update leaves rows without a gradient unchanged, so that only changed rows are sent back."""

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.itemsize

    @property
    def stop(self) -> int:
        """The row of the parameter after its last one."""
        return self.start + (self.shape[0] if self.shape else 1)

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the piece."""
        return self.name, self.start


@dataclass(frozen=True)
class Placement:
    """The pieces of every shard; in each shard those that are sent whole come first."""

    shards: tuple[tuple[Piece, ...], ...]

    @property
    def loads(self) -> list[int]:
        """Bytes on each shard."""
        return [sum(piece.nbytes for piece in shard) for shard in self.shards]

    def digest(self, shard: int) -> str:
        """Return a hash by which a worker and a shard check that they have the same pieces in the same order."""
        return digest_of(self.shards[shard])


def digest_of(pieces: Sequence[Piece]) -> str:
    """Return a hash of these pieces in this order."""
    text = json.dumps([asdict(piece) for piece in pieces], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def piece_from(data: Mapping[str, Any]) -> Piece:
    """Rebuild a piece from JSON data."""
    return Piece(**{**data, "shape": tuple(data["shape"])})


def spread(
    tensors: Sequence[Piece], shards: int, *, cut: bool = True, costs: Mapping[str, float] | None = None
) -> Placement:
    """Spread parameters over shards by bytes, or by measured `costs` per name; `cut`: large ones between rows."""
    pieces = _cut_large(tensors, shards, costs) if cut else list(tensors)
    if len(pieces) < shards:
        raise UsageError(
            f"num_servers = {shards}, but the model has only {len(pieces)} pieces to spread over them",
            hint=f"Write num_servers = {max(1, len(pieces))}, or fewer.",
        )
    placed: list[list[Piece]] = [[] for _ in range(shards)]
    loads = [0.0] * shards
    for piece in sorted(pieces, key=lambda piece: (-_cost(piece, tensors, costs), piece.key)):
        least = min(range(shards), key=lambda shard: (loads[shard], len(placed[shard])))
        placed[least].append(piece)
        loads[least] += _cost(piece, tensors, costs)
    return _ordered(placed)


def rebalance(placement: Placement, shards: int, *, costs: Mapping[tuple[str, int], float] | None = None) -> Placement:
    """Return a balanced placement over `shards` shards that moves few pieces; `costs` per piece key, else bytes."""

    def cost(piece: Piece) -> float:
        return float(piece.nbytes if costs is None else costs[piece.key])

    placed = [list(shard) for shard in placement.shards[:shards]] + [[] for _ in range(shards - len(placement.shards))]
    unplaced = [piece for shard in placement.shards[shards:] for piece in shard]
    for piece in sorted(unplaced, key=lambda piece: (-cost(piece), piece.key)):
        min(placed, key=lambda shard: sum(map(cost, shard))).append(piece)
    while True:
        full = max(placed, key=lambda shard: sum(map(cost, shard)))
        least = min(placed, key=lambda shard: (sum(map(cost, shard)), len(shard)))
        gap = sum(map(cost, full)) - sum(map(cost, least))
        # A piece that costs less than the gap reduces the larger load; half of the gap is best.
        movable = [piece for piece in full if 0 < cost(piece) < gap and len(full) > 1]
        if not movable:
            return _ordered(placed)
        moving = min(movable, key=lambda piece: (abs(cost(piece) - gap / 2), piece.key))
        full.remove(moving)
        least.append(moving)


def _cut_large(tensors: Sequence[Piece], shards: int, costs: Mapping[str, float] | None) -> list[Piece]:
    """Cut what is larger than 1/_GRAINS of a shard's share: the loads then differ by at most that."""
    limit = sum(_cost(tensor, tensors, costs) for tensor in tensors) / shards / _GRAINS
    pieces: list[Piece] = []
    for tensor in tensors:
        rows = tensor.shape[0] if tensor.shape else 1
        parts = min(rows, math.ceil(_cost(tensor, tensors, costs) / limit)) if limit and shards > 1 else 1
        bounds = [rows * part // max(1, parts) for part in range(max(1, parts) + 1)]
        for start, stop in itertools.pairwise(bounds):
            shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
            pieces.append(replace(tensor, shape=shape, start=start))
    return pieces


def _cost(piece: Piece, tensors: Sequence[Piece], costs: Mapping[str, float] | None) -> float:
    """Return a piece's bytes, or its share of the cost measured for the whole parameter."""
    if costs is None:
        return float(piece.nbytes)
    whole = next(tensor for tensor in tensors if tensor.name == piece.name)
    return costs[piece.name] * piece.nbytes / whole.nbytes if whole.nbytes else 0.0


def _ordered(placed: Sequence[Sequence[Piece]]) -> Placement:
    return Placement(tuple(tuple(sorted(shard, key=lambda piece: (piece.lazy, piece.key))) for shard in placed))


def works_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether parameters may be cut; a subclass may use the whole parameter, so only exact classes count."""
    return type(optimizer) in _BY_ELEMENT


def leaves_untouched_rows(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether a sparse gradient changes the rows that it names and no others."""
    if type(optimizer) in (torch.optim.SparseAdam, torch.optim.Adagrad):
        return not group.get("weight_decay")
    return type(optimizer) is torch.optim.SGD and not group["momentum"] and not group["weight_decay"]


def plan_placement(model: nn.Module, optimizer: torch.optim.Optimizer, num_servers: int) -> Placement:
    """Spread the parameters of a model that an optimizer trains over shards."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    sparse = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    pieces = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise UsageError("the optimizer trains a parameter that the model does not have")
            if parameter.requires_grad:
                lazy = id(parameter) in sparse and leaves_untouched_rows(optimizer, group)
                shape, dtype = tuple(parameter.shape), parameter.dtype
                pieces.append(Piece(names[id(parameter)], shape, name_of(dtype), dtype.itemsize, number, lazy=lazy))
    return spread(pieces, num_servers, cut=works_by_element(optimizer))
