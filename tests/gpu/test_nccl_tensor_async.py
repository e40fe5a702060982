"""Tensor products that overlap with their communication, by two nccl ranks on one GPU.

`SHARING_REHEARSAL=cpu` runs the same bodies on CPU ranks, where nothing overlaps.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
import torch
from command import finish, start

from phalanx.strategies.tensor_overlap import ALLOW_SHARED
from phalanx.torch_compat import has_triton

REHEARSAL = os.environ.get("SHARING_REHEARSAL") == "cpu"
ON_GPU = torch.cuda.is_available() and not REHEARSAL
DEVICE = ("--share-gpus",) if ON_GPU else ("--device", "cpu")
FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")

pytestmark = pytest.mark.skipif(not REHEARSAL and not (ON_GPU and has_triton()), reason="needs a GPU and Triton")


def train(model: str, folder: Path, *, overlap: bool) -> tuple[list[float], str]:
    """Train a model of two layers, compiled, in bf16; return the losses of its steps and the trace of rank 0."""
    words = ("train", model, "--num-workers", 2, "--tensor-parallel", 2, "--compile", "--mixed-precision", "bf16")
    more = ("--max-steps", 8, "--batch-size", 4, "--log-every-n-steps", 1, "--profile", "steps=6:7", "--run-dir", "run")
    shape = ("--set", "model.layers=2")
    folder.mkdir()
    process = start(*words, *more, *shape, *DEVICE, cwd=folder, **{ALLOW_SHARED: str(int(overlap))})
    answer = finish(process, 280)
    assert answer.code == 0, answer.text
    assert "do not overlap" not in answer.text, "ranks that share a GPU do not expect it"
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    losses = [event["loss"] for event in map(json.loads, lines) if event["event"] == "step"]
    with gzip.open(folder / "run" / "profile" / "rank-0.json.gz", "rt") as trace:
        return losses, trace.read()


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_the_numbers_are_those_of_products_that_wait(tmp_path, model):
    expected, waiting = train(model, tmp_path / "waits", overlap=False)
    losses, overlapped = train(model, tmp_path / "overlaps", overlap=True)
    assert len(losses) == len(expected) == 8
    assert losses == pytest.approx(expected, rel=5e-3)
    for name in FUSED:
        assert name not in waiting
        assert (name in overlapped) == ON_GPU, name
