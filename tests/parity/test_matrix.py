"""The equivalence matrix: every strategy, and every pair that goes together, trains what one process trains."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from layouts import train
from long_proofs import ALL, long_proof
from matrix import GLOBAL_BATCH, LAYOUTS, TOLERANCES, Layout, Trained, common, differences, run_one

RUNS = [("float64", 1), ("float64", 4), ("float32", 1), ("float32", 4)] if ALL else [("float64", 2)]
"""The strictest comparison of each layout, with two passes for a step, or all of them."""


def runs(layout: Layout) -> list[tuple[str, str, int]]:
    """Model, dtype and accumulation of every run; all of them happen in one start of the ranks."""
    found = [(layout.model, dtype, accumulation) for dtype, accumulation in RUNS]
    return [*found, ("gpt", "float64", RUNS[-1][1])] if layout.tied and (ALL or layout.ranks == 2) else found


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


def compare(found: Trained, expected: Trained, tolerance: float, where: str, *, norms: bool) -> None:
    assert len(expected[2]) == 5
    assert min(expected[2]) > 0.1, "clipping must be at work in every step"
    apart = differences(found, expected, norms=norms)
    worst = max(apart, key=lambda name: apart[name])
    assert apart[worst] <= tolerance, f"{where}: {worst} differs by {apart[worst]}"
