"""The nodes that a plan is made for: GPUs, links, clusters, prices; and the time of a collective on them."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache

FITTED = {
    "a100": "fitted, docs/planning.md",
    "h100": "fitted, docs/planning.md",
    "h200": "those of h100, docs/planning.md",
    "gh200": "those of h100, docs/planning.md",
}
"""Where the shares of peak of a type of GPU come from; those of other types are assumed (data/gpus.toml)."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator, with the constants that turn operations and bytes into time."""

    name: str
    memory_gib: float
    tflops: dict[str, float] = field(hash=False)
    """Peak dense TFLOP/s by precision (bf16, fp16, fp8, fp32); a precision that it lacks is absent."""
    memory_gbps: float
    """Peak memory bandwidth in GB/s."""
    matmul: float
    """The share of peak that large matrix products reach in training (clocks under load included)."""
    bandwidth: float
    """The share of peak memory bandwidth that elementwise kernels reach."""
    attention: float
    """The share of peak that the forward pass of flash attention reaches."""
    sms: int
    """Multiprocessors: a product of fewer tiles leaves some idle."""
    launch_us: float = 10.0
    """Host time per kernel that a step cannot hide when kernels are short."""
    intra_node: str = "pcie4"
    """The link between GPUs of one node, where a cluster does not say another."""
    inter_node: str = "infiniband-hdr"
    """The link between nodes with this GPU, where a cluster does not say another."""
    reserve_gib: float = 1.5
    """CUDA context, nccl and fragmentation."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection between GPUs, with the curve of bus bandwidth over message sizes."""

    name: str
    gbps: float
    """GB/s per GPU and direction that large messages reach."""
    latency_us: float
    """Time of the smallest collective."""
    curve: tuple[tuple[float, float], ...] = ()
    """Measured points (bytes, share of gbps), by size; empty: the shape of a measured link of the same class."""
    reach: float = 0.9
    """Share of the line rate that large messages reach."""
    per_machine: bool = False
    """Whether all GPUs of a node share one adapter of this kind."""
    disturbs: float = 1.0
    """How much more time a byte takes from computation than in published runs: learned by `--calibrate-from`."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs in nodes, and the links between them."""

    gpu: str | Gpu
    gpus: int
    gpus_per_node: int = 8
    intra_node: str | Link | None = None
    """Link within a node (None: that of the GPU)."""
    inter_node: str | Link | None = None
    """Link between nodes (None: InfiniBand at inter_node_gbps, or the preset's)."""
    inter_node_gbps: float | None = None
    """Gbit/s per node and direction between nodes (1600: eight 200 Gbit/s adapters)."""
    topology: str = "rail"
    """rail (each GPU's adapter on its own switch), or tree (oversubscribed above the node)."""
    oversubscription: float = 1.0
    host_memory_gib: float = 1024.0
    """Memory of each node, for offload."""
    price_per_gpu_hour: float | None = None
    instance: str | None = None
    name: str = ""

    @property
    def nodes(self) -> int:
        """Nodes."""
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A node that a provider rents out, with its price."""

    name: str
    gpu: str
    gpus: int
    network_gbps: float
    """Gbit/s per node and direction."""
    inter_node: str
    host_memory_gib: float = 1024.0
    topology: str = "rail"
    price: float | None = None
    """Per hour and node, on demand."""
    date: str = ""
    """When that was the price."""
    source: str = ""


VOLUME = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""How often a rank sends its share (n-1)/n of the data: bus bandwidth is this x bytes x (n-1)/n / time (nccl-tests)."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how many of them share a node."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Nodes over which the group is spread."""
        return -(-self.size // self.per_node)


def group_of(size: int, stride: int, gpus_per_node: int) -> Group:
    """Return the group of an axis whose neighbours are `stride` ranks apart, with ranks in order on the nodes."""
    return Group(size, max(1, min(size, gpus_per_node // stride)))


@lru_cache(maxsize=65536)
def collective_seconds(kind: str, size: float, group: Group, intra: Link, inter: Link) -> float:
    """Return the time of a collective over `size` bytes: the whole tensor, before an all-reduce or after a gather.

    Within a node each GPU has the bandwidth of the link. Between nodes the ranks of a group that share a node
    share its adapters: a ring enters and leaves each node on all of them.
    """
    if group.size == 1:
        return 0.0
    moved = VOLUME[kind] * size * (group.size - 1) / group.size
    if group.nodes == 1:
        return max(intra.latency_us * 1e-6, moved / (intra.gbps * 1e9 * share_at(intra, size)))
    across = inter.gbps * group.per_node
    if kind == "all_to_all":  # each rank's own adapter carries what leaves the node
        across = inter.gbps / max(1e-9, 1 - group.per_node / group.size)
    hops = inter.latency_us * 1e-6 * (math.log2(group.nodes) + 1)
    return hops + moved / (min(intra.gbps, across) * 1e9 * share_at(inter, size))


def send_seconds(size: float, link: Link) -> float:
    """Return the time to send bytes from one rank to another."""
    return link.latency_us * 1e-6 + size / (link.gbps * 1e9)


def share_at(link: Link, size: float) -> float:
    """Return the share of the link's bandwidth at a message size, between the measured points by logarithms."""
    points = link.curve
    if not points:
        return 1.0
    at = bisect_left(points, (size, 0.0))
    if at == 0:
        return points[0][1]
    if at == len(points):
        return points[-1][1]
    (fewer, low), (more, high) = points[at - 1], points[at]
    part = math.log(size / fewer) / math.log(more / fewer)
    return float(low * (high / low) ** part)
