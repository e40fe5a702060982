"""What a job on ranks returns: written by the main rank, read by the process that sent the job."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import PreemptedError, UsageError
from phalanx.host.files import replacing
from phalanx.observe.history import History

RESULT_NAME = "result.pt"
WEIGHTS_NAME = "weights.pt"
_HEAVY = ("weights", "optimizers")
"""Parts of a result in a separate file, which may be too large to come back from another node."""


@dataclass
class JobResult:
    """What the main rank returns. Weights and optimizer state are on the CPU."""

    history: History | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    predictions: Any = None
    weights: dict[str, Any] | None = None
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    """The "state" of each of the user's optimizers, and the names of the parameters in each of its "groups": callbacks
    may have added some."""
    trained: dict[str, bool] = field(default_factory=dict)
    """Which parameters want gradients at the end, by name: callbacks may have unfrozen some."""
    scheduler_state: dict[str, Any] | None = None
    stopped: PreemptedError | None = None
    """Why training ended before its last step, where a signal stopped it; the rest is that of the last step."""
    ended: str = ""
    """Why and where training ended before its last step by itself, such as by `max_time`; empty: it did not."""

    @property
    def outcome(self) -> str:
        """How the run ended, for its record."""
        return "finished" if self.stopped is None or self.history is None else self.history.status


def write_result(result: object, folder: Path) -> None:
    """Write the result of the main rank where the parent reads it."""
    if isinstance(result, JobResult) and result.weights is not None:
        _write({name: getattr(result, name) for name in _HEAVY}, folder / WEIGHTS_NAME)
        result = dataclasses.replace(result, weights={}, optimizers=[])
    _write(result, folder / RESULT_NAME)


def _write(content: object, path: Path) -> None:
    import torch

    with replacing(path) as file:
        torch.save(content, file)


def read_result(folder: Path, *, may_have_none: bool = False) -> Any:
    """Read the result; it was written by ranks that this process started from its own pickle.

    `may_have_none`: whether all ranks of this node may have been scaled away before the end of the run.
    """
    if may_have_none and not (folder / RESULT_NAME).exists():
        reason = "the run has finished on other nodes, and this one had no rank left"
        _say_untrained(reason)
        return JobResult(history=History(status="finished", reason=reason))
    if not (folder / RESULT_NAME).exists():
        raise UsageError(
            "the ranks have ended well, but their result did not come back from the node that holds it",
            hint="Run on less data at a time, or write the results from the ranks: phalanx train --script ...",
        )
    import torch

    result = torch.load(folder / RESULT_NAME, map_location="cpu", weights_only=False)
    if not isinstance(result, JobResult) or result.weights is None:
        return result
    if (folder / WEIGHTS_NAME).exists():
        heavy = torch.load(folder / WEIGHTS_NAME, map_location="cpu", weights_only=False)
        return dataclasses.replace(result, **heavy)
    _say_untrained("the trained weights did not come back")
    return dataclasses.replace(result, weights=None)


def _say_untrained(why: str) -> None:
    print(
        f"phalanx: {why}: the model here is as it was before. Load the weights from a checkpoint, "
        "trainer.load(checkpoint_dir), or train by phalanx train --script and save them there.",
        file=sys.stderr,
        flush=True,
    )
