"""What the loop calls of the room `speed/`, whose objects it gets by name (`phalanx.features`) and keeps for a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from phalanx.loop.forward import Forward
    from phalanx.loop.step import StepOutcome, Weighting


class StepCapture(Protocol):
    """Takes steps as one CUDA graph once that is possible."""

    is_off: bool

    def take(
        self,
        forward: Forward,
        batches: Iterator[Any],
        *,
        weighting: Weighting,
        measure_norm: bool = False,
        reseed: Callable[[int, int], None] | None = None,
    ) -> StepOutcome | None:
        """Take a step, as `train_step` does; None when the epoch has none left."""

    def check(self) -> None:
        """Drop the recording if what it depends on has changed."""

    def drop(self) -> None:
        """Drop the recording."""

    def refuse(self, why: str) -> None:
        """Record no step from here on."""


class CompiledSwitch(Protocol):
    """Switches compiled models between their graphs and the code as it is written."""

    def use(self, *, compiled: bool) -> None:
        """Let calls from now on run compiled, or as written."""

    def end(self) -> None:
        """Let calls run compiled again."""


class CompileCount(Protocol):
    """Counts what torch.compile compiles in this process."""

    seconds: float

    @property
    def graphs(self) -> int:
        """How many graphs were made so far."""

    def watch(self, first_step: int, *, compiles: bool) -> Callable[[], None]:
        """Watch from now on, and return what ends it."""

    def step_done(self) -> None:
        """Report what was compiled up to the end of a step, if anything."""
