"""Small models: a convolutional net for small images, and a perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from phalanx.errors import ModelError
from phalanx.zoo.models.init import is_meta


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
        self.image_size = image_size
        wide, pooled = 2 * width, image_size // 4
        self.features = nn.Sequential(_stage(channels, width), _stage(width, wide))
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(wide * pooled * pooled, 4 * width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4 * width, classes),
        )
        if not is_meta(self):
            self.init_weights()

    def init_weights(self) -> None:
        """Draw the weights again: He initialisation, without which plain SGD hardly moves a stack of this depth."""
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(cast("Tensor", module.bias))

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of images of shape [batch, channels, image_size, image_size]."""
        return cast("Tensor", self.head(self.features(images)))

    def num_parameters(self) -> int:
        """Count the parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_sample(self) -> int:
        """Return the operations of training on one image, forward and backward.

        6 for each weight and each pixel that it makes, a quarter as many pixels in the second pair of convolutions; a
        linear weight makes one. The first convolution has 4 for 6, since the image needs no gradient.
        """
        pixels, halved = self.image_size**2, (self.image_size // 2) ** 2
        convolutions = [module.weight.numel() for module in self.modules() if isinstance(module, nn.Conv2d)]
        work = [
            weights * outputs for weights, outputs in zip(convolutions, (pixels, pixels, halved, halved), strict=True)
        ]
        linears = sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear))
        return 6 * (sum(work) + linears) - 2 * work[0]


def _stage(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class MLP(nn.Module):
    """Linear layers with ReLU between them; inputs of any shape are flattened. The defaults fit the 8x8 digits."""

    def __init__(self, in_features: int = 64, hidden: int | Sequence[int] = 128, out_features: int = 10) -> None:
        super().__init__()
        sizes = [in_features, *([hidden] if isinstance(hidden, int) else hidden)]
        layers: list[nn.Module] = [nn.Flatten()]
        for size, following in pairwise(sizes):
            layers += [nn.Linear(size, following), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], out_features))

    def init_weights(self) -> None:
        """Draw the weights again, also after a start on the meta device: torch's uniform initialisation."""
        for linear in self._linears():
            linear.reset_parameters()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one row of outputs per sample."""
        return cast("Tensor", self.layers(inputs))

    def num_parameters(self) -> int:
        """Count the parameters: (in + 1) x out summed over the layers."""
        return sum((linear.in_features + 1) * linear.out_features for linear in self._linears())

    def flops_per_sample(self) -> int:
        """Return the operations of training on one sample, forward and backward.

        6 x in x out summed over the layers; 4 for 6 in the first, since the sample needs no gradient.
        """
        work = [linear.in_features * linear.out_features for linear in self._linears()]
        return 6 * sum(work) - 2 * work[0]

    def _linears(self) -> list[nn.Linear]:
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]
