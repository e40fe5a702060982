"""The reference models: shapes, sizes, causality, and that they learn."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from phalanx.errors import ModelError, UsageError
from phalanx.zoo.data import load
from phalanx.zoo.models.gpt import GPT, GPTConfig, gpt
from phalanx.zoo.models.registry import build, names


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny layers run faster on one thread, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_names_are_listed_without_torch():
    code = "import sys; from phalanx.zoo.models import names; names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert names() == ["bert", "convnet", "gpt", "llama", "mlp", "moe", "resnet", "t5", "vit"]


def test_mistakes_get_the_nearest_name():
    with pytest.raises(UsageError, match="Did you mean 'convnet'"):
        build("convnett")
    with pytest.raises(UsageError, match="Did you mean 'hidden'"):
        build("mlp", hiden=3)
    with pytest.raises(UsageError, match="Did you mean 'debug'"):
        build("gpt", preset="debgu")
    with pytest.raises(UsageError, match="Did you mean 'layers'"):
        build("gpt", layer=3)
    with pytest.raises(ModelError, match="cannot be split"):
        GPTConfig(hidden=10, heads=3)
    with pytest.raises(ModelError, match="halved twice"):
        build("convnet", image_size=3)


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("mlp", {}, (1, 8, 8)),
        ("mlp", {"in_features": 6, "hidden": (5, 4), "out_features": 10}, (6,)),
        ("convnet", {}, (1, 8, 8)),
        ("convnet", {"image_size": 28, "dropout": 0.1}, (1, 28, 28)),
        ("convnet", {"image_size": 32, "channels": 3, "width": 8}, (3, 32, 32)),
    ],
)
def test_classifiers_score_ten_classes(name, options, shape):
    assert build(name, **options)(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize(("name", "options"), [("mlp", {}), ("convnet", {"width": 8})])
def test_classifiers_learn_the_digits(name, options):
    torch.manual_seed(0)
    model = build(name, **options)
    (images, labels), (unseen, truth) = load("digits").tensors, load("digits", "val").tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for start in range(0, 30 * 64, 64):
        part = torch.arange(start, start + 64) % len(images)
        F.cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model(unseen).argmax(1) == truth).float().mean() > 0.75


def test_gpt_starts_near_the_uniform_loss_and_learns():
    torch.manual_seed(0)
    model = gpt("debug", dropout=0.1)
    tokens = torch.randint(256, (4, 33))
    first = model(tokens[:, :-1], tokens[:, 1:])
    assert first.loss.item() == pytest.approx(math.log(256), rel=0.05)
    assert first.logits is None, "training needs none"
    assert model.eval()(tokens[:, :-1], tokens[:, 1:]).logits.shape == (4, 32, 256)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        optimizer.step()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert loss.item() < first.loss.item() - 1


def test_gpt_is_causal_and_ignores_masked_targets():
    model = gpt("debug").eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10], after[:, 10])
    targets = tokens.clone()
    targets[0, 5:] = -100
    torch.testing.assert_close(model(tokens, targets).loss, F.cross_entropy(before[0, :5], tokens[0, :5]))
    with pytest.raises(ModelError, match="longer than seq_len=64"):
        model(torch.zeros(1, 65, dtype=torch.int64))


def test_gpt_generates():
    torch.manual_seed(0)
    model = gpt("debug")
    start = torch.randint(256, (2, 3))
    greedy = model.generate(start, 70, temperature=0)
    assert greedy.shape == (2, 73)
    assert torch.equal(greedy[:, :3], start)
    assert torch.equal(model.generate(start, 70, top_k=1), greedy)
    seeded = [model.generate(start, 8, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*seeded)
    assert model.training


def test_gpt_from_the_meta_device_gets_its_weights():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.init_weights()
    torch.manual_seed(3)
    reference = GPT(GPTConfig())
    torch.manual_seed(3)
    reference.init_weights()
    assert model.head.weight is model.embed.tokens.weight
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), reference.parameters(), strict=True))
    spread = {name: parameter.std().item() for name, parameter in model.named_parameters()}
    assert spread["layers.0.feed.expand.weight"] == pytest.approx(0.02, rel=0.1)
    assert spread["layers.0.feed.project.weight"] == pytest.approx(0.01, rel=0.1)


def test_no_file_of_the_package_hides_a_public_name():
    """Importing a submodule sets it on the package, in place of a lazily found function of that name."""
    import phalanx.zoo.models

    files = {path.stem for path in Path(phalanx.zoo.models.__file__).parent.glob("*.py")}
    assert not files & set(phalanx.zoo.models.__all__)
    assert all(callable(getattr(phalanx.zoo.models, name)) for name in phalanx.zoo.models.__all__)
