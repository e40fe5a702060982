"""A bucket: gradients that travel together, because many small messages cost more than one large one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Bucket:
    """One run of gradients: the flat memory, and each gradient as a view of it, under its parameter's name."""

    index: int
    flat: torch.Tensor
    names: tuple[str, ...]
    parts: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return self.flat.numel() * self.flat.element_size()
