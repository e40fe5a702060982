"""Compare two checkpoints tensor by tensor, so that no more than one tensor of each is in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.checkpoint.find import Checkpoint
from phalanx.checkpoint.manifest import TensorInfo
from phalanx.checkpoint.read import read_tensors, stored_tensors

_PIECE = 1 << 22
"""Elements that are converted to float64 at a time."""


@dataclass(frozen=True)
class TensorDifference:
    """How far a tensor of two checkpoints differs; `reason` where the values cannot be compared."""

    name: str
    elements: int
    different: int = 0
    max_abs: float = 0.0
    """The largest absolute difference; infinite where only one value is NaN or infinite."""
    relative: float = 0.0
    """`max_abs` divided by the largest absolute value of the first tensor."""
    reason: str = ""


@dataclass(frozen=True)
class StateDifference:
    """What differs between two checkpoints."""

    tensors: int
    """How many tensors both have."""
    alike: int
    """How many of them have the same shape in both, of more than one number."""
    differences: list[TensorDifference] = field(default_factory=list)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    config: dict[str, list[Any]] = field(default_factory=dict)
    """Settings that differ, with both values."""

    @property
    def same_tensors(self) -> bool:
        """Whether both have the same tensors with the same values."""
        return not (self.differences or self.only_first or self.only_second)

    @property
    def unrelated(self) -> bool:
        """Whether they are checkpoints of different models: no tensor has the same name and shape in both."""
        return not self.alike and not self.same_tensors


def compare(first: Checkpoint, second: Checkpoint, prefix: str = "") -> StateDifference:
    """Return what differs between two checkpoints; `prefix` limits it to names that begin with it ("model.")."""
    one, other = (
        {name: info for name, info in stored_tensors(checkpoint).items() if name.startswith(prefix)}
        for checkpoint in (first, second)
    )
    common = [name for name in one if name in other]
    settings = first.manifest.config, second.manifest.config
    differing = {
        name: [checkpoint.get(name) for checkpoint in settings]
        for name in sorted({*settings[0], *settings[1]})
        if settings[0].get(name) != settings[1].get(name)
    }
    return StateDifference(
        len(common),
        sum(one[name].shape == other[name].shape and math.prod(one[name].shape) > 1 for name in common),
        list(_differences(first, second, {name: (one[name], other[name]) for name in common})),
        [name for name in one if name not in other],
        [name for name in other if name not in one],
        differing,
    )


def _differences(
    first: Checkpoint, second: Checkpoint, names: dict[str, tuple[TensorInfo, TensorInfo]]
) -> Iterator[TensorDifference]:
    for name, (first_info, second_info) in names.items():
        elements = math.prod(first_info.shape)
        if first_info.shape != second_info.shape:
            yield TensorDifference(
                name, elements, reason=f"shape {list(first_info.shape)} and {list(second_info.shape)}"
            )
            continue
        difference = _difference(name, _read(first, name, first_info), _read(second, name, second_info))
        reason = f"{first_info.dtype} and {second_info.dtype}" if first_info.dtype != second_info.dtype else ""
        if difference.different or reason:
            yield TensorDifference(
                name, elements, difference.different, difference.max_abs, difference.relative, reason
            )


def _read(checkpoint: Checkpoint, name: str, info: TensorInfo) -> torch.Tensor:
    template = {name: torch.empty(info.shape, dtype=getattr(torch, info.dtype))}
    read_tensors(checkpoint, template)
    return template[name].flatten()


def _difference(name: str, one: torch.Tensor, other: torch.Tensor) -> TensorDifference:
    different, largest = 0, 0.0
    for left, right in zip(torch.split(one, _PIECE), torch.split(other, _PIECE), strict=True):
        if left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
            continue  # equal bits, NaN included
        a, b = left.to(_wide(left)), right.to(_wide(right))
        unequal = (a != b) & ~(a.isnan() & b.isnan())
        different += int(unequal.sum())
        gap = (a - b).abs()[unequal].nan_to_num(nan=math.inf)
        largest = max(largest, float(gap.max()) if gap.numel() else 0.0)
    if not different:
        return TensorDifference(name, one.numel())
    scale = max(float(piece.to(_wide(piece)).abs().nan_to_num(posinf=0.0).max()) for piece in torch.split(one, _PIECE))
    return TensorDifference(name, one.numel(), different, largest, largest / scale if scale else math.inf)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
