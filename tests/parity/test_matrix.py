"""The equivalence matrix: every strategy, and every pair that goes together, trains what one process trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from layouts import assert_same, train
from long_proofs import ALL, long_proof

GLOBAL_BATCH = 16
SAMPLES = 4 * GLOBAL_BATCH + 5  # five steps, the last of them ragged: 5 samples for up to 4 data ranks
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
RUNS = [("float64", 1), ("float64", 4), ("float32", 1), ("float32", 4)] if ALL else [("float64", 4)]
"""The strictest comparison of each layout, or all of them."""
pytestmark = pytest.mark.timeout(240)  # eight ranks on two cores


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


def runs(layout: Layout) -> list[tuple[str, str, int]]:
    """Model, dtype and accumulation of every run; all of them happen in one start of the ranks."""
    found = [(layout.model, dtype, accumulation) for dtype, accumulation in RUNS]
    return [*found, ("gpt", "float64", 4)] if layout.tied and (ALL or layout.ranks == 2) else found


@pytest.fixture(scope="session")
def one_process():
    """Return what one process gets from whole global batches, computed once for each model and dtype."""

    @cache
    def run(ranks: Any, folder: str, *kind: Any) -> Any:
        return ranks(lambda: train(folder, batch_size=GLOBAL_BATCH, **common(*kind)), world_size=1)[0]

    return run


IN_THREE_AXES = ("tensor x pipeline", "tensor x context", "pipeline x context", "fsdp x tensor", "replicas x tensor")
"""Pairs that are parts of a layout with three axes."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=long_proof) if n in IN_THREE_AXES else n for n in LAYOUTS])
def test_the_layout_equals_one_process(ranks, tmp_path, one_process, name):
    """Weights after five clipped steps, every step's gradient norm, and an evaluation, on every rank."""
    layout = LAYOUTS[name]

    def run_all():
        return [run_one(layout, str(tmp_path / "split"), *run) for run in runs(layout)]

    by_rank = ranks(run_all, world_size=layout.ranks)
    for number, run in enumerate(runs(layout)):
        expected = one_process(ranks, str(tmp_path / "one"), run[0], layout.layers, run[1])
        for rank, results in enumerate(by_rank):
            compare(results[number], expected, TOLERANCES[run[1]], f"{name} {run} rank {rank}", norms=rank == 0)


def run_one(layout: Layout, folder: str, model: str, dtype: str, accumulation: int) -> Any:
    split = {"batch_size": GLOBAL_BATCH // (layout.data * accumulation), "gradient_accumulation_steps": accumulation}
    return train(folder, **common(model, layout.layers, dtype), **split, **layout.settings)


def compare(found: Any, expected: Any, tolerance: float, where: str, *, norms: bool) -> None:
    weights, metrics, gradient_norms = expected
    assert len(gradient_norms) == 5
    assert min(gradient_norms) > 0.1, "clipping must be at work in every step"
    assert_same(found[0], weights, tolerance, where)
    assert found[1] == pytest.approx(metrics, rel=tolerance), where
    if norms:  # the main rank keeps the history
        assert found[2] == pytest.approx(gradient_norms, rel=tolerance), where
