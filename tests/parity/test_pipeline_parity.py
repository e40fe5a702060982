"""Pipelines beyond the matrix: models and loops of a user, checkpoints across layouts, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from layouts import SHAPE, assert_same, make_tokens, train
from long_proofs import long_proof
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.loop.formation import Formation
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.run.weights import whole_weights
from phalanx.strategies.base import local
from phalanx.strategies.pipeline.placement import cut_evenly
from phalanx.zoo.models.gpt import gpt
from phalanx.zoo.models.llama import llama


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((4, {"pipeline_parallel": 2, "strategy": "fsdp", "batch_size": 4}), (1, {"batch_size": 8})),
        ((1, {"batch_size": 8}), (2, {"pipeline_parallel": 2, "batch_size": 8})),
        pytest.param(
            (2, {"pipeline_parallel": 2, "batch_size": 8, "pipeline_schedule": "zero-bubble"}),
            (4, {"pipeline_parallel": 2, "tensor_parallel": 2, "batch_size": 8}),
            marks=long_proof,
        ),
    ],
)
def test_checkpoints_load_at_another_layout(ranks, tmp_path, first, second):
    """Saved mid-run on one layout and finished on another, as if it had never moved; the gpt's weights are tied."""
    place = {"checkpoint_dir": str(tmp_path / "ckpt")}

    def run(layout, **settings):
        world_size, split = layout
        common = {"shape": {"layers": 4}, **split, **settings}
        return ranks(lambda: train(str(tmp_path / "run"), "gpt", **common), world_size=world_size)[0][0]

    expected = run((1, {"batch_size": 8}), max_steps=4)
    run(first, max_steps=2, **place)
    assert_same(run(second, max_steps=4, resume_from_checkpoint=True, **place), expected, 1e-10)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_stop_and_resume_gives_the_same_bits(ranks, tmp_path, name):
    shape = {"layers": 2, **({"dropout": 0.2} if name == "gpt" else {})}
    common = {"name": name, "pipeline_parallel": 2, "batch_size": 4, "shape": shape}
    place = {"checkpoint_dir": str(tmp_path / "ckpt")}
    whole_run = ranks(lambda: train(str(tmp_path / "a"), max_steps=4, **common), world_size=2)
    ranks(lambda: train(str(tmp_path / "b"), max_steps=2, **common, **place), world_size=2)
    rest = ranks(
        lambda: train(str(tmp_path / "c"), max_steps=4, resume_from_checkpoint=True, **common, **place), world_size=2
    )
    for ours, theirs in zip(rest, whole_run, strict=True):
        assert_same(ours[0], theirs[0], 0.0)


def sequence(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(layers)), nn.Linear(6, 2)).double()


def fit_sequence(folder: str, **settings):
    """Numbers for targets, a loss function, and an optimizer that was made before the model was cut."""
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = DataLoader(TensorDataset(x, x[:, :2].sin()))
    model = sequence()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    config = DistributedConfig(device="cpu", progress=False, batch_size=8, epochs=1, **settings)
    task = TrainTask(model, data, data, loss_fn=nn.MSELoss(), optimizer=optimizer)
    for _ in range(2):  # the second fit finds the model cut already
        result = Job("fit", task, config, Path(folder)).run()
    predictions = Job("predict", TrainTask(model, None, data), config).run().predictions
    return whole_weights(model), result.history.epochs[-1].val, predictions


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_cuts": "1, 3", "pipeline_schedule": "gpipe", "microbatches": 2},
        {"pipeline_cuts": None},
        {"strategy": "fsdp"},
    ],
)
def test_a_sequential_model_of_the_user(ranks, tmp_path, settings):
    weights, metrics, expected = ranks(lambda: fit_sequence(str(tmp_path / "a")), world_size=1)[0]
    found = ranks(lambda: fit_sequence(str(tmp_path / "b"), pipeline_parallel=3, **settings), world_size=3)
    for ours, measured, _ in found:
        assert_same(ours, weights, 1e-10)
        assert measured == pytest.approx(metrics, rel=1e-10)
    assert (found[0][2] - expected).abs().max() < 1e-10


def test_custom_loops_train_a_pipeline_batch_by_batch(ranks):
    def run(**settings):
        torch.manual_seed(3)
        model = llama(**SHAPE).double()
        tokens, targets = make_tokens(8, 8, ignoring=False).tensors
        with Formation(device="cpu", **settings) as formation:
            wrapped, optimizer = formation.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            losses = []
            for _ in range(3):
                losses.append(formation.train_batch(wrapped, (tokens, targets)).item())
                formation.clip_grad_norm(1.0)
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                scores = wrapped(tokens)
            with pytest.raises(UsageError, match="train_batch"):
                wrapped(tokens) if settings else refuse()
        return losses, scores

    def refuse():
        raise UsageError("train_batch")

    losses, scores = ranks(run, world_size=1)[0]
    for ours, our_scores in ranks(lambda: run(pipeline_parallel=2), world_size=2):
        assert ours == pytest.approx(losses, rel=1e-10)
        assert (our_scores - scores).abs().max() < 1e-10


def test_a_model_built_on_the_meta_device_gets_its_stages(ranks):
    def build(**settings):
        with torch.device("meta"):
            model = gpt(**SHAPE)
        with Formation(device="cpu", pipeline_parallel=2, **settings) as formation:
            formation.prepare(model)
        held = sum(local(parameter).numel() for parameter in model.parameters())
        weights = whole_weights(model)
        finite = all(bool(value.isfinite().all()) for value in weights.values())
        return held, finite, torch.equal(weights["embed.tokens.weight"], weights["head.weight"])

    total = gpt(**SHAPE).num_parameters()
    for world_size in (2, 4):
        parts = ranks(lambda: build(strategy="fsdp"), world_size=world_size)
        assert all(finite and tied for _, finite, tied in parts)
        assert max(held for held, _, _ in parts) < 0.7 * total * 2 / world_size


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_the_parameters_of_the_whole_model_are_reported(ranks, tmp_path, schedule):
    """Not one rank's stages; and a matrix that two stages share is counted once."""
    settings = {"pipeline_parallel": 2, "pipeline_schedule": schedule, "batch_size": 8, "max_steps": 1}
    ranks(lambda: train(str(tmp_path), "gpt", shape={"layers": 4}, **settings), world_size=2)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    announced = next(event["parameters"] for event in events if event["event"] == "run_started")
    assert announced == gpt(**{**SHAPE, "layers": 4}).num_parameters()


def test_stages_are_balanced_by_cost():
    units = ["a", "b", "c", "d", "e"]
    assert cut_evenly(units, [1, 1, 1, 1, 4], 2) == [["a", "b", "c", "d"], ["e"]]
    assert cut_evenly(units, [9, 1, 1, 1, 1], 3) == [["a"], ["b", "c"], ["d", "e"]]
    assert cut_evenly(units, [0, 0, 0, 0, 0], 5) == [["a"], ["b"], ["c"], ["d"], ["e"]]


def test_a_slow_unit_gets_a_separate_stage(ranks, tmp_path):
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(300):
                x = self.layer(x).tanh()
            return x

    class Row(nn.Sequential):
        def example_inputs(self) -> tuple[torch.Tensor]:
            return (torch.zeros(2, 4),)

    def run():
        quick = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
        model = Row(*quick[:3], Slow(), quick[3])
        with Formation(device="cpu", pipeline_parallel=2, pipeline_cuts="measured") as formation:
            formation.prepare(model)
        return [name for name, _ in model.named_children()]

    assert ranks(run, world_size=2) == [["0", "1", "2"], ["3", "4"]]


BAD = {
    "3 pipeline stages need as many layers, and Llama has 2": (3, {"pipeline_parallel": 3, "batch_size": 4}),
    "4 pipeline stages": (2, {"pipeline_parallel": 2, "batch_size": 4, "pipeline_schedule": "interleaved"}),
    "batch of 4 samples cannot be cut into microbatches = 3\n.*can be: 2, 4": (2, {"microbatches": 3}),
    "'1f1b' on 2 ranks cannot run microbatches = 1\n.*can be: 2, 4": (2, {"microbatches": 1}),
    "batch of 1 samples is too small": (2, {"batch_size": 1}),
    "Did you mean 'layers.1'": (2, {"pipeline_cuts": "layer.1"}),
    "makes 3 stages, and the pipeline has 2": (2, {"pipeline_cuts": "layers.0,layers.1"}),
    "it has no pipeline_units": (2, {"name": "own", "model": nn.Bilinear(2, 2, 2)}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_pipelines_are_refused(ranks, tmp_path, message):
    world_size, settings = BAD[message]
    given = {"pipeline_parallel": 2, "batch_size": 4, "max_steps": 1, **settings}
    with pytest.raises(UsageError, match=message):
        ranks(lambda: train(str(tmp_path), **given), world_size=world_size)
