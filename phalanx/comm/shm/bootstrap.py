"""All-gather of short texts before shared memory exists, over a process group that detects a dead rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from phalanx.errors import CommunicationError

if TYPE_CHECKING:
    AllGatherText = Callable[[str], list[str]]
    """Tells all ranks a short text, and returns what each of them told, by rank."""

TEXT = 256
"""Bytes of such a text."""


def text_gatherer(all_gather: Callable[[list[torch.Tensor], torch.Tensor], object], size: int) -> AllGatherText:
    """Return a way to tell, made of a collective that collects the ranks' tensors in a list."""

    def tell(text: str) -> list[str]:
        own = torch.tensor(list(text.encode()[:TEXT].ljust(TEXT)), dtype=torch.uint8)
        heard = [torch.empty_like(own) for _ in range(size)]
        try:
            all_gather(heard, own)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise CommunicationError(f"a rank was lost before the ranks could share memory: {reason}") from error
        return [bytes(row.tolist()).decode(errors="replace").rstrip() for row in heard]

    return tell


def group_text_gatherer(group: dist.ProcessGroup | None) -> AllGatherText:
    """Return the way to tell of a process group that carries CPU tensors."""
    return text_gatherer(lambda heard, own: dist.all_gather(heard, own, group=group), dist.get_world_size(group))
