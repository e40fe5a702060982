"""From a model and its optimizer to a placement, and from one set of shards to another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from phalanx.comm.server.memory import name_of
from phalanx.comm.server.optimizers import leaves_untouched_rows, works_by_element
from phalanx.comm.server.placement import Piece, Placement, rebalance, spread
from phalanx.errors import UsageError

if TYPE_CHECKING:
    import torch

    from phalanx.comm.server.client import ParameterClient

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
