"""The machines that a plan is made for: GPUs, links, clusters, instance types with prices."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    """The link between GPUs of one machine, where a cluster does not say another."""
    inter_node: str = "infiniband-hdr"
    """The link between machines with this GPU, where a cluster does not say another."""
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
    """Whether all GPUs of a machine share one adapter of this kind."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs in machines, and the links between them."""

    gpu: str | Gpu
    gpus: int
    gpus_per_node: int = 8
    intra_node: str | Link | None = None
    """Link within a machine (None: that of the GPU)."""
    inter_node: str | Link | None = None
    """Link between machines (None: InfiniBand at inter_node_gbps, or the preset's)."""
    inter_node_gbps: float | None = None
    """Gbit/s per machine and direction between machines (1600: eight 200 Gbit/s adapters)."""
    topology: str = "rail"
    """rail (each GPU's adapter on its own switch), or tree (oversubscribed above the machine)."""
    oversubscription: float = 1.0
    host_memory_gib: float = 1024.0
    """Memory of each machine, for offload."""
    price_per_gpu_hour: float | None = None
    instance: str | None = None
    storage_gbps: float = 2.0
    """GB/s per machine to the storage of checkpoints."""
    name: str = ""

    @property
    def nodes(self) -> int:
        """Machines."""
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A machine that a provider rents out, with its price."""

    name: str
    gpu: str
    gpus: int
    network_gbps: float
    """Gbit/s per machine and direction."""
    inter_node: str
    host_memory_gib: float = 1024.0
    topology: str = "rail"
    price: float | None = None
    """Per hour and machine, on demand."""
    date: str = ""
    """When that was the price."""
    source: str = ""
