"""The modes `fast` and `memory`, settings of recipes for GPUs, and compilation by region."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import PyTorchDDPTrainer
from phalanx.config import resolve
from phalanx.errors import ConfigError
from phalanx.recipes import load_recipe
from phalanx.speed.activations import spare_activations
from phalanx.speed.compilation import compile_in_place
from phalanx.zoo.models.gpt import gpt
from phalanx.zoo.models.llama import llama
from phalanx.zoo.models.moe import moe
from phalanx.zoo.models.vit import vit


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"fast": True}, {"mixed_precision": "fp8", "compile": True}),
        ({"fast": True, "mixed_precision": "bf16"}, {"mixed_precision": "bf16", "compile": True}),
        ({"fast": False}, {"mixed_precision": False, "compile": False}),
        ({"memory": True}, {"optimizer": "adamw8bit", "activation_checkpointing": "budget 0.4", "compile": True}),
        ({"memory": True, "compile": False}, {"compile": False, "activation_checkpointing": True}),
        ({"memory": True, "optimizer": "sgd"}, {"optimizer": "sgd", "activation_checkpointing": "budget 0.4"}),
        ({"fast": True, "memory": True}, {"mixed_precision": "fp8", "optimizer": "adamw8bit", "compile": True}),
    ],
    ids=str,
)
def test_a_mode_is_several_settings(given, expected):
    config = resolve(given).config
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_mode_in_a_file_yields_to_a_flag(tmp_path):
    (tmp_path / "run.toml").write_text("memory = true\n")
    resolved = resolve({"optimizer": "adam"}, given_as="flag", file=tmp_path / "run.toml")
    assert (resolved.config.optimizer, resolved.config.compile) == ("adam", True)
    assert resolved.origins["compile"] == f"file {tmp_path / 'run.toml'}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"activation_checkpointing": "budget 0.5"}, "needs compiled blocks: write compile = true"),
        ({"activation_checkpointing": "budget 2", "compile": True}, "'budget <share from 0 to 1>'"),
        ({"activation_checkpointing": "budget 0.5", "compile": True, "activation_offload": True}, "leave one of them"),
        ({"optimizer": "adamw8bit", "strategy": "local-sgd"}, "local-sgd, which averages states over ranks"),
        ({"optimizer": "adamw8bit", "strategy": "deepspeed"}, "deepspeed, which takes the steps itself: write adamw"),
        ({"mixed_precision": "fp6"}, "Did you mean"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        resolve(given)


def test_settings_of_a_recipe_for_gpus_apply_on_gpus_alone():
    recipe = load_recipe("gpt")
    assert resolve({}, **recipe.settings_for(0)).config.compile is False
    on_gpus = resolve({}, **recipe.settings_for(1))
    assert (on_gpus.config.compile, on_gpus.config.mixed_precision) == (True, "bf16")
    assert on_gpus.origins["compile"] == "recipe gpt"
    assert resolve({"device": "cpu"}, **recipe.settings_for(1)).config.compile is False
    assert resolve({"mixed_precision": False}, **recipe.settings_for(1)).config.mixed_precision is False


@pytest.mark.parametrize("name", ["imagefolder", "mnist"])
def test_recipes_for_images_are_channels_last_in_bf16_on_gpus(name):
    recipe, given = load_recipe(name), {}
    on_gpus = resolve(given, **recipe.settings_for(1)).config
    assert (on_gpus.channels_last, on_gpus.mixed_precision, on_gpus.compile) == (True, "bf16", False)
    assert resolve(given, **recipe.settings_for(0)).config.channels_last is False
    sharded = resolve({**given, "strategy": "fsdp"}, **recipe.settings_for(1)).config
    assert (sharded.channels_last, sharded.mixed_precision) == (False, "bf16")


def test_settings_for_gpus_that_contradict_what_is_given_are_left_out():
    config = resolve({"debug": "nan"}, **load_recipe("gpt").settings_for(1)).config
    assert (config.debug, config.compile) == ("nan", False)


@pytest.mark.parametrize("recompute", [False, "full", "selective"])
@pytest.mark.parametrize("make", [gpt, llama], ids=["gpt", "llama"])
def test_all_layers_are_compiled_once(make, recompute):
    model = make("debug", layers=4)
    before = [layer.forward for layer in model.layers]
    if recompute:
        config = resolve({"activation_checkpointing": recompute, "compile": True}).config
        spare_activations(model, config)
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        compiler = torch.compile
        patch.setattr(torch, "compile", lambda function, **options: compiler(function, backend=count, **options))
        undo = compile_in_place(model)
    tokens = torch.randint(256, (2, 64))
    model(tokens, tokens).loss.backward()
    assert len(graphs) == 1
    undo()
    if not recompute:
        assert [layer.forward for layer in model.layers] == before


def test_layers_of_a_vision_transformer_are_compiled_one_by_one():
    model = vit("debug")
    assert model.compile_regions() == [(layer, "forward") for layer in model.layers]


def test_experts_are_not_compiled_whose_shapes_change():
    regions = moe("debug").compile_regions()
    assert regions
    assert {type(module).__name__ for module, _ in regions} == {"Attention"}


def test_a_model_without_regions_is_compiled_as_a_whole():
    model = nn.Sequential(nn.Linear(4, 4))
    undo = compile_in_place(model)
    assert model._compiled_call_impl is not None
    undo()
    assert model._compiled_call_impl is None


@pytest.mark.parametrize(
    ("make", "batch"), [(gpt, torch.zeros(2, 64, dtype=torch.long)), (vit, torch.zeros(2, 1, 8, 8))], ids=["gpt", "vit"]
)
def test_the_residual_stream_is_bf16_under_autocast_alone(make, batch):
    model = make("debug")
    seen = []
    model.layers[1].register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        model(batch)
    assert seen == [torch.float32, torch.bfloat16]


def test_an_optimizer_that_is_given_beside_the_memory_mode_is_used_and_said(tmp_path):
    model = nn.Linear(4, 2)
    trainer = PyTorchDDPTrainer(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
        memory=True,
        activation_checkpointing=False,
        compile=False,
        batch_size=4,
        max_steps=1,
    )
    with pytest.warns(UserWarning, match="the optimizer that was given is used, and not adamw8bit"):
        trainer.fit(TensorDataset(torch.randn(4, 4), torch.randn(4, 2)), run_dir=tmp_path)
