"""The mesh as process groups: one DeviceMesh with named axes, from which every strategy takes its slice."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx import torch_compat
from phalanx.world.abort import unsplit_groups
from phalanx.world.mesh import Mesh

LOOPBACK = "127.0.0.1"
_MADE: dict[Any, Any] = {}
"""Groups and meshes of this process by what they are made of: each fit would make its own, and torch keeps them all."""


def forget_groups() -> None:
    """Drop all groups, before the process group is left."""
    _MADE.clear()


def build_device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """Build the groups of all axes larger than one, outermost first; all ranks must call this.

    Ranks that hold slices of one sequence (cp) hold the same parameters, so these are sharded over them as over the
    ranks of dp_shard: the two axes are one here. The groups of cp alone come from `build_axis_group`.
    """
    sizes = {"pp": mesh.pp, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard * mesh.cp, "tp": mesh.tp}
    # Replicas of a model that is sharded over one rank only are still a data axis of two dimensions.
    axes = {axis: size for axis, size in sizes.items() if size > 1 or (axis == "dp_shard" and mesh.dp_replicate > 1)}
    key = (device_type, *axes.items())
    if not _is_alive(_MADE.get(key)):
        with unsplit_groups():
            _MADE[key] = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    device_mesh: DeviceMesh = _MADE[key]
    return device_mesh


def build_axis_group(mesh: Mesh, axes: tuple[str, ...], rank: int, backend: str | None = None) -> dist.ProcessGroup:
    """Build the group of the ranks that differ from this one on these axes only; all ranks must call this."""
    key = (mesh, axes, backend)
    if not _is_alive(_MADE.get(key)):
        for ranks in mesh.groups(*axes):
            group = dist.new_group(ranks, backend=backend)  # every rank takes part in making every group
            if rank in ranks:
                _MADE[key] = group
    mine: dist.ProcessGroup = _MADE[key]
    return mine


def _is_alive(process_group: Any) -> bool:
    """Whether torch still knows a group: a script may have left the process group and joined another."""
    if process_group is None:
        return False
    groups = process_group.get_all_groups() if hasattr(process_group, "get_all_groups") else [process_group]
    return all(torch_compat.is_alive(group) for group in groups)


def open_loopback_store(port: int, timeout: timedelta, *, is_master: bool) -> dist.TCPStore:
    """Host or open the store of ranks that are all on this machine: nothing outside it can connect.

    torch's own server listens on every interface. Port 0: any that is free, for the host alone.
    """
    if not is_master:
        return dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timeout)
    listener = socket.create_server((LOOPBACK, port), backlog=1024)
    free_port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, free_port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def join_alone(device: torch.device) -> None:
    """Make the group of a single rank for a library that needs one, unless there is a group."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
