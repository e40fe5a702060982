"""Image augmentation on the device: batches of uint8 images become normalised floats, as batched tensor operations.

Training: random resized crop, flip and RandAugment's geometry in one sampling of the image, colours, normalisation,
random erasing, mixup and cutmix. Evaluation: resize, centre crop, normalisation. What happens to a sample is a function
of (seed, epoch, its position in the epoch), whatever the ranks and workers. Mixup and cutmix pair the samples at
positions 2k and 2k + 1: with an even batch size per rank and `drop_last` they are in one batch at any number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.config.option import option, problems_of
from phalanx.data.order import SampleKey
from phalanx.errors import DataError, UsageError
from phalanx.world.seed import derive_seed
from phalanx.zoo.data import colours

_GEOMETRY, _OPERATIONS, _ERASING, _PAIRS = range(4)
"""Purposes of random numbers."""
_RATIOS = (math.log(3 / 4), math.log(4 / 3))
_ERASED, _ERASED_RATIOS = (0.02, 1 / 3), (math.log(0.3), math.log(3.3))
_TRIES = 8
_BITS = 24
"""Of which a uniform number is made: as many as float32 holds."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What is done to the images of a batch, in training and in evaluation.

    `crop` is the size that the model gets: 224, or a schedule by epochs, "0:128 6:176 12:224". `scale`: the share of an
    image that a random crop covers. `randaugment`: number of operations and magnitude of 30, "2,9". `mixup`, `cutmix`:
    alpha of Beta(alpha, alpha), up to 1; with both, each pair gets one of them. `erasing`: the chance of a grey box.
    `classes`: how many labels there are, which mixed labels need. `eval_share`: the part of the shorter side that
    evaluation keeps, at `eval_crop` pixels (default: the last crop).
    """

    crop: int | str = 224
    scale: tuple[float, float] = (0.08, 1.0)
    flip: bool = True
    randaugment: str = ""
    mixup: float = option(0.0, "alpha of mixed images; 0: off", minimum=0, maximum=1)
    cutmix: float = option(0.0, "alpha of pasted images; 0: off", minimum=0, maximum=1)
    erasing: float = option(0.0, "the chance of a grey box; 0: off", minimum=0, maximum=1)
    classes: int | None = None
    eval_crop: int | None = None
    eval_share: float = option(0.875, "the part of the shorter side that evaluation keeps", above=0, maximum=1)
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    sizes: tuple[tuple[int, int], ...] = field(init=False)
    """(first epoch, size) of the schedule."""
    operations: tuple[int, float] = field(init=False)
    """RandAugment's number of operations and magnitude."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", _read_sizes(self.crop))
        object.__setattr__(self, "operations", _read_operations(self.randaugment))
        for name in ("scale", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.mean) != len(self.std) or min(self.std, default=0) <= 0:
            raise UsageError(f"augment.std = {self.std}: expected a positive value for each of {len(self.mean)} means")
        if wrong := problems_of(self):
            raise UsageError("\n  ".join(f"augment.{text}" for text in wrong))
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise UsageError(f"augment.scale = {self.scale!r}: expected two shares of an image, such as [0.08, 1.0]")
        if self.mixes and self.classes is None:
            raise UsageError("mixup and cutmix need the number of labels", hint="Write augment.classes = 1000.")

    @property
    def mixes(self) -> bool:
        """Whether labels become shares of classes."""
        return self.mixup > 0 or self.cutmix > 0

    def size(self, epoch: int) -> int:
        """Return the size of the images that the model gets in an epoch of training."""
        return [size for first, size in self.sizes if first <= epoch][-1]

    @torch.no_grad()
    def __call__(self, batch: Any, key: SampleKey | None) -> Any:
        """Return (images, labels) for training at this position of the run; None: for evaluation."""
        images, *rest = _checked(batch, len(self.mean))
        if key is None:
            size = self.eval_crop or self.sizes[-1][1]
            return _like(batch, [self._normal(centre_crop(images, size, self.eval_share)), *rest])
        places = torch.arange(key.position, key.position + len(images), device=images.device)
        images = self._sampled(images, key, places)
        images = self._erased(self._normal(images), key, places)
        if self.mixes:
            images, rest[-1:] = self._mixed(images, rest[-1] if rest else None, key, places)
        return _like(batch, [images, *rest])

    def _normal(self, images: Tensor) -> Tensor:
        mean, std = (_channels(values, images.device) for values in (self.mean, self.std))
        return (images - 255 * mean) / (255 * std)

    def _sampled(self, images: Tensor, key: SampleKey, places: Tensor) -> Tensor:
        """Crop, flip and apply RandAugment."""
        count, magnitude = self.operations
        size = self.size(key.epoch)
        numbers = uniforms(key, places, 5, _GEOMETRY)
        matrix = crop_matrices(numbers[:, :4], self.scale, images.shape[-1] / images.shape[-2])
        if self.flip:
            matrix[:, :, 0] *= torch.where(numbers[:, 4] < 0.5, -1.0, 1.0)[:, None]
        drawn = uniforms(key, places, 2 * count, _OPERATIONS)
        chosen = [colours.choose(drawn[:, 2 * operation : 2 * operation + 2]) for operation in range(count)]
        for operation in chosen:
            matrix = matrix @ colours.moved(operation, magnitude)
        images = sample(images, matrix, size)
        for operation in chosen:
            images = colours.coloured(images, operation, magnitude)
        return images

    def _erased(self, images: Tensor, key: SampleKey, places: Tensor) -> Tensor:
        if not self.erasing:
            return images
        numbers = uniforms(key, places, 5, _ERASING)
        area, ratio = between(numbers[:, 1], *_ERASED), between(numbers[:, 2], *_ERASED_RATIOS).exp()
        sides = torch.stack([(area / ratio).sqrt(), (area * ratio).sqrt()], 1).clamp_max(1)
        middle = sides / 2 + numbers[:, 3:] * (1 - sides)
        sides = sides * (numbers[:, :1] < self.erasing)
        return images * ~_boxes(middle, sides, images.shape[-1])

    def _mixed(self, images: Tensor, labels: Any, key: SampleKey, places: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Mix each image and label with those of its partner, by shares or by a box."""
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim != 1:
            kind = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
            raise DataError(f"mixup and cutmix need one label per image; got {kind}")
        assert self.classes is not None, "checked when it was made"
        partner = (places ^ 1) - key.position
        here = (partner >= 0) & (partner < len(places))
        partner = torch.where(here, partner, places - key.position)
        shares_kept = self._own_share(key, places, images.shape[-1])
        images = torch.lerp(images[partner], images, shares_kept)
        shares = F.one_hot(labels, self.classes).to(images.dtype)
        return images, [torch.lerp(shares[partner], shares, shares_kept.mean(dim=(2, 3)))]

    def _own_share(self, key: SampleKey, places: Tensor, size: int) -> Tensor:
        """Return how much of each pixel is the image's own, [images, 1, size, size]; equal in both of a pair."""
        numbers = uniforms(key, places >> 1, 3 + 4 * _TRIES, _PAIRS)
        choice, middle = numbers[:, 0], numbers[:, 1:3]
        mixup, cutmix = torch.split(numbers[:, 3:], 2 * _TRIES, dim=1)
        if not self.cutmix:
            return betas(mixup, self.mixup)[:, None, None, None].expand(-1, 1, size, size)
        side = (1 - betas(cutmix, self.cutmix)).sqrt()[:, None].expand(-1, 2)
        outside = (~_boxes(middle, side, size)).to(numbers.dtype)
        if not self.mixup:
            return outside
        is_mixup = (choice < 0.5)[:, None, None, None]
        return torch.where(is_mixup, betas(mixup, self.mixup)[:, None, None, None], outside)


def uniforms(key: SampleKey, places: Tensor, columns: int, purpose: int) -> Tensor:
    """Return [places, columns] numbers from 0 to below 1, in float32; each `purpose` has its own numbers.

    SplitMix64 over 64-bit integers, which wrap around alike on all devices.
    """
    first = _signed(derive_seed(key.seed, key.epoch, purpose))
    column = torch.arange(columns, device=places.device)
    state = places[:, None] * _signed(0xD1342543DE82EF95) + column * _signed(0x9E3779B97F4A7C15) + first
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    state = state ^ _shifted(state, 31)
    return _shifted(state, 64 - _BITS).float().div(2**_BITS)


def _signed(number: int) -> int:
    """Return an unsigned 64-bit number as torch's int64 holds it."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _shifted(values: Tensor, by: int) -> Tensor:
    """Shift to the right and fill with zeros; torch would repeat the sign."""
    return (values >> by) & ((1 << (64 - by)) - 1)


def betas(numbers: Tensor, alpha: float) -> Tensor:
    """Return one draw of Beta(alpha, alpha) for each row of uniform numbers, alpha up to 1 (Jöhnk's method).

    A pair (u, v) of a row is accepted where x + y <= 1 for x = u^(1/alpha), y = v^(1/alpha), and gives x / (x + y). The
    chance that none of 8 pairs is accepted is at most 1 in 256 (alpha = 1); the last one is then taken.
    """
    first, second = torch.chunk(numbers.clamp_min(2.0**-_BITS).log().div(alpha), 2, dim=1)
    highest = torch.maximum(first, second)  # in logarithms: u^100 is not a float32
    total = highest + ((first - highest).exp() + (second - highest).exp()).log()
    accepted = (total <= 0).to(torch.int8)
    chosen = torch.where(accepted.any(1), accepted.argmax(1), accepted.shape[1] - 1)
    return (first - total).exp().gather(1, chosen[:, None])[:, 0]


def between(numbers: Tensor, low: float, high: float) -> Tensor:
    """Return uniform numbers from `low` to `high`."""
    return numbers.mul(high - low).add(low)


def crop_matrices(numbers: Tensor, scale: tuple[float, float], aspect: float) -> Tensor:
    """Return the random resized crops of images as matrices [images, 3, 3], from -1..1 of the crop to -1..1.

    `numbers`: uniform, [images, 4]; `aspect`: width over height of the images. A side longer than the image is cut.
    """
    area, ratio = between(numbers[:, 0], *scale), between(numbers[:, 1], *_RATIOS).exp() / aspect
    sides = torch.stack([(area * ratio).sqrt(), (area / ratio).sqrt()], 1).clamp_max(1)
    middle = (2 * numbers[:, 2:] - 1) * (1 - sides)
    matrix = torch.zeros(len(numbers), 3, 3, device=numbers.device)
    matrix[:, 0, 0], matrix[:, 1, 1], matrix[:, 2, 2] = sides[:, 0], sides[:, 1], 1.0
    matrix[:, :2, 2] = middle
    return matrix


def sample(images: Tensor, matrix: Tensor, size: int) -> Tensor:
    """Return images of size x size pixels, read where the matrices say, and black beyond the images.

    A crop of the whole image that halves it averages two pixels a side; from four times the size on, they are averaged
    before.
    """
    shrink = min(images.shape[-2:]) // (2 * size)
    if shrink > 1:
        images = F.avg_pool2d(images, shrink)
    grid = F.affine_grid(matrix[:, :2], [*images.shape[:2], size, size], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def centre_crop(images: Tensor, size: int, share: float) -> Tensor:
    """Return the middle size x size pixels of images whose shorter side is resized to size / share."""
    height, width = images.shape[-2:]
    factor = size / share / min(height, width)
    resized = max(size, round(height * factor)), max(size, round(width * factor))
    if resized != (height, width):
        images = F.interpolate(images, resized, mode="bilinear", antialias=True, align_corners=False)
    top, left = (resized[0] - size) // 2, (resized[1] - size) // 2
    return images[:, :, top : top + size, left : left + size]


def _boxes(middle: Tensor, sides: Tensor, size: int) -> Tensor:
    """Return masks [images, 1, size, size] of boxes whose middle and sides (y, x) are shares of the image."""
    positions = (torch.arange(size, device=middle.device) + 0.5) / size
    inside = (positions - middle[:, :, None]).abs() < sides[:, :, None] / 2
    return (inside[:, 0, :, None] & inside[:, 1, None, :])[:, None]


@lru_cache(maxsize=16)
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(1, -1, 1, 1)


def _checked(batch: Any, channels: int) -> list[Any]:
    """Return a batch as a list with the images as floats from 0 to 255; raise for what has no images."""
    parts = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    images = parts[0] if parts else None
    if not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] != channels:
        kind = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(batch).__name__
        raise DataError(
            f"augment takes batches (images, labels) with images [batch, {channels}, height, width]; got {kind}",
            hint="Images are uint8 (0 to 255) or floats (0 to 1); augment.mean and std have a value for each channel.",
        )
    return [images.float() if images.dtype == torch.uint8 else images.float() * 255, *parts[1:]]


def _like(batch: Any, parts: list[Any]) -> Any:
    """Return parts in the form of the batch that they were taken from: a tensor, a list or a (named) tuple."""
    if isinstance(batch, Tensor):
        return parts[0]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def _read_sizes(crop: int | str) -> tuple[tuple[int, int], ...]:
    """Return (first epoch, size) of "0:128 6:176", or of one size for all epochs."""
    words = [f"0:{crop}"] if isinstance(crop, int) else str(crop).replace(",", " ").split()
    try:
        pairs = [(int(first), int(size)) for first, size in (word.split(":") for word in words)]
    except ValueError:
        pairs = []
    epochs = [first for first, _ in pairs]
    if not pairs or epochs != sorted(set(epochs)) or epochs[0] != 0 or min(size for _, size in pairs) < 1:
        raise UsageError(
            f"augment.crop = {crop!r}: expected a size, or epochs and sizes from epoch 0 on",
            hint='Write crop = 224, or crop = "0:128 6:176 12:224".',
        )
    return tuple(pairs)


def _read_operations(text: str) -> tuple[int, float]:
    if not text:
        return 0, 0.0
    try:
        count, magnitude = text.split(",")
        pair = int(count), float(magnitude)
    except ValueError:
        pair = (-1, 0.0)
    if pair[0] < 0 or not 0 <= pair[1] <= 30:
        raise UsageError(
            f"augment.randaugment = {text!r}: expected the number of operations and a magnitude from 0 to 30",
            hint='Write randaugment = "2,9".',
        )
    return pair
