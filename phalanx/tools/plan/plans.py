"""The plain data of the planner: `Layout` and `Goal`, the `Estimate` of a layout, and the `Plan`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import UsageError, unknown_name
from phalanx.tools.plan.cluster import Cluster
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.world.mesh import Mesh

RECOMPUTE = ("none", "selective", "full")
BUDGETS = ("budget 0.5", "budget 0.3", "budget 0.1", "budget 0")
"""What `Constraints.memory` tries, until a layout fits."""
KERNELS = ("auto", "eager", "autocast", "fused")
_SHARE = re.compile(r"0?\.\d+|0|1|1\.0+")
ATTENTION = ("auto", "flash", "materialized")
PRECISIONS = ("bf16", "fp16", "fp8", "fp32")


def budget_of(recompute: str) -> float | None:
    """Return the share of its activations that a block keeps under "budget 0.5"; None for another kind."""
    word, _, share = recompute.partition(" ")
    return float(share) if word == "budget" and _SHARE.fullmatch(share) else None


def check_recompute(name: str) -> None:
    """Raise for what is not a kind of recomputation."""
    if name not in RECOMPUTE and budget_of(name) is None:
        raise UsageError(unknown_name("recompute", name, (*RECOMPUTE, "budget 0.5")), hint="A budget is from 0 to 1.")


def repeated_share(recompute: str) -> float:
    """Return the share of a block's forward pass that backward repeats: 1 for full, (1 - b)^2 for a budget b.

    What costs least per byte is recomputed first: elementwise kernels, then products, attention last. So the first
    bytes cost next to nothing, and the last ones the whole pass; the square is the simplest such curve. Budget 0.5
    repeats a quarter, 0.1 four fifths. Assumed, in the shape of the curve in PyTorch's "Current and New Activation
    Checkpointing Techniques" (2025). Selective recomputation is timed by its kernels.
    """
    budget = budget_of(recompute)
    return float(recompute == "full") if budget is None else (1 - budget) ** 2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Axis sizes of the mesh, and the choices that change memory and time of a step."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Expert parallel: ranks of the data axis over which the experts are spread."""
    dp_replicate: int = 1
    dp_shard: int = 1
    virtual_stages: int = 1
    """Stages per pipeline rank (interleaved schedules)."""
    micro_batch: int = 1
    """Samples per data rank in one forward pass."""
    sequence_parallel: bool = False
    """Tensor parallel: norms and residuals split along the sequence."""
    recompute: str = "none"
    """none, selective (what is large and cheap to compute again: scores of attention), full (whole layers), or
    "budget 0.5": compiled layers keep this share of their activations."""
    zero_stage: int | None = None
    """What dp_shard x cp ranks shard: optimizer (1), gradients too (2), parameters too (3). None: 3 if > 1, else 0."""
    schedule: str = "1f1b"
    balanced: bool = False
    """Whether stages have about as many parameters, as `train` cuts them; else all have as many layers."""
    attention: str = "auto"
    """flash, or materialized (the scores are written to memory); auto: see `timing`."""
    kernels: str = "auto"
    """eager (one per operation, weights in 16 bits), autocast (torch's, weights in fp32), fused (torch.compile,
    Transformer Engine); auto: as published, see `timing`."""
    offload: str = "none"
    """none, or cpu: parameters, gradients and optimizer states are kept in host memory (fsdp)."""
    lora_rank: int | None = None
    """Train adapters of this rank instead of the weights."""

    @property
    def mesh(self) -> Mesh:
        """The mesh that `train` builds for these axes."""
        return Mesh(self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def gpus(self) -> int:
        """Ranks of the whole mesh."""
        return self.mesh.world_size

    @property
    def dp(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def replica(self) -> int:
        """Ranks that hold one copy of the model, apart from the data axes."""
        return self.pp * self.cp * self.tp

    @property
    def keeps_stages_whole(self) -> bool:
        """Whether every data rank holds whole pipeline stages, as the zero-bubble schedule needs."""
        return self.pp > 1 and self.schedule == "zero-bubble"

    @property
    def stage(self) -> int:
        """The ZeRO stage, with its default."""
        if self.zero_stage is not None:
            return self.zero_stage
        return 3 if self.dp_shard * self.cp > 1 and not self.keeps_stages_whole else 0

    @property
    def title(self) -> str:
        """A short name: TP4 PP2 FSDP8, micro-batch 2, full recomputation."""
        axes = [f"{axis.upper()}{size}" for axis in ("tp", "pp", "cp", "ep") if (size := getattr(self, axis)) > 1]
        if self.stage == 0:
            axes += [f"DDP{self.dp_replicate}"] if self.dp_replicate > 1 else []
        else:
            kind = "FSDP" if self.stage == 3 else f"ZeRO{self.stage} "
            shards = self.dp_shard * self.cp
            copies = f" x {self.dp_replicate} copies" if self.dp_replicate > 1 else ""
            axes += [f"{kind}{shards}{copies}"] if self.gpus > 1 else []  # one GPU shards nothing, and offloads by fsdp
        more = [f"micro-batch {self.micro_batch}"]
        more += [self.schedule] if self.pp > 1 else []
        prefix = "activation " if budget_of(self.recompute) is not None else ""
        more += [prefix + self.recompute + " recomputation" * (not prefix)] if self.recompute != "none" else []
        more += ["states in host memory"] if self.offload != "none" else []
        more += [f"LoRA {self.lora_rank}"] if self.lora_rank else []
        return ", ".join([" ".join(axes) or "one GPU", *more])

    def accumulation(self, global_batch: int) -> int:
        """Return the micro-batches per data rank and step."""
        return max(1, global_batch // (self.dp * self.micro_batch))


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What the training must do: batch, sequence length, precision, length, and limits."""

    global_batch: int
    """Samples per optimizer step, over all ranks."""
    seq_len: int = 2048
    precision: str = "bf16"
    optimizer: str = "adamw"
    master_weights: bool = True
    """Mixed precision keeps weights in fp32 too (6 bytes per parameter beside two moments)."""
    tokens: float | None = None
    """Tokens (or samples, for models without tokens) of the whole training."""
    samples: float | None = None
    epochs: float | None = None
    deadline_hours: float | None = None
    budget: float | None = None
    """Money, in the currency of the price file."""
    compile: bool = False
    reduce_bytes: int | None = None
    """Bytes per value of gradients while they are reduced. None: as published, 2 for replicated weights, 4 for FSDP."""

    def bytes_reduced(self, layout: Layout) -> int:
        """Return the bytes per value of gradients while they are reduced."""
        if self.reduce_bytes is not None:
            return self.reduce_bytes
        return 4 if self.precision == "fp32" or layout.stage == 3 else 2


TIME_PARTS = {
    "compute": "arithmetic and memory traffic of kernels",
    "recompute": "recomputation",
    "tensor_comm": "tensor-parallel communication",
    "context_comm": "context-parallel communication",
    "expert_comm": "expert-parallel communication",
    "pipeline_comm": "sends between pipeline stages",
    "data_comm": "data-parallel communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer step",
    "offload": "copies to and from host memory",
    "variation": "wait for the slowest GPU",
}
"""Parts of a step's time, which sum to it. Communication here is what computation does not hide; `variation` is the
wait for the slowest GPU."""


@dataclass(frozen=True)
class Estimate:
    """Time, memory and efficiency of one layout."""

    step_seconds: float
    interval: tuple[float, float]
    """Where the step time lies if the prediction errs as on nine in ten published runs, each left out of the fit."""
    tokens_per_second_per_gpu: float
    mfu: float
    """Model FLOPs utilisation: operations of forward and backward without recomputation / (time x peak), attention as a
    full square."""
    hfu: float
    """Hardware FLOPs utilisation: with the operations that are computed again."""
    mfu_of_parameters: float
    """The same by 6 x active parameters x tokens: without attention's scores (4 x where only adapters are trained)."""
    memory_gib: dict[str, dict[str, float]]
    """Kind of rank ("all", or "first stage", "middle stage", "last stage") to GiB by part. Together the parts are what
    torch.cuda.max_memory_allocated counts."""
    breakdown: dict[str, float]
    """Seconds by part (TIME_PARTS); the sum is step_seconds."""
    hidden: dict[str, float] = field(default_factory=dict)
    """Seconds of communication that run beside computation: not part of step_seconds."""
    reserve_gib: dict[str, float] = field(default_factory=dict)
    """What the CUDA context, nccl and unused pieces of the allocator take besides, by kind of rank."""
    memory_limit_gib: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def peak_gib(self) -> float:
        """GiB that tensors take at the peak of the rank that needs the most."""
        return max(sum(parts.values()) for parts in self.memory_gib.values())

    @property
    def needed_gib(self) -> float:
        """GiB of the rank that needs the most, with the reserve."""
        return max(sum(parts.values()) + self.reserve_gib.get(kind, 0.0) for kind, parts in self.memory_gib.items())

    @property
    def bars(self) -> dict[str, dict[str, float]]:
        """Memory by kind of rank and part, the reserve among them."""
        return {kind: {**parts, "reserve": self.reserve_gib.get(kind, 0.0)} for kind, parts in self.memory_gib.items()}

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return self.needed_gib <= self.memory_limit_gib

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**vars(self), "peak_gib": self.peak_gib, "fits": self.fits}


@dataclass(frozen=True)
class Candidate:
    """A layout that was estimated, and why it was not chosen (empty for the chosen one)."""

    layout: Layout
    estimate: Estimate
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """The chosen layout with everything that explains it."""

    model: ModelShape | TracedShape
    cluster: Cluster
    goal: Goal
    best: Candidate | None
    """None: nothing fits; `smallest_change` says what would."""
    runners_up: tuple[Candidate, ...] = ()
    refused: tuple[tuple[str, int], ...] = ()
    """Reasons with the number of layouts that each refused: ("5 stages do not divide 32 layers", 12)."""
    searched: int = 0
    binding: str = ""
    """The constraint that limits the step, in words."""
    batch: str = ""
    """The arithmetic of the global batch, in words."""
    doubt: str = ""
    """Why a batch of this size may not train, in words; empty: others have trained with as large ones."""
    cost: dict[str, float] = field(default_factory=dict)
    """days, gpu_hours, money (where a price is known), steps."""
    reliability: dict[str, float] = field(default_factory=dict)
    """failures_per_day, checkpoint_seconds, checkpoint_interval_seconds, effective."""
    assumptions: tuple[tuple[str, str, str], ...] = ()
    """(name, value, where it comes from)."""
    sensitivity: tuple[tuple[str, float], ...] = ()
    """(change, relative change of the step time): ("20% less bandwidth between nodes", 0.06)."""
    smallest_change: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings of `phalanx train` for the chosen layout."""

    @property
    def fits(self) -> bool:
        """Whether a layout was found."""
        return self.best is not None
