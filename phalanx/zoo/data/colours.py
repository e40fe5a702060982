"""RandAugment as batched operations: which one an image gets is data, and no image needs its own call.

The thirteen operations and the identity of arXiv 1909.13719.
Magnitudes are those of torchvision, with M of 30 levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

OPERATIONS = (
    "identity",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "brightness",
    "colour",
    "contrast",
    "sharpness",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
)
_LEVELS = 30
_SHEAR, _TRANSLATE, _ROTATE, _BLEND, _LOST_BITS = 0.3, 2 * 150 / 331, math.radians(30), 0.9, 4
"""What the highest level does; a translation is in half widths of the image."""


class ChosenOperations(NamedTuple):
    """The operation of each image, by its number, and its direction, 1 or -1."""

    number: Tensor
    sign: Tensor

    def is_any(self, *names: str) -> Tensor:
        """Return for each image whether its operation is one of these."""
        mask = torch.zeros_like(self.number, dtype=torch.bool)
        for name in names:
            mask |= self.number == OPERATIONS.index(name)
        return mask


def choose(numbers: Tensor) -> ChosenOperations:
    """Return the operations for uniform numbers [images, 2]."""
    return ChosenOperations((numbers[:, 0] * len(OPERATIONS)).long(), torch.where(numbers[:, 1] < 0.5, -1.0, 1.0))


def moved(chosen: ChosenOperations, magnitude: float) -> Tensor:
    """Return what each operation does to coordinates, as matrices [images, 3, 3]; the unit matrix for colours."""
    signed = chosen.sign * (magnitude / _LEVELS)
    angle = torch.where(chosen.is_any("rotate"), signed * _ROTATE, 0.0)
    matrix = torch.zeros(len(signed), 3, 3, device=signed.device)
    matrix[:, 0, 0] = matrix[:, 1, 1] = angle.cos()
    matrix[:, 0, 1] = torch.where(chosen.is_any("shear_x"), signed * _SHEAR, -angle.sin())
    matrix[:, 1, 0] = torch.where(chosen.is_any("shear_y"), signed * _SHEAR, angle.sin())
    matrix[:, 0, 2] = torch.where(chosen.is_any("translate_x"), signed * _TRANSLATE, 0.0)
    matrix[:, 1, 2] = torch.where(chosen.is_any("translate_y"), signed * _TRANSLATE, 0.0)
    matrix[:, 2, 2] = 1.0
    return matrix


def coloured(images: Tensor, chosen: ChosenOperations, magnitude: float) -> Tensor:
    """Return images (0 to 255) after each one's operation; geometric ones leave the colours."""
    level = magnitude / _LEVELS
    # On a GPU all images are changed by all operations: to choose some of them, the host would wait for the device.
    at_once = images.device.type != "cpu" or torch.compiler.is_compiling()
    images = images if at_once else images.clone()
    for name, change in _CHANGES.items():
        is_chosen = chosen.is_any(name)
        if at_once:
            images = torch.where(is_chosen[:, None, None, None], change(images, chosen.sign, level), images)
        elif (rows := is_chosen.nonzero()[:, 0]).numel():
            images[rows] = change(images[rows], chosen.sign[rows], level)
    return images


def _blend(plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, float], Tensor]:
    """Return the operation whose images lie between a plain one and the image itself, or beyond it."""

    def change(images: Tensor, sign: Tensor, level: float) -> Tensor:
        factor = (1 + sign * (level * _BLEND))[:, None, None, None]
        return torch.lerp(plain(images).expand_as(images), images, factor).clamp(0, 255)

    return change


def _posterize(images: Tensor, sign: Tensor, level: float) -> Tensor:
    step = 2.0 ** round(_LOST_BITS * level)
    return (images / step).floor() * step


def _solarize(images: Tensor, sign: Tensor, level: float) -> Tensor:
    return torch.where(images >= 255 * (1 - level), 255 - images, images)


def _grey(images: Tensor) -> Tensor:
    """Return the luminance [images, 1, height, width]; of other than three channels their mean."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]


def _smooth(images: Tensor) -> Tensor:
    """Average over 3x3 pixels, of which the middle one counts 5 of 13 times; the edge stays, as in Pillow."""
    result = images.clone()
    middle = result[:, :, 1:-1, 1:-1]
    middle.mul_(4).add_(F.avg_pool2d(images, 3, stride=1), alpha=9).div_(13)
    return result


def _autocontrast(images: Tensor, sign: Tensor, level: float) -> Tensor:
    """Stretch each channel to 0 to 255; one of a single value stays."""
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (images - low) * (255 / (high - low).clamp_min(1e-6)), images)


def _equalize(images: Tensor, sign: Tensor, level: float) -> Tensor:
    """Spread the values of each channel so that all are about equally frequent, by Pillow's rule."""
    values = images.round().long().clamp(0, 255).flatten(2)
    counts = torch.zeros(*values.shape[:2], 256, device=images.device)
    counts = counts.scatter_add(2, values, torch.ones_like(values, dtype=counts.dtype))
    highest = counts.gather(2, values.amax(2, keepdim=True))
    step = ((values.shape[2] - highest) / 255).floor()
    table = ((counts.cumsum(2) - counts + (step / 2).floor()) / step.clamp_min(1)).floor().clamp(0, 255)
    return torch.where(step > 0, table.gather(2, values).to(images.dtype), images.flatten(2)).view_as(images)


_CHANGES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "brightness": _blend(lambda images: torch.zeros_like(images[:, :1])),
    "colour": _blend(_grey),
    "contrast": _blend(lambda images: _grey(images).mean(dim=(1, 2, 3), keepdim=True)),
    "sharpness": _blend(_smooth),
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
}
"""operation(images, signs, level) of each operation on colours."""
