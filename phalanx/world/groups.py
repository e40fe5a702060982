"""The mesh as process groups: one DeviceMesh with named axes, from which every strategy takes its slice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from phalanx.world.mesh import Mesh


def build_device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """Build the groups of all axes larger than one, outermost first; all ranks must call this."""
    # Replicas of a model that is sharded over one rank only are still a data axis of two dimensions.
    kept = {
        axis: size for axis, size in mesh.sizes.items() if size > 1 or (axis == "dp_shard" and mesh.dp_replicate > 1)
    }
    return init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def build_data_group(mesh: Mesh, rank: int, backend: str) -> dist.ProcessGroup | None:
    """Build the group of the ranks that see other samples than this one does; all ranks must call this."""
    mine = None
    for ranks in mesh.data_groups():
        group = dist.new_group(ranks, backend=backend)  # every rank takes part in making every group
        mine = group if rank in ranks else mine
    return mine
