"""An ability of some strategies: optimizer states, too, start from rank 0's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@runtime_checkable
class SharesOptimizers(Protocol):
    """What a strategy adds when ranks may begin with optimizer states of their own."""

    def share_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Give every rank the state that rank 0's optimizer has; all ranks call this."""
