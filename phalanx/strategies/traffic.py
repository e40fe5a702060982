"""An ability of strategies that count what they send: the summary of a run tells it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """What this rank has sent, what ddp would have sent, how long that took, and how long the rank waited for it."""

    sent_bytes: int
    plain_bytes: int
    busy_s: float
    waited_s: float

    @property
    def hidden_s(self) -> float:
        """The time that went by while the rank computed."""
        return max(0.0, self.busy_s - self.waited_s)


class SendsGradients(ABC):
    """What a strategy adds when it moves gradients or weights itself."""

    @abstractmethod
    def traffic(self) -> Traffic | None:
        """Return what was sent since the models were wrapped; None where nothing is counted."""

    @abstractmethod
    def stop_sending(self) -> None:
        """Let go of threads and memory; nothing is said to other ranks, which may be gone."""
