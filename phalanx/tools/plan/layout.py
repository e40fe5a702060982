"""How a model is placed on ranks, and what training must achieve: `Layout` and `Goal`."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.world.mesh import Mesh

RECOMPUTE = ("none", "selective", "full")
KERNELS = ("auto", "eager", "autocast", "fused")
ATTENTION = ("auto", "flash", "materialized")
PRECISIONS = ("bf16", "fp16", "fp8", "fp32")


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
    """none, selective (what is large and cheap to compute again: scores of attention) or full (whole layers)."""
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
