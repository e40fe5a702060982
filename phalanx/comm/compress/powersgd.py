"""PowerSGD: a gradient matrix as the product of two thin ones, by one step of subspace iteration from the last factors.

    P = M Q        averaged over the ranks, then made orthonormal
    Q = M' P       averaged over the ranks, and kept: the next step begins with it
    M is about P Q'; what that leaves out is kept back and added to the next gradient

Vectors and matrices that would not become smaller travel as they are, in one message with the P. (Vogels, Karimireddy,
Jaggi: PowerSGD, 2019.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from phalanx.comm.buckets import Bucket
from phalanx.comm.compress.base import average, generator, is_finite
from phalanx.comm.compress.feedback import FeedbackCompressor, places
from phalanx.comm.exchange import Exchange
from phalanx.errors import ModelError


class _Matrix(NamedTuple):
    """One gradient that is compressed: its name, its place in the flat memory, and its values as rows and columns."""

    name: str
    place: slice
    values: torch.Tensor


class PowerSGD(FeedbackCompressor):
    """Two thin matrices of a given rank for each gradient matrix."""

    name = "powersgd"

    def __init__(self, rank: int, *, seed: int = 0, warmup: int = 0) -> None:
        super().__init__(seed=seed, warmup=warmup)
        self.rank = rank
        self._factors: dict[str, torch.Tensor] = {}

    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        residual = self.residuals.of(bucket)
        wanted = residual + bucket.flat
        matrices, rest = self._sorted_out(bucket, wanted)
        lefts = [matrix.values @ self._factor(matrix) for matrix in matrices]
        _average_together([*lefts, *rest], exchange)
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.values.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
        _average_together(rights, exchange)
        result = wanted.clone()  # `rest` is views of `wanted`, averaged in place
        for matrix, left, right in zip(matrices, lefts, rights, strict=True):
            result[matrix.place] = (left @ right.T).flatten()
        bucket.flat.copy_(result)
        if is_finite(result):
            torch.sub(wanted, result, out=residual)
            self._factors.update((matrix.name, right) for matrix, right in zip(matrices, rights, strict=True))

    def _sorted_out(self, bucket: Bucket, wanted: torch.Tensor) -> tuple[list[_Matrix], list[torch.Tensor]]:
        matrices, rest = [], []
        for (name, place), part in zip(places(bucket), bucket.parts, strict=True):
            rows = part.shape[0] if part.dim() > 1 else 0
            if rows and self.rank <= largest_rank(rows, part.numel() // rows):
                matrices.append(_Matrix(name, place, wanted[place].view(rows, -1)))
            else:
                rest.append(wanted[place])
        return matrices, rest

    def _factor(self, matrix: _Matrix) -> torch.Tensor:
        """Return where the iteration begins: the last step's factor, or the same random one on all ranks."""
        values = matrix.values
        factor = self._factors.get(matrix.name)
        if factor is None:
            randomness = generator(torch.device("cpu"), self.seed, matrix.name)
            factor = torch.randn(values.shape[1], self.rank, generator=randomness)
        return factor.to(device=values.device, dtype=values.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return steps, residuals and the factors that the next step begins with."""
        return {**super().state_dict(), "factors": {name: factor.clone() for name, factor in self._factors.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them up; factors of another rank are of no use."""
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
    """Return the largest rank at which two thin matrices are smaller than the one they stand for; 0: none."""
    return (rows * columns - 1) // (rows + columns) if rows and columns else 0


def check_rank(rank: int, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse a rank at which no gradient of the model becomes smaller."""
    best, named = 0, ""
    for name, parameter in named_parameters:
        if parameter.requires_grad and parameter.dim() > 1 and parameter.numel():
            rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
            if largest_rank(rows, columns) > best:
                best, named = largest_rank(rows, columns), f"{name}, {rows} x {columns}"
    if best == 0:
        raise ModelError(
            "compression = 'powersgd': this model has no matrix that two thin ones could stand for",
            hint="Choose another compression: topk, int8 or bf16 take gradients of any shape.",
        )
    if rank > best:
        raise ModelError(
            f"powersgd_rank = {rank}: two matrices of this rank are larger than every gradient of the model; the "
            f"largest possible is {best} ({named})",
            hint=f"Write powersgd_rank={min(4, best)}: small ranks save the most, and error feedback does the rest.",
        )
