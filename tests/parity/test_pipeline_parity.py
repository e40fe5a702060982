"""A pipeline equals one process: every schedule, alone and beside the other axes, and checkpoints across layouts."""

from __future__ import annotations

import pytest
from layouts import assert_same, train

ONE: dict[tuple, tuple] = {}


def compare(ranks, folder, name: str, world_size: int, split: dict, *, tolerance: float = 1e-10, **common) -> None:
    """37 samples in global batches of 8 are 5 steps with a ragged end; clipping by one norm of all parameters."""
    common = {"gradient_clipping": 0.5, "epochs": 1, "samples": 37, "shape": {"layers": 4}, **common}
    key = (name, *map(str, common.values()))
    if key not in ONE:
        ONE[key] = ranks(lambda: train(str(folder / "one"), name, batch_size=8, **common), world_size=1)[0]
    weights, metrics, norms = ONE[key]
    assert len(norms) == 5
    assert min(norms) > 0.5
    for rank, (ours, measured, our_norms) in enumerate(
        ranks(lambda: train(str(folder / "split"), name, **common, **split), world_size=world_size)
    ):
        assert_same(ours, weights, tolerance)
        assert measured == pytest.approx(metrics, rel=tolerance)
        if rank == 0:
            assert our_norms == pytest.approx(norms, rel=tolerance)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_every_schedule_equals_one_process(ranks, tmp_path, name, schedule):
    """The weights of gpt are tied: its first and its last stage share a matrix."""
    split = {"batch_size": 8, "pipeline_parallel": 2, "microbatches": 4, "pipeline_schedule": schedule}
    compare(ranks, tmp_path, name, 2, split)


BESIDE = {
    "pipeline 2 x fsdp 2": (4, {"strategy": "fsdp", "batch_size": 4}),
    "pipeline 2 x ddp 2, accumulated": (4, {"batch_size": 2, "gradient_accumulation_steps": 2}),
    "interleaved 2 x fsdp 2": (4, {"strategy": "fsdp", "batch_size": 4, "pipeline_schedule": "interleaved"}),
    "zero-bubble 2 x fsdp 2": (4, {"strategy": "fsdp", "batch_size": 4, "pipeline_schedule": "zero-bubble"}),
    "pipeline 2 x tensor 2": (4, {"tensor_parallel": 2, "batch_size": 8}),
    "pipeline 2 x fsdp 2 x tensor 2": (8, {"strategy": "fsdp", "tensor_parallel": 2, "batch_size": 4}),
}


@pytest.mark.parametrize("name", ["llama", "gpt"])
@pytest.mark.parametrize("layout", BESIDE)
def test_a_pipeline_beside_other_axes_equals_one_process(ranks, tmp_path, name, layout):
    world_size, split = BESIDE[layout]
    compare(ranks, tmp_path, name, world_size, {"pipeline_parallel": 2, **split}, loss_weighting="tokens")
