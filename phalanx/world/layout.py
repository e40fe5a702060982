"""The device and the number of ranks, from the config and what the machine has. Arithmetic only, no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from phalanx.config import DistributedConfig
from phalanx.config.settings import Settings
from phalanx.engine import engine_name, engine_of
from phalanx.errors import UsageError
from phalanx.host.addresses import is_loopback
from phalanx.host.gpus import HOST_ID, gpu_memory, ranks_per_gpu, shared_memory
from phalanx.world.mesh import Mesh, plan_mesh


@dataclass(frozen=True)
class JobLayout:
    """The ranks of a job: their device, their numbers here and in all, their positions on the mesh."""

    device: str
    num_nodes: int
    ranks_per_node: int
    """On this machine; others may have another number (`hosts`)."""
    mesh: Mesh
    names: tuple[str, ...] = ()
    """Names of ranks where these are more than positions on the mesh."""
    ranks_per_gpu: int = 1
    """The most ranks of this machine that run on one GPU; over 1 they share it."""

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.mesh.world_size

    @property
    def labels(self) -> tuple[str, ...]:
        """The name of each rank in logs."""
        return self.names or tuple(self.mesh.label(rank) for rank in range(self.world_size))

    @property
    def ranks(self) -> str:
        """How many ranks there are, in words."""
        return f"{self.world_size} rank{'s' * (self.world_size > 1)}"

    @property
    def starting(self) -> str:
        """What the console shows while the ranks start."""
        return f"starting {self.ranks} on {self.device}"


def plan_layout(config: DistributedConfig, gpus_here: int) -> JobLayout:
    """Decide device and ranks; asking for more GPUs than there are is refused with the way to run on the CPU."""
    if config.hosts is not None and config.launcher == "local" and config.node_rank is None:
        raise UsageError(
            f"hosts = {config.hosts!r}: several machines are started from the command line only",
            hint=f"Write: phalanx train --script train.py --hosts {config.hosts}",
        )
    asked = config.total_ranks
    device, engine = config.device, engine_of(config)
    if device == "auto":
        device = "cuda" if engine.uses_gpus_here(config) and gpus_here else "cpu"
    check_device(config, device)
    own: JobLayout | None = engine.layout(config, device)
    if own is not None:
        return own
    nodes = engine.num_nodes(config)
    per_node = max(1, gpus_here if device == "cuda" else 1) if asked is None else asked // nodes
    if config.hosts is not None and config.node_rank is not None:
        per_node = list(config.host_ranks.values())[config.node_rank]
    total, place = asked or nodes * per_node, config.rdzv_endpoint or ""
    if config.share_gpus and not gpus_here and engine.counts_gpus_here(config):
        raise nothing_to_share(total)
    # nccl refuses two ranks on one GPU, but for what share_gpus sets.
    may_share = gpus_here > 0 and (config.share_gpus or config.communication_backend == "gloo")
    if device == "cuda" and per_node > gpus_here and not may_share and engine.counts_gpus_here(config):
        raise _too_few_gpus(config, per_node, gpus_here)
    here = total if is_loopback((place.rpartition(":")[0] or place).strip("[]")) else per_node
    on_each = ranks_per_gpu(here, gpus_here) if device == "cuda" else 1
    if config.share_gpus and on_each > 1:
        _check_sharing(on_each)
    return JobLayout(device, nodes, per_node, plan_mesh(config, total, per_node), ranks_per_gpu=on_each)


def nothing_to_share(ranks: int) -> UsageError:
    """Return the error for share_gpus without a GPU."""
    return UsageError(
        "share_gpus = True, but no GPU was found on this machine.",
        hint=f"Run the same ranks on the CPU, without share_gpus: --num-workers {ranks} --device cpu",
    )


def _check_sharing(ranks: int) -> None:
    """Refuse more ranks than a GPU has memory for, and a host id of the user's: all ranks would have the same."""
    if memory := gpu_memory():
        shared_memory(ranks, memory)
    if given := os.environ.get(HOST_ID):
        raise UsageError(
            f"share_gpus gives each rank its own {HOST_ID}, but it is set to '{given}' for all of them.",
            hint=f"Run: unset {HOST_ID}",
        )


def check_device(config: Settings, device: str) -> None:
    """Refuse what the device cannot do."""
    if device != "cpu":
        return
    if config.mixed_precision == "fp16":
        raise UsageError(
            "mixed_precision = 'fp16' needs a GPU: CPUs have no fast fp16 arithmetic",
            hint="Write mixed_precision = 'bf16' (or true, which picks by device).",
        )
    if config.communication_backend == "nccl" and config.framework == "torch":
        raise UsageError(
            "communication_backend = 'nccl' moves GPU memory, but the ranks compute on the CPU",
            hint="Write communication_backend = 'gloo', or leave it out: it is chosen by the device.",
        )


def _too_few_gpus(config: DistributedConfig, wanted: int, gpus_here: int) -> UsageError:
    found = {0: "no GPU was found", 1: "1 GPU was found"}.get(gpus_here, f"{gpus_here} GPUs were found")
    fewer = f"request at most {gpus_here} per machine, or " if gpus_here else ""
    fewer += "debug it with several ranks per GPU (--share-gpus), or " if gpus_here and not engine_name(config) else ""
    total = config.total_ranks or wanted
    return UsageError(
        f"num_workers = {total} on GPUs needs {wanted} on this machine, but {found}.",
        hint=f"To continue: {fewer}run the same {total} ranks on the CPU with --device cpu (device='cpu' in Python).",
    )
