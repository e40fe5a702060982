"""Hierarchical: within a host, across the hosts' leaders, within the host again.

Links between hosts are slow. Here each host sends over them what one rank of a ring sends, for any number of ranks: the
ranks of a host first combine at their leader (its first rank), the leaders run a ring, and each broadcasts the result
within its host. On one host this is the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.comm.collectives import ring
from phalanx.comm.collectives.channel import P2PChannel
from phalanx.comm.collectives.chunks import start_reduction, write_back
from phalanx.comm.collectives.topology import find_locations, hosts
from phalanx.comm.collectives.tree import climb, descend
from phalanx.errors import UsageError


def all_reduce(
    tensor: torch.Tensor, channel: P2PChannel, op: str = "sum", *, groups: Sequence[Sequence[int]] | None = None
) -> None:
    """Combine a tensor over all ranks, in place. `groups`: the ranks of each host; None: as `topology` finds them."""
    groups = groups if groups is not None else hosts(find_locations(channel))
    flat, reduction = start_reduction(f"hierarchical all_reduce over {len(groups)} hosts", tensor, channel, op)
    if sorted(rank for group in groups for rank in group) != list(range(channel.size)):
        raise UsageError(
            f"the hosts {[list(group) for group in groups]} do not hold each of the {channel.size} ranks once",
            hint="Write one list of ranks per host, such as [[0, 1], [2, 3]].",
        )
    within = channel.subgroup(next(group for group in groups if channel.rank in group))
    climb(flat, within, reduction)
    if within.rank == 0:
        ring.reduce_among(flat, channel.subgroup([group[0] for group in groups]), reduction, ranks=channel.size)
    descend(flat, within)
    write_back(flat, tensor)
