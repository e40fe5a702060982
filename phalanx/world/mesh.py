"""The device mesh: axes `pp, dp_replicate, dp_shard, cp, tp` checked as arithmetic, with what would divide.

The layout of a job is its mesh with the device and the number of ranks, from the config and what the machine has.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.config import DistributedConfig
from phalanx.config.settings import Settings
from phalanx.engine import engine_name, engine_of
from phalanx.errors import UsageError
from phalanx.host.addresses import is_loopback
from phalanx.host.gpus import HOST_ID, gpu_memory, ranks_per_gpu, shared_memory
from phalanx.world.splits import SCHEDULES, choose_microbatches

SHOWN = 3
"""How many possible products an error lists."""


def impossible_product(axes: Mapping[str, int], ranks: int) -> UsageError:
    """Return an error: a copy of the model over these axes does not divide the ranks; with the nearest that do."""
    requested = {axis: size for axis, size in axes.items() if size > 1}
    copy = math.prod(requested.values())
    product = " x ".join(f"{axis} = {size}" for axis, size in requested.items())
    takes = f" = {copy} ranks for one copy of the model" if len(requested) > 1 else ""
    near = []
    for sizes in nearest_products(requested, ranks)[:SHOWN]:
        data = ranks // math.prod(sizes.values())
        text = " x ".join(f"{axis} = {size}" for axis, size in sizes.items())
        near.append(text + (f" (x {data} data ranks)" if data > 1 else ""))
    more = -(-ranks // copy) * copy
    return UsageError(
        f"{ranks} rank{'s' * (ranks != 1)} cannot be divided by {product}{takes}",
        hint=f"Possible with {ranks}: {'; '.join(near)}. Or start a multiple of {copy} ranks: --num-workers {more}.",
    )


def nearest_products(requested: Mapping[str, int], ranks: int) -> list[dict[str, int]]:
    """Return the sizes of these axes whose product divides the ranks, the nearest to what was asked first."""
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    possible = [
        dict(zip(requested, sizes, strict=True))
        for sizes in itertools.product(divisors, repeat=len(requested))
        if ranks % math.prod(sizes) == 0
    ]

    def distance(sizes: Mapping[str, int]) -> float:
        """Twice as many is as far away as half as many."""
        return sum(abs(math.log2(sizes[axis] / size)) for axis, size in requested.items())

    return sorted(possible, key=lambda sizes: (distance(sizes), tuple(-size for size in sizes.values())))


AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The size of each axis. Their product is the number of ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of the whole mesh."""
        return self.pp * self.dp_size * self.cp * self.tp

    @property
    def dp_size(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on each axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a mesh of {self.world_size} ranks")
        coordinates = {}
        for axis, size in reversed(self.sizes.items()):
            rank, coordinates[axis] = divmod(rank, size)
        return {axis: coordinates[axis] for axis in AXES}

    def dp_rank(self, rank: int) -> int:
        """Return a rank's number among the ranks that see different samples."""
        coordinates = self.coordinates(rank)
        return coordinates["dp_replicate"] * self.dp_shard + coordinates["dp_shard"]

    def groups(self, *axes: str) -> list[list[int]]:
        """Return, for each position on the other axes, the ranks that differ on these axes only, in their order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinates = self.coordinates(rank)
            groups.setdefault(tuple(coordinates[axis] for axis in AXES if axis not in axes), []).append(rank)
        return list(groups.values())

    def leads_samples(self, rank: int) -> bool:
        """Whether a rank is the first of those that see the same samples, and so reports for them."""
        coordinates = self.coordinates(rank)
        return not (coordinates["pp"] or coordinates["cp"] or coordinates["tp"])

    def label(self, rank: int) -> str:
        """Return the name a rank has in logs, such as "r3 dp1": only axes larger than one are named."""
        coordinates = self.coordinates(rank)
        parts = [f"{axis}{coordinates[axis]}" for axis, size in self.sizes.items() if size > 1]
        if self.dp_replicate == 1 or self.dp_shard == 1:  # one data axis: its short name says enough
            parts = [part.replace("dp_replicate", "dp").replace("dp_shard", "dp") for part in parts]
        return " ".join([f"r{rank}", *parts])


def plan_mesh(config: Settings, world_size: int, ranks_per_node: int) -> Mesh:
    """Return the mesh of the config's axes; sizes that do not divide the ranks are refused with those that do."""
    pp, cp, tp = config.pipeline_parallel, config.context_parallel, config.tensor_parallel
    copy = pp * cp * tp
    if world_size % copy:
        raise impossible_product({"pipeline_parallel": pp, "context_parallel": cp, "tensor_parallel": tp}, world_size)
    if pp > 1 and config.batch_size is not None:
        choose_microbatches(config.microbatches, config.batch_size, pp, SCHEDULES[config.pipeline_schedule])
    data = world_size // copy
    if pp > 1 and config.pipeline_schedule == "zero-bubble" and config.facts.shards and data * cp > 1:
        raise UsageError(
            "pipeline_schedule = 'zero-bubble' cannot run with strategy = 'fsdp': it computes gradients of weights "
            "apart from those of inputs, which fully_shard does not support",
            hint="Write strategy = 'ddp' (whole stages on every data rank), or pipeline_schedule = 'interleaved'.",
        )
    engine_of(config).check_batch(config, data)
    if data * cp == 1 < copy and config.offload == "cpu":
        raise UsageError(
            f"offload = 'cpu' needs ranks to shard over, but one copy of the model takes all {world_size}",
            hint=f"Start a multiple of {copy} ranks, lower the other axes, or leave offload out.",
        )
    if config.expert_parallel > 1:
        return _expert_mesh(config, data, pp, cp, tp)
    if not config.facts.shards and copy == 1:
        return Mesh(dp_replicate=data)
    if pp > 1 and config.pipeline_schedule == "zero-bubble":  # whole stages on every data rank
        return Mesh(pp=pp, dp_replicate=data, cp=cp, tp=tp)
    if not config.resolved_sharding.startswith("hybrid"):
        # Together with other axes ddp shards data too: torch's DDP does not support DTensors.
        return Mesh(pp=pp, dp_shard=data, cp=cp, tp=tp)
    shard = config.shard_size or max(1, ranks_per_node // copy)
    if data % shard:
        raise _indivisible("shard_size", shard, data, copy_size=copy)
    return Mesh(pp=pp, dp_replicate=data // shard, dp_shard=shard, cp=cp, tp=tp)


def _expert_mesh(config: Settings, data: int, pp: int, cp: int, tp: int) -> Mesh:
    """Spread the experts over the axis dp_shard; the rest of the model is sharded within the same ranks."""
    experts = config.expert_parallel
    if pp * cp * tp > 1:
        sizes = {"pipeline_parallel": pp, "context_parallel": cp, "tensor_parallel": tp}
        others = [f"{axis} = {size}" for axis, size in sizes.items() if size > 1]
        raise UsageError(
            f"expert_parallel = {experts} runs with the data axes only, not with {' and '.join(others)}",
            hint="Leave the other axes at 1 for a mixture of experts, or expert_parallel at 1.",
        )
    if data % experts:
        raise _indivisible("expert_parallel", experts, data)
    return Mesh(dp_replicate=data // experts, dp_shard=experts)


def _indivisible(setting: str, size: int, ranks: int, *, copy_size: int = 1) -> UsageError:
    possible = [str(number) for number in range(1, ranks + 1) if ranks % number == 0]
    have = f"{ranks} rank{'s' * (ranks != 1)}" + (f" (each a copy of {copy_size} ranks)" if copy_size > 1 else "")
    return UsageError(
        f"{have} cannot be cut into groups of {setting} = {size}",
        hint=f"With {have} {setting} can be: {', '.join(possible)}. Or start a multiple of {size * copy_size} ranks: "
        f"--num-workers {size * copy_size}.",
    )


_WORDS = {"pp": "pipeline", "dp_replicate": "replicate", "dp_shard": "fsdp", "cp": "context", "tp": "tensor"}


def layout_words(strategy: str, config: Settings, sizes: Mapping[str, int]) -> str:
    """Return how the ranks share the model: the strategy's name, or of several axes `fsdp 2 x tensor 2`."""
    if config.facts.shards_by_engine and config.zero_stage is not None:
        return f"{strategy} (ZeRO stage {config.zero_stage})"
    if all(size == 1 for axis, size in sizes.items() if axis != "dp_replicate") and config.expert_parallel == 1:
        return strategy
    parts = [f"{word} {sizes[axis]}" for axis, word in _WORDS.items() if sizes.get(axis, 1) > 1]
    if config.expert_parallel > 1:
        parts.append(f"expert {config.expert_parallel}")
    return " x ".join(parts) or strategy


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
            f"hosts = {config.hosts!r}: several nodes are started from the command line only",
            hint=f"Write: phalanx train --script train.py --hosts {config.hosts}",
        )
    requested = config.total_ranks
    device, engine = config.device, engine_of(config)
    if device == "auto":
        device = "cuda" if engine.uses_gpus_here(config) and gpus_here else "cpu"
    check_device(config, device)
    layout: JobLayout | None = engine.layout(config, device)
    if layout is not None:
        return layout
    nodes = engine.num_nodes(config)
    per_node = max(1, gpus_here if device == "cuda" else 1) if requested is None else requested // nodes
    if config.hosts is not None and config.node_rank is not None:
        per_node = list(config.host_ranks.values())[config.node_rank]
    total, endpoint = requested or nodes * per_node, config.rdzv_endpoint or ""
    if config.share_gpus and not gpus_here and engine.counts_gpus_here(config):
        raise nothing_to_share(total)
    # nccl refuses two ranks on one GPU, but for what share_gpus sets.
    may_share = gpus_here > 0 and (config.share_gpus or config.communication_backend == "gloo")
    if device == "cuda" and per_node > gpus_here and not may_share and engine.counts_gpus_here(config):
        raise _too_few_gpus(config, per_node, gpus_here)
    on_this_node = total if is_loopback((endpoint.rpartition(":")[0] or endpoint).strip("[]")) else per_node
    per_gpu = ranks_per_gpu(on_this_node, gpus_here) if device == "cuda" else 1
    if config.share_gpus and per_gpu > 1:
        _check_sharing(per_gpu)
    return JobLayout(device, nodes, per_node, plan_mesh(config, total, per_node), ranks_per_gpu=per_gpu)


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
    if host_id := os.environ.get(HOST_ID):
        raise UsageError(
            f"share_gpus gives each rank its own {HOST_ID}, but it is set to '{host_id}' for all of them.",
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


def _too_few_gpus(config: DistributedConfig, required: int, gpus_here: int) -> UsageError:
    inventory = {0: "no GPU was found", 1: "1 GPU was found"}.get(gpus_here, f"{gpus_here} GPUs were found")
    fewer = f"request at most {gpus_here} per node, or " if gpus_here else ""
    fewer += "debug it with several ranks per GPU (--share-gpus), or " if gpus_here and not engine_name(config) else ""
    total = config.total_ranks or required
    ranks = f"the same {total} ranks" if total > 1 else "it"
    return UsageError(
        f"num_workers = {total} on GPUs needs {required} GPU{'s' * (required > 1)} on this machine, but {inventory}.",
        hint=f"To continue: {fewer}run {ranks} on the CPU with --device cpu (device='cpu' in Python).",
    )
