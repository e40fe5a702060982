"""The collectives of Phalanx and their algorithms, by name.

channel = P2PChannel()                          # the default process group, or P2PChannel(group)
all_reduce(gradient, channel)                   # by the ring
all_reduce(flags, channel, "max", algorithm="tree")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from phalanx.comm.collectives import direct, fixed_order, halving, hierarchical, ring, tree
from phalanx.comm.collectives.channel import P2PChannel
from phalanx.comm.collectives.direct import all_to_all, barrier, gather, scatter
from phalanx.comm.collectives.ring import all_gather, reduce_scatter
from phalanx.comm.collectives.tree import broadcast, reduce
from phalanx.errors import UsageError, unknown_name

__all__ = [
    "ALGORITHMS",
    "P2PChannel",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "find_algorithm",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

ALGORITHMS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "all_reduce": {
        "ring": ring.all_reduce,
        "tree": tree.all_reduce,
        "halving-doubling": halving.all_reduce,
        "hierarchical": hierarchical.all_reduce,
        "fixed-order": fixed_order.all_reduce,
    },
    "reduce_scatter": {"ring": ring.reduce_scatter},
    "all_gather": {"ring": ring.all_gather},
    "broadcast": {"tree": tree.broadcast},
    "reduce": {"tree": tree.reduce},
    "gather": {"direct": direct.gather},
    "scatter": {"direct": direct.scatter},
    "all_to_all": {"direct": direct.all_to_all},
    "barrier": {"dissemination": direct.barrier},
}
"""The functions by collective and algorithm; the first algorithm of a collective is its default."""


def find_algorithm(collective: str, algorithm: str | None = None) -> Callable[..., Any]:
    """Return a collective's function for an algorithm, or for its default one."""
    if collective not in ALGORITHMS:
        raise UsageError(unknown_name("collective", collective, ALGORITHMS))
    functions = ALGORITHMS[collective]
    if algorithm is None:
        return next(iter(functions.values()))
    if algorithm not in functions:
        raise UsageError(unknown_name("algorithm", algorithm, functions, of=collective))
    return functions[algorithm]


def all_reduce(tensor: torch.Tensor, channel: P2PChannel, op: str = "sum", *, algorithm: str = "ring") -> None:
    """Combine a tensor over all ranks, in place: ring for large tensors, tree or halving-doubling for small ones."""
    find_algorithm("all_reduce", algorithm)(tensor, channel, op)
