"""A multi-layer perceptron."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, cast

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class MLP(nn.Module):
    """Linear layers with ReLU between them; inputs of any shape are flattened. The defaults fit the 8x8 digits."""

    def __init__(self, in_features: int = 64, hidden: int | Sequence[int] = 128, out_features: int = 10) -> None:
        super().__init__()
        sizes = [in_features, *([hidden] if isinstance(hidden, int) else hidden)]
        layers: list[nn.Module] = [nn.Flatten()]
        for size, following in pairwise(sizes):
            layers += [nn.Linear(size, following), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], out_features))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one row of outputs a sample."""
        return cast("Tensor", self.layers(inputs))
