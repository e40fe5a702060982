"""Report a run to Weights & Biases."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError, first_line
from phalanx.observe.events import Event, MetricsReported, RanksReported, RunEnded, RunStarted, StepDone
from phalanx.observe.run_folder import note_written
from phalanx.observe.sinks import read_tracking, write_tracking

_EXIT_CODES = {"failed": 1, "preempted": 1, "interrupted": 1}
_FACTS = ("world_size", "device", "strategy", "precision", "global_batch", "parameters")


class WandbSink:
    """Logs settings, metrics and the result; joins the W&B run that is active in this process, or starts one.

    Its files go to the folder of the run. WANDB_MODE, WANDB_ENTITY and the other variables of W&B hold; a run without a
    network (WANDB_MODE=offline) is uploaded later with `wandb sync`.
    """

    def __init__(
        self,
        run_dir: Path,
        project: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        resumes: bool = False,
    ) -> None:
        """`resumes`: continue the W&B run that an earlier run in the same `run_dir` reported to."""
        self._wandb = import_wandb()
        self._status = "failed"
        self._is_ours = self._wandb.run is None
        settings = {key: value for key, value in (config or {}).items() if value is not None}
        before = read_tracking(run_dir, "wandb") if resumes else None
        if self._is_ours:
            self._run = self._start(run_dir, project, name, before or secrets.token_hex(4))
            write_tracking(run_dir, "wandb", self._run.id)
            note_written(run_dir, self._run.settings.sync_dir)
        else:
            self._run = self._wandb.run
        self._run.config.update(settings, allow_val_change=True)
        # Not W&B's own step, which cannot go back: a resumed run repeats the steps after its checkpoint.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self.next_commands: list[str] = []
        if self._is_ours and self._run.offline:
            folder = os.path.relpath(self._run.settings.sync_dir)
            self.next_commands = [f"wandb sync {'--append ' if before else ''}{shlex.quote(folder)}"]

    def handle(self, event: Event) -> None:
        """Log the event's values; W&B sends them in the background."""
        if isinstance(event, RunStarted):
            facts = {name: getattr(event, name) for name in _FACTS}
            self._run.config.update({**facts, "run_dir": event.run_dir}, allow_val_change=True)
        elif isinstance(event, (StepDone, MetricsReported, RanksReported)):
            self._run.log({**event.scalars(), "step": event.step})  # the axis, although a user may log a "step"
        elif isinstance(event, RunEnded):
            self._status = event.status
            self._run.summary.update({f"best/{name}": value for name, value in event.best.items()})
            rest = {"throughput": event.throughput, "speedup": event.speedup, "checkpoint": event.checkpoint}
            self._run.summary.update({name: value for name, value in rest.items() if value is not None})

    def close(self) -> None:
        """End the run if it was started here, and wait until its data is sent."""
        if self._is_ours:
            self._run.finish(exit_code=_EXIT_CODES.get(self._status, 0))

    def _start(self, run_dir: Path, project: str | None, name: str | None, run_id: str) -> Any:
        """Start or continue a run; refuse before training begins where W&B cannot be reached or the user is unknown."""
        wandb = self._wandb
        is_offline = wandb.setup().settings.mode == "offline"
        # The launcher keeps what ranks print; W&B must not replace the streams of this process.
        settings = wandb.Settings(console="off", silent=is_offline)
        try:
            return wandb.init(
                project=project or os.environ.get("WANDB_PROJECT") or "phalanx",
                name=name,
                id=run_id,
                resume=None if is_offline else "allow",
                dir=run_dir.absolute(),
                settings=settings,
            )
        except wandb.errors.Error as error:
            raise UsageError(
                f"Weights & Biases took no run: {first_line(error)[:300]}",
                hint="Log in with: wandb login. Without a network set WANDB_MODE=offline and upload later.",
            ) from error


def import_wandb() -> Any:
    """Import W&B; UsageError where it is not installed."""
    try:
        import wandb
    except ImportError as error:
        raise UsageError(
            "wandb needs Weights & Biases, which is not installed", hint="Run: pip install 'phalanx[wandb]'"
        ) from error
    return wandb
