"""Augmentation on the device: numbers by position, each operation against a plain one, labels, schedules, mistakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.config import resolve
from phalanx.data.order import SampleKey
from phalanx.errors import DataError, UsageError
from phalanx.loop.metrics import cross_entropy, top5_accuracy
from phalanx.loop.task import TrainTask, check_task
from phalanx.loop.train_loop import ModelCall
from phalanx.zoo.data import colours
from phalanx.zoo.data.augment import Augment, betas, centre_crop, crop_matrices, sample, uniforms

EVERYTHING = {"crop": 16, "randaugment": "2,9", "mixup": 0.2, "cutmix": 1.0, "erasing": 0.25, "classes": 5}
PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}
"""Leaves pixels from 0 to 255."""


def batch_of(samples: int, size: int = 24) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(256, (samples, 3, size, size), dtype=torch.uint8, generator=draw), torch.arange(samples) % 5]


def part(batch: list[Tensor], first: int, end: int) -> list[Tensor]:
    return [each[first:end] for each in batch]


def test_numbers_are_uniform_and_those_of_a_place_alone():
    key, places = SampleKey(7, 3, 0), torch.arange(20_000)
    numbers = uniforms(key, places, 4, 0)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert numbers.mean(0).tolist() == pytest.approx([0.5] * 4, abs=0.01)
    assert numbers.var(0).tolist() == pytest.approx([1 / 12] * 4, abs=0.002)
    assert torch.corrcoef(numbers.t()).sub(torch.eye(4)).abs().max() < 0.03
    assert torch.corrcoef(torch.stack([numbers[1:, 0], numbers[:-1, 0]]))[0, 1].abs() < 0.03
    assert torch.equal(uniforms(key, places[50:60], 4, 0), numbers[50:60])
    for other in (SampleKey(8, 3, 0), SampleKey(7, 4, 0)):
        assert (uniforms(other, places[:100], 4, 0) == numbers[:100]).sum() < 3
    assert (uniforms(key, places[:100], 4, 1) == numbers[:100]).sum() < 3


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0])
def test_shares_have_the_moments_of_beta(alpha):
    drawn = betas(uniforms(SampleKey(0, 0, 0), torch.arange(50_000), 16, 0), alpha)
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.01)
    assert drawn.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), abs=0.003)
    assert betas(torch.zeros(1, 16), 0.01).isfinite().all()


@pytest.mark.parametrize("pieces", [[(0, 4), (4, 8)], [(0, 2), (2, 4), (4, 6), (6, 8)]], ids=["two", "four"])
def test_what_happens_to_a_sample_does_not_depend_on_the_batch_it_is_in(pieces):
    augment, batch = Augment(**EVERYTHING), batch_of(8)
    images, labels = augment(batch, SampleKey(0, 1, 16))
    found = [augment(part(batch, first, end), SampleKey(0, 1, 16 + first)) for first, end in pieces]
    torch.testing.assert_close(torch.cat([each[0] for each in found]), images, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat([each[1] for each in found]), labels)
    for other in (SampleKey(0, 2, 16), SampleKey(1, 1, 16), SampleKey(0, 1, 24)):
        assert not torch.allclose(augment(batch, other)[0], images)


def test_batches_keep_their_form_and_get_normalised_floats():
    images, labels = Augment(crop=16)(tuple(batch_of(4)), SampleKey(0, 0, 0))
    assert (images.shape, images.dtype, labels.tolist()) == ((4, 3, 16, 16), torch.float32, [0, 1, 2, 3])
    assert images.abs().max() < 3
    floats = [batch_of(4)[0] / 255, batch_of(4)[1]]
    torch.testing.assert_close(Augment(crop=16)(floats, SampleKey(0, 0, 0))[0], images, rtol=0, atol=1e-4)
    alone = Augment(crop=16)(batch_of(4)[0], None)
    assert isinstance(alone, Tensor), "predictions have no labels"
    assert torch.equal(alone, Augment(crop=16)(batch_of(4), None)[0])


def test_crops_cover_the_shares_that_were_asked_for_and_stay_inside():
    matrix = crop_matrices(uniforms(SampleKey(0, 0, 0), torch.arange(5000), 4, 0), (0.25, 0.5), 1.5)
    sides, middle = torch.stack([matrix[:, 0, 0], matrix[:, 1, 1]], 1), matrix[:, :2, 2]
    assert (middle.abs() + sides <= 1 + 1e-6).all()
    area = sides.prod(1)
    assert area.max() <= 0.5 + 1e-6
    assert (area >= 0.25 - 1e-6).float().mean() > 0.99
    ratio = 1.5 * sides[:, 0] / sides[:, 1]
    assert 0.74 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.35


def test_the_identity_and_a_flip_read_the_pixels_as_they_are():
    images = batch_of(2)[0].float()
    matrix = torch.eye(3).repeat(2, 1, 1)
    torch.testing.assert_close(sample(images, matrix, 24), images, rtol=0, atol=1e-3)
    matrix[:, 0, 0] = -1
    torch.testing.assert_close(sample(images, matrix, 24), images.flip(3), rtol=0, atol=1e-3)
    flips = Augment(crop=24, scale=(1.0, 1.0), **PLAIN)
    pixels = torch.arange(24.0).expand(200, 3, 24, 24).to(torch.uint8)
    first = flips([pixels, torch.zeros(200)], SampleKey(0, 0, 0))[0]
    share = (first[:, 0, 12, 0] > first[:, 0, 12, -1]).float().mean().item()
    assert 0.4 < share < 0.6


def test_evaluation_takes_the_middle():
    images = torch.zeros(1, 3, 64, 96)
    images[:, :, 16:48, 32:64] = 200.0
    assert (centre_crop(images, 32, 0.5) == 200).all()
    assert centre_crop(images, 32, 1.0).shape == (1, 3, 32, 32)
    expected = F.interpolate(images, (40, 60), mode="bilinear", antialias=True)[:, :, 4:36, 14:46]
    torch.testing.assert_close(centre_crop(images, 32, 0.8), expected)


def chosen(name: str, sign: float = 1.0) -> colours.ChosenOperations:
    return colours.ChosenOperations(torch.full((1,), colours.OPERATIONS.index(name)), torch.tensor([sign]))


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("identity", lambda images: images),
        ("rotate", lambda images: images),
        ("brightness", lambda images: images * 1.45),
        ("contrast", lambda images: 1.45 * images - 0.45 * luminance(images).mean()),
        ("colour", lambda images: 1.45 * images - 0.45 * luminance(images)),
        ("posterize", lambda images: images - images % 4),
        ("solarize", lambda images: torch.where(images >= 127.5, 255 - images, images)),
        ("autocontrast", lambda images: stretched(images)),
    ],
)
def test_colours_change_as_by_the_plain_operation(name, plain):
    images = batch_of(1)[0].float() * 0.5 + 40
    images = images.floor()
    found = colours.coloured(images, chosen(name), 15)
    torch.testing.assert_close(found, plain(images).clamp(0, 255), rtol=0, atol=1e-2)


def test_all_images_at_once_are_changed_as_one_by_one(monkeypatch):
    images, chosen = batch_of(28)[0].float(), colours.ChosenOperations(torch.arange(28) % 14, torch.ones(28))
    expected = colours.coloured(images, chosen, 9)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(colours.coloured(images, chosen, 9), expected)


def luminance(images: Tensor) -> Tensor:
    return (images * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)


def stretched(images: Tensor) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return (images - low) / (high - low) * 255


@pytest.mark.parametrize("levels", [256, 40, 2])
def test_equalized_images_are_those_of_pillow(levels):
    image, operations = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageOps")
    pixels = (batch_of(4)[0] // (256 // levels)).repeat(1, 1, 3, 3)
    found = colours.coloured(pixels.float(), colours.ChosenOperations(torch.full((4,), 13), torch.ones(4)), 9)
    for number in range(4):
        picture = operations.equalize(image.fromarray(pixels[number].permute(1, 2, 0).numpy()))
        expected = torch.tensor(list(picture.tobytes())).view(72, 72, 3).permute(2, 0, 1)
        assert torch.equal(found[number], expected.float())


def test_sharpness_and_geometry_are_those_of_pillow():
    image = pytest.importorskip("PIL.Image")
    enhance = pytest.importorskip("PIL.ImageEnhance")
    pixels = batch_of(1)[0]
    picture = image.fromarray(pixels[0].permute(1, 2, 0).numpy())
    expected = torch.tensor(list(enhance.Sharpness(picture).enhance(1.45).tobytes())).view(24, 24, 3).permute(2, 0, 1)
    found = colours.coloured(pixels.float(), chosen("sharpness"), 15)[0]
    assert (found - expected).abs().max() <= 1.5, "Pillow rounds twice"
    turned = sample(pixels.float(), colours.moved(chosen("rotate", -1.0), 30), 24)
    rotated = picture.rotate(-30, resample=image.Resampling.BILINEAR)
    reference = torch.tensor(list(rotated.tobytes())).view(24, 24, 3).permute(2, 0, 1).float()
    assert (turned[0, :, 6:18, 6:18] - reference[:, 6:18, 6:18]).abs().mean() < 3


def test_cutmix_exchanges_a_box_and_shares_are_its_area():
    images = torch.zeros(2, 3, 20, 20, dtype=torch.uint8)
    images[1] = 200
    augment = Augment(crop=20, scale=(1.0, 1.0), cutmix=1.0, classes=3, **PLAIN)
    for position in range(0, 40, 2):
        mixed, shares = augment([images, torch.tensor([0, 2])], SampleKey(0, 0, position))
        own = (mixed[0] < 100).float().mean().item()
        assert shares[0].tolist() == pytest.approx([own, 0, 1 - own], abs=1e-3)
        assert shares[1].tolist() == pytest.approx([1 - own, 0, own], abs=1e-3)


def test_mixup_adds_images_by_their_shares():
    images = torch.zeros(2, 3, 20, 20, dtype=torch.uint8)
    images[1] = 200
    augment = Augment(crop=20, scale=(1.0, 1.0), mixup=0.5, classes=3, **PLAIN)
    mixed, shares = augment([images, torch.tensor([0, 2])], SampleKey(0, 0, 4))
    assert mixed[0].mean().item() == pytest.approx(200 * shares[0, 2].item(), abs=0.1)
    assert shares.sum(1).tolist() == pytest.approx([1, 1])
    single = augment([images[:1], torch.tensor([0])], SampleKey(0, 0, 4))
    assert single[1].tolist() == [[1, 0, 0]], "a sample whose partner is not in the batch stays as it is"


def test_erasing_sets_a_box_of_some_images_to_the_mean():
    white = torch.full((400, 3, 20, 20), 255, dtype=torch.uint8)
    images, _ = Augment(crop=20, scale=(1.0, 1.0), erasing=0.25)([white, torch.zeros(400)], SampleKey(0, 0, 0))
    erased = (images == 0).float().mean(dim=(1, 2, 3))
    assert 0.18 < (erased > 0).float().mean().item() < 0.32
    assert erased.max() < 0.4


def test_sizes_follow_the_epochs():
    augment = Augment(crop="0:8 2:12, 5:16")
    assert [augment.size(epoch) for epoch in range(7)] == [8, 8, 12, 12, 12, 16, 16]
    assert augment(batch_of(2), SampleKey(0, 3, 0))[0].shape[-1] == 12
    assert augment(batch_of(2), None)[0].shape[-1] == 16
    assert Augment(crop=8, eval_crop=20)(batch_of(2), None)[0].shape[-1] == 20


def test_a_recorded_step_is_dropped_where_the_size_changes():
    dropped: list[int] = []
    loop = SimpleNamespace(epoch=0, task=SimpleNamespace(augment=Augment(crop="0:8 2:12")))
    call = ModelCall(loop)  # type: ignore[arg-type]
    call._begun = True
    call._capture = SimpleNamespace(check=lambda: None, drop=lambda: dropped.append(loop.epoch))  # type: ignore[assignment]
    for loop.epoch in range(5):
        call.begin_epoch(is_watched=False)
    assert dropped == [2]


def test_top5_counts_hits_and_labels():
    scores = torch.arange(14.0).expand(3, 14)
    hits, labels = top5_accuracy(scores, torch.tensor([9, 8, -100]))
    assert (hits.item(), labels.item()) == (1, 2)
    assert top5_accuracy(scores[:, :3], torch.tensor([0, 1, 2]))[0].item() == 3, "fewer than five classes"


def test_smoothing_and_shares_have_the_loss_of_torch():
    scores, labels = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 4, 2, 2])
    expected = F.cross_entropy(scores, labels, label_smoothing=0.1)
    assert torch.equal(cross_entropy(scores, labels, label_smoothing=0.1), expected)
    shares = F.one_hot(labels, 5).float()
    torch.testing.assert_close(cross_entropy(scores, shares, label_smoothing=0.1), expected)


def test_mixed_labels_without_a_loss_are_refused():
    task = TrainTask(nn.Linear(2, 2), [], augment=Augment(mixup=0.2, classes=2))
    with pytest.raises(UsageError, match=r"no loss_fn is given for these[^']*'cross_entropy'"):
        check_task(task, resolve({"batch_size": 2}).config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": "2:128"}, "expected a size, or epochs and sizes from epoch 0 on"),
        ({"crop": "0:128 0:160"}, "expected a size"),
        ({"crop": 0}, "expected a size"),
        ({"randaugment": "2"}, "number of operations and a magnitude"),
        ({"randaugment": "2,31"}, "a magnitude from 0 to 30"),
        ({"mixup": 2.0, "classes": 3}, "augment.mixup = 2.0: must be 1 or less"),
        ({"cutmix": 1.0}, "need the number of labels"),
        ({"scale": (0.5, 0.1)}, "expected two shares"),
        ({"scale": [0.5]}, "expected two shares"),
        ({"std": (1.0, 1.0)}, "a positive value for each of 3 means"),
        ({"eval_share": 0.0}, "augment.eval_share = 0.0: must be greater than 0"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        Augment(**options)


@pytest.mark.parametrize("batch", [[torch.zeros(2, 8), torch.zeros(2)], {"x": 1}, [torch.zeros(2, 1, 8, 8), 0]])
def test_batches_without_images_are_refused(batch):
    with pytest.raises(DataError, match=r"augment takes batches \(images, labels\)"):
        Augment()(batch, None)


def test_labels_that_are_shares_cannot_be_mixed():
    with pytest.raises(DataError, match=r"need one label per image; got torch\.float32"):
        Augment(**EVERYTHING)([batch_of(2)[0], torch.rand(2, 5)], SampleKey(0, 0, 0))
