"""The equivalence matrix: every strategy, and every pair that goes together, against one process.

`test_matrix` runs it over gloo on the CPU, `tests/gpu/test_nccl_parity` over nccl on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from layouts import difference, train

GLOBAL_BATCH = 16
SAMPLES = 4 * GLOBAL_BATCH + 5  # five steps, the last of them ragged: 5 samples for up to 4 data ranks
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
Trained = tuple[dict[str, torch.Tensor], dict[str, float], list[float]]
"""Weights, the last evaluation, and every step's gradient norm."""


@dataclass(frozen=True)
class Layout:
    """Ranks, how many of them see samples of their own, and what lays the model over them."""

    ranks: int
    data: int
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "llama"
    layers: int = 2
    tied: bool = False
    """Whether gpt is tried as well, whose embedding and head share a matrix."""


def fsdp(**settings: Any) -> Layout:
    return Layout(2, 2, {"strategy": "fsdp", **settings})


def pipeline(ranks: int, data: int, schedule: str = "1f1b", *, tied: bool = False, **settings: Any) -> Layout:
    axes = {"pipeline_parallel": 2, "pipeline_schedule": schedule, "microbatches": 2}
    layers = 4 if schedule in {"interleaved", "zero-bubble"} else 2  # those have two stages a rank
    return Layout(ranks, data, {**axes, **settings}, layers=layers, tied=tied)


HYBRID = {"strategy": "fsdp", "sharding": "hybrid", "shard_size": 2}
LAYOUTS = {
    "ddp": Layout(4, 4, {"strategy": "ddp"}),
    "fsdp": Layout(4, 4, {"strategy": "fsdp"}),
    "fsdp grad-op": fsdp(sharding="grad-op"),
    "fsdp hybrid": Layout(4, 4, HYBRID),
    "fsdp hybrid, whole during a step": Layout(4, 4, {**HYBRID, "sharding": "HYBRID_SHARD_ZERO2", "zero_stage": 2}),
    "fsdp offload": fsdp(offload="cpu"),
    "fsdp by class": fsdp(wrap_class="FeedForward"),
    "zero 1": Layout(2, 2, {"zero_stage": 1}),
    "zero 2": Layout(2, 2, {"zero_stage": 2}),
    "zero 3": Layout(2, 2, {"zero_stage": 3}),
    "tensor": Layout(2, 1, {"tensor_parallel": 2}, tied=True),
    "pipeline gpipe": pipeline(2, 1, "gpipe", tied=True),
    "pipeline 1f1b": pipeline(2, 1, "1f1b", tied=True),
    "pipeline interleaved": pipeline(2, 1, "interleaved", tied=True),
    "pipeline zero-bubble": pipeline(2, 1, "zero-bubble", tied=True),
    "context": Layout(2, 1, {"context_parallel": 2}, tied=True),
    "context over 4": Layout(4, 1, {"context_parallel": 4}),
    "expert": Layout(2, 2, {"expert_parallel": 2}, "moe"),
    "expert over 4": Layout(4, 4, {"expert_parallel": 4}, "moe"),
    "fsdp of experts": Layout(2, 2, {"strategy": "fsdp"}, "moe"),
    # Pairs.
    "ddp x tensor": Layout(4, 2, {"strategy": "ddp", "tensor_parallel": 2, "activation_checkpointing": True}),
    "ddp x pipeline": pipeline(4, 2, strategy="ddp"),
    "ddp x pipeline zero-bubble": pipeline(4, 2, "zero-bubble", strategy="ddp"),
    "ddp x context": Layout(4, 2, {"strategy": "ddp", "context_parallel": 2}),
    "ddp x expert": Layout(4, 4, {"strategy": "ddp", "expert_parallel": 2}, "moe"),
    "fsdp x tensor": Layout(4, 2, {"strategy": "fsdp", "tensor_parallel": 2}, tied=True),
    "replicas x tensor": Layout(
        4, 2, {"strategy": "fsdp", "sharding": "hybrid-grad-op", "shard_size": 1, "tensor_parallel": 2}
    ),
    "fsdp x pipeline": pipeline(4, 2, strategy="fsdp", tied=True),
    "fsdp x pipeline interleaved": pipeline(4, 2, "interleaved", strategy="fsdp"),
    "fsdp x context": Layout(4, 2, {"strategy": "fsdp", "context_parallel": 2}),
    "fsdp x expert": Layout(4, 4, {"strategy": "fsdp", "expert_parallel": 2}, "moe"),
    "tensor x pipeline": pipeline(4, 1, tensor_parallel=2),
    # A stage that ends with the norm, whose output is a view: torch's split backward pass cannot detach one in place.
    "tensor x pipeline zero-bubble": pipeline(
        4, 1, "zero-bubble", tensor_parallel=2, pipeline_cuts="layers.1,layers.2,head"
    ),
    "tensor x context": Layout(4, 1, {"tensor_parallel": 2, "context_parallel": 2}),
    "pipeline x context": pipeline(4, 1, context_parallel=2),
    # Three axes.
    "hybrid x tensor": Layout(8, 4, {**HYBRID, "tensor_parallel": 2}),
    "pipeline x fsdp x tensor": pipeline(8, 2, strategy="fsdp", tensor_parallel=2),
    "pipeline x tensor x context": pipeline(8, 1, tensor_parallel=2, context_parallel=2),
}


def common(model: str, layers: int, dtype: str) -> dict[str, Any]:
    """What is the same on every layout. In float32 Adam would divide rounding errors by gradients hardly larger."""
    return {
        "name": model,
        "dtype": dtype,
        "optimizer": "adamw" if dtype == "float64" else "sgd",
        "samples": SAMPLES,
        "val_samples": 11,
        "epochs": 1,
        "gradient_clipping": 0.1,
        # The balance loss of experts is a mean over sequences; samples of the others differ in how many tokens count.
        "loss_weighting": "samples" if model == "moe" else "tokens",
        "shape": {"layers": layers},
    }


def split_settings(layout: Layout, accumulation: int) -> dict[str, Any]:
    """Return the settings that lay a global batch over the ranks of a layout."""
    batch_size = GLOBAL_BATCH // (layout.data * accumulation)
    return {"batch_size": batch_size, "gradient_accumulation_steps": accumulation, **layout.settings}


def run_one(layout: Layout, folder: str, model: str, dtype: str, accumulation: int) -> Trained:
    """Train on the ranks of a layout, with the same global batches as one process."""
    return train(folder, **common(model, layout.layers, dtype), **split_settings(layout, accumulation))


def differences(found: Trained, expected: Trained, *, norms: bool = True) -> dict[str, float]:
    """Return by how much weights, metrics and gradient norms differ, relative to the expected ones.

    Weights are relative to the largest of each tensor, if that is above 1. Only the main rank keeps the norms.
    """
    weights, metrics, gradient_norms = expected
    assert found[0].keys() == weights.keys()
    assert found[1].keys() == metrics.keys()
    here = {f"weights of {name}": difference(found[0][name], value) for name, value in weights.items()}
    here |= {name: abs(found[1][name] - value) / (abs(value) or 1.0) for name, value in metrics.items()}
    if norms:
        assert len(found[2]) == len(gradient_norms)
        pairs = enumerate(zip(found[2], gradient_norms, strict=True), 1)
        here |= {f"norm of step {step}": abs(ours - theirs) / theirs for step, (ours, theirs) in pairs}
    return here
