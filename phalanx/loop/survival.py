"""What keeps a run's state in a process while the ranks around it change (`phalanx.recovery`, elastic engines)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import nn

if TYPE_CHECKING:
    from phalanx.loop.formation import Formation
    from phalanx.loop.train_loop import TrainLoop
    from phalanx.observe.history import History


class Survival(Protocol):
    """The state of this process that is kept from one group of ranks to the next."""

    run_dir: Path | None
    """The folder of the run; None before the first group."""
    is_stale: bool
    """Whether the objects of the task were trained, and their state is not in memory: they begin no run."""

    def returning(self, formation: Formation) -> AbstractContextManager[None]:
        """Keep the final state, too: ranks may be lost after the loop, while its result is gathered."""

    def match(self, formation: Formation, model: nn.Module) -> None:
        """Go on under the name of the run, with the parameters that it trains; before a model is prepared."""

    def run(self, loop: TrainLoop, run_dir: Path) -> History:
        """Run the loop from the kept state."""
