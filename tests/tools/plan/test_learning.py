"""Predicted against measured: what a run records of itself, and the factors that the next plan uses."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from packages import on_first_use
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.observe.goodput import Account
from phalanx.tools.plan import presets
from phalanx.tools.plan.cluster import Cluster
from phalanx.tools.plan.estimator import estimate
from phalanx.tools.plan.hf_config import shape_of
from phalanx.tools.plan.learning import Component, RunComparison, compare, job_of, keep_factors
from phalanx.tools.plan.plans import Goal, Layout
from phalanx.tools.plan.rules import settings_of
from phalanx.world.mesh import Mesh
from phalanx.zoo.models import registry

transformers = on_first_use("transformers")

H100 = ("NVIDIA H100 80GB HBM3", 79.1)


@pytest.fixture(autouse=True)
def config_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def account(step_seconds: float, global_batch: int, **seconds: float) -> Account:
    spent = {"productive": 100.0, "data_wait": 0.0, **seconds}
    return Account(spent, 1, 10, 0, global_batch / step_seconds, 0.4, global_batch / step_seconds)


def recorded(config: DistributedConfig, mesh: Mesh, batch_size: int, gpu: tuple[str, float] = H100) -> dict[str, Any]:
    """The event `run_started` of a run of GPT-2, as its loop writes it."""
    shape = presets.model("gpt2")
    dimensions = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape) if field.name != "name"}
    model = {"name": "gpt2", "dimensions": dimensions}
    job = {"model": model, "settings": config.given(), "gpu": gpu[0], "gpu_memory_gib": gpu[1]}
    sizes = {"batch_size": batch_size, "global_batch": batch_size, "parameters": shape.parameters}
    return json.loads(json.dumps({"job": job, "mesh": mesh.sizes, "precision": "bf16", **sizes}))


def a_run(step_seconds: float, layout: Layout, memory_gib: float = 30.0, **seconds: float) -> RunComparison:
    goal = Goal(global_batch=64, seq_len=1024)
    config = DistributedConfig(**settings_of(layout, goal, Cluster(gpu="h100", gpus=8)))
    started = {**recorded(config, layout.mesh, layout.micro_batch), "global_batch": goal.global_batch}
    rate = goal.global_batch / step_seconds
    step = {"tokens_per_second": rate * 1024, "samples_per_second": rate, "memory_bytes": int(memory_gib * 2**30)}
    found = compare(started, [step], account(step_seconds, goal.global_batch, **seconds))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_replicate=8, micro_batch=4, zero_stage=0),
        Layout(dp_shard=8, micro_batch=8, zero_stage=3, recompute="full"),
        Layout(dp_shard=4, dp_replicate=2, micro_batch=2, zero_stage=3),
        Layout(tp=2, dp_shard=4, micro_batch=2, zero_stage=3, sequence_parallel=True),
    ],
)
def test_a_run_records_the_layout_that_was_planned(layout):
    goal = Goal(global_batch=64, seq_len=1024)
    config = DistributedConfig(**settings_of(layout, goal, Cluster(gpu="h100", gpus=8)))
    found = job_of(recorded(config, layout.mesh, layout.micro_batch)).layout
    names = ("tp", "pp", "dp_replicate", "dp_shard", "micro_batch", "recompute", "stage", "sequence_parallel", "gpus")
    assert {name: getattr(found, name) for name in names} == {name: getattr(layout, name) for name in names}


def test_factors_make_the_next_prediction_that_of_the_run():
    layout = Layout(dp_replicate=8, micro_batch=8, zero_stage=0)
    first = a_run(0.2, layout)
    assert first.gpu == "h100"
    before = presets.parts_of(Cluster(gpu="h100", gpus=8))[0]
    kept = keep_factors(first, "mine")
    assert kept["kernels"] == pytest.approx(first.factor("step"), rel=1e-3)
    after = presets.parts_of(Cluster(gpu="h100", gpus=8))[0]
    assert after.matmul == pytest.approx(before.matmul / kept["kernels"])
    assert abs(a_run(0.2, layout).factor("step") - 1) < 0.1 * abs(first.factor("step") - 1)


def test_factors_of_several_runs_multiply_and_belong_to_one_gpu():
    for _ in range(2):
        keep_factors(RunComparison("h100", (Component("step", "s", 1.0, 1.5), Component("memory", "GiB", 10, 11))), "r")
    kept = presets.measured("factors")["h100"]
    assert (kept["kernels"], kept["memory_gib"]) == (2.25, 2.0)
    assert presets.parts_of(Cluster(gpu="a100", gpus=8))[0] == presets.gpu("a100")
    plan_row = estimate("gpt2", "1xh100", Layout(micro_batch=1), Goal(global_batch=1, seq_len=1024))
    assert plan_row.step_seconds > 0


def test_communication_that_was_counted_is_apart():
    found = a_run(0.2, Layout(dp_replicate=8, micro_batch=8, zero_stage=0), communication=0.5)
    names = {each.name: each for each in found.components}
    assert names["exposed communication"].measured == pytest.approx(0.05)
    assert names["computation"].measured == pytest.approx(0.15)


def test_a_run_without_a_description_has_no_comparison():
    assert compare({"precision": "bf16", "global_batch": 8}, [{}], account(1.0, 8)) is None


def test_an_unknown_gpu_is_named():
    step = {"tokens_per_second": 8 * 1024.0, "samples_per_second": 8.0}
    with pytest.raises(UsageError, match="does not know the GPU 'Radeon'"):
        compare(recorded(DistributedConfig(), Mesh(), 8, ("Radeon", 16.0)), [step], account(1.0, 8))


@pytest.mark.parametrize("name", ["gpt", "llama", "moe", "vit"])
def test_the_shape_of_our_models(name):
    model = registry.build(name, preset="debug")
    assert shape_of(model).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_the_shape_of_a_hugging_face_model():
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100, intermediate_size=128
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert shape_of(model).parameters == sum(parameter.numel() for parameter in model.parameters())
    config.model_type = "of-next-year"
    assert shape_of(model) is None
    assert shape_of(nn.Linear(2, 2)) is None


def test_a_run_whose_parameters_differ_from_its_dimensions_is_not_compared():
    started = recorded(DistributedConfig(), Mesh(), 8)
    assert job_of(started) is not None
    assert job_of({**started, "parameters": started["parameters"] * 2}) is None


def test_a_run_folder_written_before_is_still_compared():
    shape = {"name": "gpt2", "layers": 12, "hidden": 768, "heads": 12, "vocab": 50257, "positions": 1024}
    old = {"shape": shape, "layout": {"dp_replicate": 8}, "gpu": H100[0], "gpu_memory_gib": H100[1]}
    found = job_of({"job": {**old, "gpus_per_node": 8, "optimizer": "sgd", "compile": True}})
    assert (found.shape.hidden, found.layout.dp_replicate, found.optimizer, found.compile) == (768, 8, "sgd", True)
