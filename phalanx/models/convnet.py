"""A small convolutional net for small images."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from phalanx.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor


class ConvNet(nn.Module):
    """Two pairs of 3x3 convolutions, each halving the image, then two linear layers.

    There is no batch norm: a sample's output depends on that sample only, so any split of the batch computes the same.
    """

    def __init__(
        self, image_size: int = 8, channels: int = 1, classes: int = 10, width: int = 32, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if image_size < 4:
            raise ModelError(
                f"image_size={image_size} is too small: the image is halved twice, so 4 or more is needed."
            )
        wide, pooled = 2 * width, image_size // 4
        self.features = nn.Sequential(_stage(channels, width), _stage(width, wide))
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(wide * pooled * pooled, 4 * width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4 * width, classes),
        )
        self.init_weights()

    def init_weights(self) -> None:
        """Draw the weights anew: He initialisation, without which plain SGD hardly moves a stack of this depth."""
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(cast("Tensor", module.bias))

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of images of shape [batch, channels, image_size, image_size]."""
        return cast("Tensor", self.head(self.features(images)))


def _stage(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
