"""Linear layers in 4 bits: how far weights move, what is computed and learned, what is stored, and the way back."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx
from phalanx.config import DistributedConfig
from phalanx.errors import ConfigError, UsageError
from phalanx.loop.model_setup import adapt
from phalanx.zoo.models import build
from phalanx.zoo.models.lora.nf4 import NF4Linear, dequantise, quantise, quantise_base, quantise_layer, restore_base


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build("llama", layers=2)


@pytest.mark.parametrize("features", [64, 130])
def test_weights_come_back_within_a_level_and_stay_there(features):
    weight = 0.02 * torch.randn(50, features, generator=torch.Generator().manual_seed(0))
    packed = quantise(weight)
    found = dequantise(packed, features, torch.float32)
    assert packed.shape == (50, 34 * -(-features // 64))
    assert (found - weight).norm() / weight.norm() < 0.1
    # The widest gap between levels is 0.304: no weight moves by more than half of it, in parts of its block's largest.
    blocks = F.pad(weight, (0, -features % 64)).view(50, -1, 64).abs().amax(-1, keepdim=True)
    assert (F.pad(found - weight, (0, -features % 64)).view(50, -1, 64).abs() <= 0.156 * blocks).all()
    assert torch.equal(quantise(found), packed)


def test_a_block_of_zeros_stays_zero():
    assert not dequantise(quantise(torch.zeros(2, 64)), 64, torch.float32).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_layer_computes_with_the_weights_that_come_back(dtype):
    layer = nn.Linear(96, 32)
    quantise_layer(layer)
    weight = dequantise(layer.weight, 96, dtype)
    inputs = torch.randn(5, 96, dtype=dtype, requires_grad=True)
    other = inputs.detach().clone().requires_grad_()
    expected = F.linear(other, weight) + layer.bias.to(dtype)
    found = layer(inputs)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(inputs.grad, other.grad)


def test_autocast_decides_the_type():
    layer = nn.Linear(64, 32)
    quantise_layer(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 64)).dtype is torch.bfloat16


def test_a_base_takes_a_quarter_of_bfloat16_and_only_adapters_are_trained():
    model = build("llama", layers=2, hidden=256, ffn_hidden=512)
    linear = sum(p.numel() for p in model.layers.parameters() if p.ndim == 2)
    adapt(model, DistributedConfig(lora_rank=2, lora_base="nf4"))
    packed = sum(m.weight.nbytes for m in model.modules() if isinstance(m, NF4Linear))
    assert packed == linear * 4.25 / 8
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".lora." in name for name in trained)
    assert type(model.head) is not NF4Linear


def test_merging_gives_plain_layers_that_compute_the_same():
    model = small()
    adapt(model, DistributedConfig(lora_rank=2, lora_base="nf4", lora_targets="query,up"))
    for adapter in phalanx.zoo.models.lora.adapters(model).values():
        nn.init.normal_(adapter.B, std=0.1)
    tokens = torch.randint(256, (2, 16))
    expected = model(tokens)
    merged = phalanx.remove_lora(phalanx.merge_lora(copy.deepcopy(model)))
    assert merged.state_dict().keys() == small().state_dict().keys()
    assert not any(isinstance(module, NF4Linear) for module in merged.modules())
    assert (merged(tokens) - expected).abs().max() < 1e-5


def test_adapters_are_saved_and_loaded_as_those_of_a_plain_base(tmp_path):
    model = small()
    adapt(model, DistributedConfig(lora_rank=2, lora_base="nf4"))
    for adapter in phalanx.zoo.models.lora.adapters(model).values():
        nn.init.normal_(adapter.B, std=0.1)
    phalanx.save_adapter(model, tmp_path)
    other = small()
    quantise_base(other, other.layers)
    phalanx.load_adapter(other, tmp_path)
    tokens = torch.randint(256, (2, 16))
    assert torch.equal(other(tokens), model(tokens))
    restore_base(other)
    assert (other(tokens) - model(tokens)).abs().max() < 1e-5


def test_adapting_twice_changes_nothing():
    model, config = small(), DistributedConfig(lora_rank=2, lora_base="nf4")
    adapt(model, config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adapt(model, config)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_compiled_layers_compute_the_same():
    model = small()
    adapt(model, DistributedConfig(lora_rank=2, lora_base="nf4"))
    tokens = torch.randint(256, (2, 16))
    expected = model(tokens)
    for layer, name in model.compile_regions():
        setattr(layer, name, torch.compile(getattr(layer, name), backend="aot_eager"))
    assert (model(tokens) - expected).abs().max() < 1e-5


def test_what_cannot_be_done_is_refused_with_what_to_write():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(4, 2))
    with pytest.raises(UsageError, match="the blocks of Sequential have no linear layer to keep in 4 bits"):
        quantise_base(model, [])
    for settings in ({"pipeline_parallel": 2}, {"strategy": "diloco", "sync_every": 2}):
        with pytest.raises(ConfigError, match="lora_base = 'nf4' with"):
            DistributedConfig(lora_rank=2, lora_base="nf4", num_workers=2, **settings)
    with pytest.raises(ConfigError, match="lora_base"):
        DistributedConfig(lora_base="nf4")
    with pytest.raises(ConfigError, match="lora_base = 'int8': not one of"):
        DistributedConfig(lora_rank=2, lora_base="int8")
