"""PowerSGD: a gradient matrix as the product of two thin ones, by one step of subspace iteration from the last factors.

    P = M Q        averaged over the ranks, then made orthonormal
    Q = M' P       averaged over the ranks, and kept: the next step starts with it
    M is about P Q'; the difference is added to the next gradient

Vectors, and matrices that would not become smaller, are averaged without compression, in one message with the P.
(Vogels, Karimireddy, Jaggi: PowerSGD, 2019.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import torch

from phalanx.comm.compress import average, generator, is_finite
from phalanx.comm.compress.feedback import FeedbackCompressor, slices
from phalanx.comm.exchange import Bucket, Exchange
from phalanx.config import DistributedConfig
from phalanx.errors import ModelError


class _Matrix(NamedTuple):
    """A compressed gradient: its name, its slice of the flat memory, and its values as a matrix."""

    name: str
    part: slice
    values: torch.Tensor


class PowerSGD(FeedbackCompressor):
    """Two thin matrices of a given rank for each gradient matrix."""

    name = "powersgd"

    def __init__(self, rank: int, *, seed: int = 0, warmup: int = 0) -> None:
        super().__init__(seed=seed, warmup=warmup)
        self.rank = rank
        self._factors: dict[str, torch.Tensor] = {}

    @classmethod
    def of(cls, config: DistributedConfig, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> Self:
        """Return the compressor with the rank that a config names; ModelError where nothing becomes smaller."""
        check_rank(config.powersgd_rank, named_parameters)
        return cls(config.powersgd_rank, seed=config.seed, warmup=config.compression_warmup)

    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        residual = self.residuals.of(bucket)
        gradient = residual + bucket.flat
        matrices, rest = self._split(bucket, gradient)
        lefts = [matrix.values @ self._factor(matrix) for matrix in matrices]
        _average_together([*lefts, *rest], exchange)
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.values.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
        _average_together(rights, exchange)
        result = gradient.clone()  # `rest` is views of `wanted`, averaged in place
        for matrix, left, right in zip(matrices, lefts, rights, strict=True):
            result[matrix.part] = (left @ right.T).flatten()
        bucket.flat.copy_(result)
        if is_finite(result):
            torch.sub(gradient, result, out=residual)
            self._factors.update((matrix.name, right) for matrix, right in zip(matrices, rights, strict=True))

    def _split(self, bucket: Bucket, corrected: torch.Tensor) -> tuple[list[_Matrix], list[torch.Tensor]]:
        matrices, rest = [], []
        for (name, part), gradient in zip(slices(bucket), bucket.parts, strict=True):
            rows = gradient.shape[0] if gradient.dim() > 1 else 0
            if rows and self.rank <= largest_rank(rows, gradient.numel() // rows):
                matrices.append(_Matrix(name, part, corrected[part].view(rows, -1)))
            else:
                rest.append(corrected[part])
        return matrices, rest

    def _factor(self, matrix: _Matrix) -> torch.Tensor:
        """Return the last step's factor, or a random one that is equal on all ranks."""
        values = matrix.values
        factor = self._factors.get(matrix.name)
        if factor is None:
            randomness = generator(torch.device("cpu"), self.seed, matrix.name)
            factor = torch.randn(values.shape[1], self.rank, generator=randomness)
        return factor.to(device=values.device, dtype=values.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps, the residuals and the factors."""
        return {**super().state_dict(), "factors": {name: factor.clone() for name, factor in self._factors.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state, except for factors of another rank."""
        super().load_state_dict(state)
        saved = state.get("factors", {})
        self._factors = {name: factor.clone() for name, factor in saved.items() if factor.shape[1] == self.rank}


def _average_together(tensors: list[torch.Tensor], exchange: Exchange) -> None:
    """Average several tensors in place, in one message."""
    if not tensors:
        return
    message = torch.cat([tensor.flatten() for tensor in tensors])
    average(message, exchange)
    pieces = torch.split(message, [tensor.numel() for tensor in tensors])
    for tensor, values in zip(tensors, pieces, strict=True):
        tensor.copy_(values.view_as(tensor))


def largest_rank(rows: int, columns: int) -> int:
    """Return the largest rank at which the two thin matrices are smaller than the original; 0: none."""
    return (rows * columns - 1) // (rows + columns) if rows and columns else 0


def check_rank(rank: int, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise for a rank at which no gradient of the model becomes smaller."""
    best, named = 0, ""
    for name, parameter in named_parameters:
        if parameter.requires_grad and parameter.dim() > 1 and parameter.numel():
            rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
            if largest_rank(rows, columns) > best:
                best, named = largest_rank(rows, columns), f"{name}, {rows} x {columns}"
    if best == 0:
        raise ModelError(
            "compression = 'powersgd': this model has no matrix that two thin ones could approximate",
            hint="Choose another compression: topk, int8 and bf16 support gradients of any shape.",
        )
    if rank > best:
        raise ModelError(
            f"powersgd_rank = {rank}: two matrices of this rank are larger than every gradient of the model; the "
            f"largest possible is {best} ({named})",
            hint=f"Write powersgd_rank={min(4, best)}: small ranks save the most, and error feedback corrects them.",
        )
