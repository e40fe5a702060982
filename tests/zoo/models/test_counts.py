"""Parameters and operations: closed forms against counting, and against the published sizes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from phalanx.zoo.models.registry import build, names, presets

PUBLISHED = {
    ("gpt", "gpt2"): 124_439_808,
    ("gpt", "gpt2-medium"): 354_823_168,
    ("gpt", "gpt2-large"): 774_030_080,
    ("gpt", "gpt2-xl"): 1_557_611_200,
    ("gpt", "1.5b"): 1_557_611_200,
    ("llama", "1b"): 1_235_814_400,
    ("llama", "3b"): 3_212_749_824,
    ("llama", "7b"): 6_738_415_616,
    ("llama", "8b"): 8_030_261_248,
    ("llama", "70b"): 70_553_706_496,
    ("moe", "8x7b"): 46_702_792_704,
    ("resnet", "resnet18"): 11_689_512,
    ("resnet", "resnet50"): 25_557_032,
    ("vit", "tiny"): 5_717_416,
    ("vit", "base"): 86_567_656,
}
WITH_PRESETS = [name for name in names() if name not in ("mlp", "convnet")]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny layers run faster on one thread, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", WITH_PRESETS)
def test_every_preset_has_the_parameters_of_its_formula(name):
    for preset, config in presets(name).items():
        with torch.device("meta"):
            counted = build(name, preset=preset).num_parameters()
        assert counted == config.num_parameters() == PUBLISHED.get((name, preset), counted), preset


@pytest.mark.parametrize("name", WITH_PRESETS)
def test_the_debug_preset_is_small(name):
    stacks = 2 if name == "t5" else 1  # an encoder and a decoder
    assert 10_000 < presets(name)["debug"].num_parameters() < 130_000 * stacks


def test_models_without_presets_say_so_and_count():
    assert presets("mlp") == presets("convnet") == {}
    for model in (build("mlp", hidden=(5, 4)), build("convnet")):
        assert model.num_parameters() == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt", {"tie_weights": False}),
        ("gpt", {"bias": False}),
        ("llama", {"tie_weights": True}),
        ("moe", {"tie_weights": True, "experts": 3}),
        ("vit", {"channels": 3}),
        ("resnet", {"bottleneck": True, "stem": 7, "depths": (2, 1, 1)}),
    ],
)
def test_formulas_follow_changes(name, changes):
    model = build(name, **changes)
    assert model.config.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    assert model.config.num_parameters() != presets(name)["debug"].num_parameters()


def test_parameters_that_multiply():
    """A looked-up embedding does not multiply; a tied one does, as the head."""
    for name, positions in (("gpt", 64), ("llama", 0)):
        tied, untied = (build(name, tie_weights=tie) for tie in (True, False))
        width = tied.config.hidden
        assert untied.num_parameters() == tied.num_parameters() + 256 * width
        assert untied.num_parameters(embeddings=False) == tied.num_parameters(embeddings=False)
        assert tied.num_parameters() - tied.num_parameters(embeddings=False) == positions * width
    moe = build("moe")
    assert moe.num_parameters() - moe.num_parameters(active=True) == 2 * 2 * 3 * 48 * 64


@pytest.mark.parametrize(("name", "time"), [("gpt", 16), ("llama", 16), ("moe", 16), ("gpt", None), ("llama", None)])
def test_flops_of_tokens_equal_those_counted(name, time):
    model = build(name)
    tokens = torch.randint(256, (2, time or model.config.seq_len))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).loss.backward()
    assert counter.get_total_flops() == tokens.numel() * model.flops_per_token(time)


@pytest.mark.parametrize(
    ("name", "changes", "size"),
    [
        ("vit", {}, 8),
        ("resnet", {}, 8),
        ("resnet", {"bottleneck": True, "depths": (1, 2)}, 9),
        ("resnet", {"stem": 7}, 33),
        ("convnet", {"image_size": 10, "width": 4}, 10),
        ("mlp", {"hidden": (5, 4)}, 8),
    ],
)
def test_flops_of_images_equal_those_counted(name, changes, size):
    model = build(name, **changes)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.randn(3, 1, size, size)).sum().backward()
    expected = model.flops_per_sample(size) if name == "resnet" else model.flops_per_sample()
    assert counter.get_total_flops() == 3 * expected


def test_the_published_cost_of_resnet50():
    """4.09 billion multiply-adds forward for an image of 224 x 224."""
    assert presets("resnet")["resnet50"].flops_per_sample() / 6 == pytest.approx(4.09e9, rel=0.02)
