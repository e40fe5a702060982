"""Residual networks: ResNet-18 and ResNet-50, the latter with the stride in its 3x3 convolution (v1.5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import ModelError
from phalanx.zoo.models.attention import DropPath, check_drop_path, drop_path_shares
from phalanx.zoo.models.init import from_preset, is_meta


class Conv(NamedTuple):
    """The shape of one convolution, and how many times smaller than the image's its output is."""

    inputs: int
    outputs: int
    kernel: int
    reduction: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetConfig:
    """The shape of a residual network.

    `depths` are the blocks of each stage; every stage after the first doubles the width and halves the image. `stem` is
    the kernel of the first convolution: 7 (stride 2, then a pool of stride 2) for large images, 3 (stride 1) for small.
    `drop_path`: the share of samples for which training leaves the last block out; less in earlier ones.
    """

    depths: tuple[int, ...] = (1, 1)
    bottleneck: bool = False
    width: int = 16
    channels: int = 1
    classes: int = 10
    stem: int = 3
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        if self.stem not in (3, 7):
            raise ModelError(f"stem={self.stem} is not a stem of a residual network. Allowed: 3 (small images), 7.")
        check_drop_path(self.drop_path)

    @property
    def expansion(self) -> int:
        """How many times wider a block's output is than its inner convolutions."""
        return 4 if self.bottleneck else 1

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield (channels in, inner width, stride) of each block."""
        inputs = self.width
        for stage, depth in enumerate(self.depths):
            width = self.width * 2**stage
            for block in range(depth):
                yield inputs, width, 2 if block == 0 and stage > 0 else 1
                inputs = width * self.expansion

    def convolutions(self) -> Iterator[Conv]:
        """Yield every convolution, the stem first."""
        reduction = 2 if self.stem == 7 else 1
        yield Conv(self.channels, self.width, self.stem, reduction)
        reduction *= reduction  # the stem's pool
        for inputs, width, stride in self.blocks():
            before, reduction, outputs = reduction, reduction * stride, width * self.expansion
            if self.bottleneck:
                yield Conv(inputs, width, 1, before)
                yield Conv(width, width, 3, reduction)
                yield Conv(width, outputs, 1, reduction)
            else:
                yield Conv(inputs, width, 3, reduction)
                yield Conv(width, outputs, 3, reduction)
            if stride != 1 or inputs != outputs:
                yield Conv(inputs, outputs, 1, reduction)

    @property
    def features(self) -> int:
        """The channels that the last block gives to the head."""
        return (self.width << (len(self.depths) - 1)) * self.expansion

    def num_parameters(self) -> int:
        """Return in x out x kernel^2 + 2 out (its norm) summed over the convolutions, and (features + 1) x classes."""
        convolutions = sum(c.inputs * c.outputs * c.kernel**2 + 2 * c.outputs for c in self.convolutions())
        return convolutions + (self.features + 1) * self.classes

    def flops_per_sample(self, image_size: int = 224) -> int:
        """Return the operations of training on one image, forward and backward, of convolutions and head.

        6 x in x out x kernel^2 for each output pixel; the stem has 4 for 6, since the image needs no gradient.
        """
        work = [c.inputs * c.outputs * (c.kernel * -(-image_size // c.reduction)) ** 2 for c in self.convolutions()]
        return 6 * sum(work) - 2 * work[0] + 6 * self.features * self.classes


_IMAGENET = ResNetConfig(width=64, channels=3, classes=1000, stem=7)
PRESETS = {
    "debug": ResNetConfig(),
    "resnet18": replace(_IMAGENET, depths=(2, 2, 2, 2)),
    "resnet50": replace(_IMAGENET, depths=(3, 4, 6, 3), bottleneck=True),
}
"""About 0.02, 11.7 and 25.6 million parameters."""


class ConvNorm(nn.Module):
    """A convolution without bias and its batch norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Convolve and normalise."""
        return cast("Tensor", self.norm(self.conv(images)))


class Block(nn.Module):
    """Two 3x3 convolutions, or 1x1, 3x3 and 1x1 ones, and a shortcut around them."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool, drop_path: float) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            parts = [ConvNorm(inputs, width, 1), ConvNorm(width, width, 3, stride), ConvNorm(width, outputs, 1)]
        else:
            parts = [ConvNorm(inputs, width, 3, stride), ConvNorm(width, outputs, 3)]
        self.parts = nn.ModuleList(parts)
        changes = stride != 1 or inputs != outputs
        self.shortcut = ConvNorm(inputs, outputs, 1, stride) if changes else nn.Identity()
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Refine images, halving them where the stride is 2."""
        hidden = images
        for number, part in enumerate(self.parts):
            hidden = part(F.relu(hidden) if number else hidden)
        return F.relu(self.drop_path(hidden) + self.shortcut(images))


class ResNet(nn.Module):
    """A stem, residual blocks, and class scores of the average over the image.

    Batch norm averages over the samples of one rank: only with `sync_batch_norm` do several ranks compute what one
    would with the whole batch.
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        large = config.stem == 7
        self.embed = ConvNorm(config.channels, config.width, config.stem, stride=2 if large else 1)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        self.layers = nn.ModuleList(
            Block(*shape, bottleneck=config.bottleneck, drop_path=share)
            for shape, share in zip(
                config.blocks(), drop_path_shares(config.drop_path, sum(config.depths)), strict=True
            )
        )
        self.head = nn.Linear(config.features, config.classes)
        if not is_meta(self):
            self.init_weights()

    def init_weights(self) -> None:
        """Draw the weights again, also after a start on the meta device: He for convolutions, norms to one.

        The last norm of each block starts at zero: the block is then the identity, and deep stacks train from step one.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, (nn.BatchNorm2d, nn.Linear)):
                module.reset_parameters()
        for block in self.layers:
            nn.init.zeros_(cast("Block", block).parts[-1].norm.weight)  # type: ignore[union-attr, arg-type]

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of images [batch, channels, height, width]."""
        hidden = self.pool(F.relu(self.embed(images)))
        for layer in self.layers:
            hidden = layer(hidden)
        return cast("Tensor", self.head(hidden.mean(dim=(2, 3))))

    def num_parameters(self) -> int:
        """Count the parameters, without the running statistics of the norms."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_sample(self, image_size: int = 224) -> int:
        """Return the operations of training on one image."""
        return self.config.flops_per_sample(image_size)


def resnet(preset: str = "debug", **changes: Any) -> ResNet:
    """Return a residual network of a preset's shape, with some of its `ResNetConfig` fields changed."""
    return ResNet(from_preset("resnet", PRESETS, preset, changes))
