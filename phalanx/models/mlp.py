"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor, nn


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
