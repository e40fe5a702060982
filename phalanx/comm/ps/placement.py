"""Which shard holds which part of the parameters: the largest first, each on the shard that has least so far.

Pure arithmetic over names and sizes, so every rank computes the same placement.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.comm.ps.bundle import VALUE, Bundle, name_of
from phalanx.comm.ps.state import leaves_untouched_rows, works_by_element
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from phalanx.comm.ps.client import ParameterClient


_GRAINS = 4
"""Into how many pieces at least a shard's share falls where one parameter is larger than it."""


@dataclass(frozen=True)
class Piece:
    """Some rows of one parameter, or all of it: what moves as a whole."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    group: int = 0
    """Which of the optimizer's parameter groups it belongs to."""
    start: int = 0
    """Its first row in the parameter."""
    lazy: bool = False
    """Whether an update leaves untouched rows as they are, so that only changed rows need to travel back."""

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
        """What tells it from every other piece."""
        return self.name, self.start


@dataclass(frozen=True)
class Placement:
    """The pieces of every shard. Within a shard those that travel whole come first, side by side."""

    shards: tuple[tuple[Piece, ...], ...]

    @property
    def loads(self) -> list[int]:
        """Bytes on each shard."""
        return [sum(piece.nbytes for piece in shard) for shard in self.shards]

    def digest(self, shard: int) -> str:
        """Return a mark by which a worker and a shard can tell that they mean the same pieces in the same order."""
        return digest_of(self.shards[shard])


def digest_of(pieces: Sequence[Piece]) -> str:
    """Return a mark of these pieces in this order."""
    text = json.dumps([asdict(piece) for piece in pieces], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def piece_from(data: Mapping[str, Any]) -> Piece:
    """Rebuild a piece from plain data, as JSON brings it."""
    return Piece(**{**data, "shape": tuple(data["shape"])})


def spread(
    tensors: Sequence[Piece], shards: int, *, cut: bool = True, costs: Mapping[str, float] | None = None
) -> Placement:
    """Spread whole parameters over shards; `cut`: large ones may be cut between rows.

    `costs`: measured work of each parameter by name, where it is not in proportion to its bytes.
    """
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
    """Return a placement over `shards` shards that is even again and leaves as much as possible where it is.

    `costs`: measured work of each piece by its key; without them bytes count.
    """

    def cost(piece: Piece) -> float:
        return float(piece.nbytes if costs is None else costs[piece.key])

    placed = [list(shard) for shard in placement.shards[:shards]] + [[] for _ in range(shards - len(placement.shards))]
    homeless = [piece for shard in placement.shards[shards:] for piece in shard]
    for piece in sorted(homeless, key=lambda piece: (-cost(piece), piece.key)):
        min(placed, key=lambda shard: sum(map(cost, shard))).append(piece)
    while True:
        full = max(placed, key=lambda shard: sum(map(cost, shard)))
        least = min(placed, key=lambda shard: (sum(map(cost, shard)), len(shard)))
        gap = sum(map(cost, full)) - sum(map(cost, least))
        # A piece helps if it weighs less than the gap: then the larger load falls. Half of the gap is best.
        movable = [piece for piece in full if 0 < cost(piece) < gap and len(full) > 1]
        if not movable:
            return _ordered(placed)
        moving = min(movable, key=lambda piece: (abs(cost(piece) - gap / 2), piece.key))
        full.remove(moving)
        least.append(moving)


def _cut_large(tensors: Sequence[Piece], shards: int, costs: Mapping[str, float] | None) -> list[Piece]:
    """Cut what is larger than a quarter of a shard's fair share: the loads then differ by no more than that."""
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
    """Return a piece's work: its bytes, or its share of what was measured for the whole parameter."""
    if costs is None:
        return float(piece.nbytes)
    whole = next(tensor for tensor in tensors if tensor.name == piece.name)
    return costs[piece.name] * piece.nbytes / whole.nbytes if whole.nbytes else 0.0


def _ordered(placed: Sequence[Sequence[Piece]]) -> Placement:
    return Placement(tuple(tuple(sorted(shard, key=lambda piece: (piece.lazy, piece.key))) for shard in placed))


_UNEVEN = 1.25
"""How much more than the mean a shard may bear before pieces move."""
_WORTH_MOVING = 0.9
"""What the busiest shard must come down to for a move to be worth its bytes."""


def plan_placement(model: nn.Module, optimizer: torch.optim.Optimizer, num_servers: int) -> Placement:
    """Spread what an optimizer trains of a model over shards."""
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


def better_placement(client: ParameterClient) -> Placement | None:
    """Return a placement that evens out what the shards have moved, or None where they are even enough."""
    costs = client.costs()
    loads = [sum(costs[piece.key] for piece in shard) for shard in client.placement.shards]
    if max(loads) <= _UNEVEN * sum(loads) / len(loads):
        return None
    better = rebalance(client.placement, len(loads), costs=costs)
    evened = [sum(costs[piece.key] for piece in shard) for shard in better.shards]
    return better if max(evened) < _WORTH_MOVING * max(loads) else None


def move(source: ParameterClient, target: ParameterClient) -> None:
    """Carry values and optimizer states from one set of shards to another, of any number and placement.

    This is how shards are added, removed or re-balanced: at a moment when no worker has a step under way.
    """
    target.load(source.fetch())


def join_pieces(placement: Placement, bundles: Sequence[Bundle]) -> dict[str, dict[str, Any]]:
    """Put the rows of each parameter together again; what has no rows (a count of steps) is that of the first piece."""
    rows: dict[str, dict[str, list[tuple[int, torch.Tensor]]]] = defaultdict(lambda: defaultdict(list))
    joined: dict[str, dict[str, Any]] = defaultdict(dict)
    for pieces, bundle in zip(placement.shards, bundles, strict=True):
        for (index, key), value in {**bundle.tensors, **bundle.plain}.items():
            piece = pieces[index]
            if isinstance(value, torch.Tensor) and tuple(value.shape) == piece.shape and piece.shape:
                rows[piece.name][key].append((piece.start, value))
            elif piece.start == 0:
                joined[piece.name][key] = value
    for name, keys in rows.items():
        for key, parts in keys.items():
            ordered = [value for _, value in sorted(parts, key=lambda part: part[0])]
            joined[name][key] = ordered[0] if len(ordered) == 1 else torch.cat(ordered)
    return dict(joined)


def split_pieces(placement: Placement, state: Mapping[str, Mapping[str, Any]]) -> list[Bundle]:
    """Cut each parameter's values and states into pieces, by shard: what `join_pieces` does, backwards."""
    bundles = []
    for pieces in placement.shards:
        bundle = Bundle()
        for index, piece in enumerate(pieces):
            whole = state[piece.name][VALUE].shape
            for key, value in state[piece.name].items():
                if not isinstance(value, torch.Tensor):
                    bundle.plain[index, key] = value
                elif value.shape == whole and piece.shape:
                    bundle.tensors[index, key] = value.detach()[piece.start : piece.stop].cpu().contiguous()
                else:
                    bundle.tensors[index, key] = value.detach().cpu().contiguous()
        bundles.append(bundle)
    return bundles
