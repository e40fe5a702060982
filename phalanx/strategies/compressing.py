"""The base of strategies that average gradients with a compressor, whose residuals are in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.comm.comm_thread import CommThread
from phalanx.comm.compress import Compressor, build_compressor, merged_states
from phalanx.comm.exchange import Exchange
from phalanx.config import DistributedConfig
from phalanx.errors import ModelError
from phalanx.strategies.base import CommStats, Strategy
from phalanx.world.world import World

RANK_STATE = "compression"
"""Key of the compressors' states, one per prepared model, in a rank's part of a checkpoint."""


@dataclass(frozen=True)
class Lane:
    """How the gradients of one model are sent."""

    compressor: Compressor
    exchange: Exchange
    comm_thread: CommThread


class CompressesGradients(Strategy):
    """A strategy with one `Lane` per wrapped model, in the order of wrapping."""

    def __init__(self, config: DistributedConfig, world: World) -> None:
        super().__init__(config, world)
        self.lanes: list[Lane] = []

    def compressor_for(self, model: nn.Module) -> Compressor:
        """Return the compressor that the config names; ModelError for a model that it cannot compress."""
        for name, module in model.named_modules():
            if self.config.compression != "none" and getattr(module, "sparse", False) is True:
                raise ModelError(
                    f"compression = {self.config.compression!r}: {name} ({type(module).__name__}) has sparse "
                    "gradients, which have no flat memory to compress",
                    hint="Build it with sparse=False, or leave compression out.",
                )
        return build_compressor(self.config, model.named_parameters())

    @property
    def takes_loss_scale(self) -> Callable[[torch.Tensor | None, torch.Tensor | None], None] | None:
        """What sets the scale of the compressors, where there are any."""
        return self._set_loss_scale if self.config.compression != "none" else None

    def _set_loss_scale(self, weight: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        """Set the mean weight of the losses and fp16's loss scale, which compressors remove from their residuals.

        Without residuals fp16's loss scale stays in: fp16 messages need it as fp16 gradients do.
        """
        whole = weight if scale is None else scale if weight is None else weight * scale
        for lane in self.lanes:
            lane.compressor.unit = whole if lane.compressor.keeps_residuals else weight

    @property
    def keeps_rank_state(self) -> bool:
        """Whether there are compressors."""
        return bool(self.lanes)

    def rank_state(self) -> dict[str, Any]:
        """Return the compressors' states on this rank, one for each model."""
        return {RANK_STATE: [lane.compressor.state_dict() for lane in self.lanes]}

    def load_rank_state(self, ranks: Sequence[Mapping[str, Any]], factor: float) -> bool:
        """Load what one or several ranks saved; `factor`: ranks now over ranks then."""
        saved = [rank[RANK_STATE] for rank in ranks if RANK_STATE in rank]
        for number, lane in enumerate(self.lanes):
            states = [states[number] for states in saved if number < len(states)]
            if states:
                lane.compressor.load_state_dict(merged_states(states, factor))
        return bool(saved)

    def comm_stats(self) -> CommStats | None:
        """Return what was sent since the models were wrapped; None where nothing is counted."""
        if not self.lanes:
            return None
        return CommStats(
            sum(lane.exchange.sent_bytes for lane in self.lanes),
            sum(lane.compressor.plain_bytes for lane in self.lanes),
            sum(lane.comm_thread.busy_s for lane in self.lanes),
            sum(lane.comm_thread.waited_s for lane in self.lanes),
        )

    def close(self) -> None:
        """End the communication threads and release the memory of the gradients."""
        for lane in self.lanes:
            lane.comm_thread.close()
            lane.exchange.close()
        self.lanes.clear()
