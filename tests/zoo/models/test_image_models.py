"""ResNet and ViT: shapes, learning, refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from phalanx.errors import ModelError
from phalanx.zoo.data import load
from phalanx.zoo.models import build


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny layers run faster on one thread, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "rate", "steps", "at_least"), [("resnet", 2e-2, 60, 0.75), ("vit", 2e-3, 40, 0.35)])
def test_it_learns_the_digits(name, rate, steps, at_least):
    torch.manual_seed(0)
    model = build(name)
    (images, labels), (unseen, truth) = load("digits").tensors, load("digits", "val").tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for start in range(0, steps * 64, 64):
        part = torch.arange(start, start + 64) % len(images)
        F.cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model.eval()(unseen).argmax(1) == truth).float().mean() > at_least


@pytest.mark.parametrize("preset", ["resnet18", "resnet50"])
def test_the_stages_of_a_resnet_halve_the_image(preset):
    model = build("resnet", preset=preset, width=4, classes=7).eval()
    sizes = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _module, _inputs, output: sizes.append(output.shape[-1]))
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 7)
    depths = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}[preset]
    assert sizes == [16 // 2**stage for stage, depth in enumerate(depths) for _ in range(depth)]


def test_residual_blocks_start_as_the_identity():
    block = build("resnet", depths=(2,)).layers[1]
    images = torch.rand(2, 16, 8, 8)
    assert isinstance(block.shortcut, nn.Identity)
    assert torch.equal(block(images), images)


def test_a_vit_sees_where_a_patch_is():
    torch.manual_seed(0)
    model = build("vit").eval()
    images = torch.randn(1, 1, 8, 8)
    assert not torch.allclose(model(images), model(images.flip(-1)), atol=1e-4)


def test_images_that_do_not_fit_are_refused():
    with pytest.raises(ModelError, match=r"\(9, 9\) pixels given to a ViT of image_size=8"):
        build("vit")(torch.zeros(1, 1, 9, 9))
    with pytest.raises(ModelError, match="cannot be cut into patches of patch_size=3"):
        build("vit", patch_size=3)
    with pytest.raises(ModelError, match="cannot be split into heads=5"):
        build("vit", heads=5)
    with pytest.raises(ModelError, match="stem=5"):
        build("resnet", stem=5)


@pytest.mark.parametrize(("name", "options"), [("vit", {"layers": 3}), ("resnet", {"depths": (1, 2)})])
def test_drop_path_leaves_branches_out_in_training_alone(name, options):
    torch.manual_seed(0)
    model = build(name, drop_path=0.5, **options)
    assert [getattr(layer.drop_path, "share", 0) for layer in model.layers] == [0, 0.25, 0.5]
    images = torch.randn(64, 1, 8, 8)
    plain = build(name, **options)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(images), plain.eval()(images))
    model.train()
    branch = torch.ones(2000, 3, 4)
    kept = model.layers[-1].drop_path(branch)
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(kept, kept[:, :1, :1].expand_as(kept)), "a sample keeps its whole branch or nothing of it"
    assert kept.mean() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", ["vit", "resnet"])
@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_drop_path_is_a_share(name, share):
    with pytest.raises(ModelError, match="is not a share of samples: from 0 to below 1"):
        build(name, drop_path=share)
