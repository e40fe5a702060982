"""What the planner predicts of one layout: `Estimate` and its parts. `estimator.estimate` makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TIME_PARTS = (
    "compute",
    "recompute",
    "tensor_comm",
    "context_comm",
    "expert_comm",
    "pipeline_comm",
    "data_comm",
    "bubble",
    "optimizer",
    "offload",
    "variation",
)
"""Parts of a step's time, which sum to it. Communication here is what computation does not hide; `variation` is the
wait for the slowest GPU."""

MEMORY_PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "communication",
)
"""Parts of a rank's memory in GiB; together they are what torch.cuda.max_memory_allocated counts."""


@dataclass(frozen=True)
class Estimate:
    """Time, memory and efficiency of one layout."""

    step_seconds: float
    interval: tuple[float, float]
    """Where the step time is expected with 90% probability, from the errors on published measurements."""
    tokens_per_second_per_gpu: float
    mfu: float
    """Model FLOPs utilisation: operations of forward and backward without recomputation / (time x peak)."""
    hfu: float
    """Hardware FLOPs utilisation: with the operations that are computed again."""
    memory_gib: dict[str, dict[str, float]]
    """Kind of rank ("all", or "first stage", "middle stage", "last stage") to GiB by part (MEMORY_PARTS)."""
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
