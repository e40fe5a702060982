"""An ability of strategies that average gradients themselves: compressors, whose residuals are in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.comm.compress import build_compressor, merged_states
from phalanx.errors import ModelError
from phalanx.strategies.traffic import SendsGradients, Traffic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from phalanx.comm.compress import Compressor
    from phalanx.comm.courier import Courier
    from phalanx.comm.exchange import Exchange
    from phalanx.config import DistributedConfig

RANK_STATE = "compression"
"""Under this key a rank's part of a checkpoint holds the compressors' states, one for each prepared model."""


@dataclass(frozen=True)
class Lane:
    """How one model's gradients travel."""

    compressor: Compressor
    exchange: Exchange
    courier: Courier


class CompressesGradients(SendsGradients):
    """What a strategy adds: it puts a lane here for each model that it wraps; the loop saves, restores and reports."""

    config: DistributedConfig

    @property
    def lanes(self) -> list[Lane]:
        """Those of the wrapped models, in the order in which they were wrapped."""
        found: list[Lane] = self.__dict__.setdefault("_lanes", [])
        return found

    def compressor_for(self, model: nn.Module) -> Compressor:
        """Return the compressor that the config names, refusing a model that it cannot take."""
        for name, module in model.named_modules():
            if self.config.compression != "none" and getattr(module, "sparse", False) is True:
                raise ModelError(
                    f"compression = {self.config.compression!r}: {name} ({type(module).__name__}) has sparse "
                    "gradients, which have no flat memory to compress",
                    hint="Build it with sparse=False, or leave compression out.",
                )
        return build_compressor(self.config, model.named_parameters())

    def set_unit(self, weight: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        """Say, before a backward pass, what the loss is multiplied by: its mean weight, and fp16's loss scale.

        A compressor that keeps nothing has no use for the scale taken out: fp16 on the wire needs it as fp16 here does.
        """
        whole = weight if scale is None else scale if weight is None else weight * scale
        for lane in self.lanes:
            lane.compressor.unit = whole if lane.compressor.keeps_residuals else weight

    def compression_state(self) -> list[dict[str, Any]]:
        """Return the compressors' states on this rank, one for each model."""
        return [lane.compressor.state_dict() for lane in self.lanes]

    def load_compression_state(self, ranks: Sequence[Sequence[Mapping[str, Any]]], factor: float) -> None:
        """Take up what one or several ranks saved; `factor`: ranks now over ranks then."""
        for number, lane in enumerate(self.lanes):
            states = [states[number] for states in ranks if number < len(states)]
            if states:
                lane.compressor.load_state_dict(merged_states(states, factor))

    def traffic(self) -> Traffic | None:
        """Return what was sent since the models were wrapped; None where nothing is counted."""
        if not self.lanes:
            return None
        return Traffic(
            sum(lane.exchange.sent_bytes for lane in self.lanes),
            sum(lane.compressor.plain_bytes for lane in self.lanes),
            sum(lane.courier.busy_s for lane in self.lanes),
            sum(lane.courier.waited_s for lane in self.lanes),
        )

    def stop_sending(self) -> None:
        """End the couriers' threads, and let go of the memory that gradients lay in."""
        for lane in self.lanes:
            lane.courier.close()
            lane.exchange.close()
        self.lanes.clear()
