"""What a loop of the user's reports through its `Formation`: steps, losses, throughput, epochs, and logged values.

It is recorded if there is a place for it: the folder of a run that `phalanx train --script` has started, or what the
settings name (`run_dir`, `tensorboard`, `mlflow`, `wandb`). The events are those of a trainer.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.config.ways import loop_note
from phalanx.data.order import BatchSplit
from phalanx.loop import optional
from phalanx.loop.step_info import StepInfo
from phalanx.loop.values import OWN_CURVES, VAL, Values, checked, checked_step, reduced
from phalanx.observe.guard import say_to_user
from phalanx.observe.heartbeat import current as current_heartbeat
from phalanx.observe.run_folder import make_run_dir
from phalanx.observe.sinks import EventStream

if TYPE_CHECKING:
    from phalanx.loop.formation_state import FormationState
    from phalanx.loop.reporting import Reporter

NOT_RECORDED = (
    "log: nothing is recorded. Start the script with phalanx train --script, or give Formation(run_dir=...) or "
    "tensorboard=True, mlflow=True, wandb=True."
)
CLOSED = "log: the Formation is closed, and its record with it. Log before f.close()."
_UNREAD_STEPS = 50
"""Losses are read at least every this many steps, however seldom they are reported."""


class LoopRecord:
    """Follows a loop by the calls that it makes: `backward`, the optimizer's step, `log`."""

    def __init__(self, formation: FormationState) -> None:
        self._formation = formation
        self._is_recorded = _has_place(formation.config)
        self._report: Reporter | None = None
        self._early: list[tuple[int, Values, Any]] = []
        self._has_begun = self._has_warned = self._has_ended = False
        self._pass: tuple[int, int] = (-1, -1)
        self._loss: torch.Tensor | None = None
        self._share: float | torch.Tensor = 0.0
        self._epoch = 0
        self._board = current_heartbeat()

    def log(self, values: Values, value: Any, step: int | None, reduce: str | None) -> None:
        """Keep values until the next report; see `Formation.log`."""
        formation = self._formation
        at = formation.step if step is None else checked_step(step)
        if self._report is not None:
            self._report.log(at, values, value, reduce)
            return
        numbers = checked(values, value, reserved=OWN_CURVES)
        if reduce is not None:
            numbers = reduced(numbers, reduce, formation)
        if self._is_recorded and not self._has_ended:  # before the first pass
            self._early.append((at, numbers, None))
        elif formation.is_main and not self._has_warned:
            self._has_warned = True
            say_to_user(CLOSED if self._is_recorded else NOT_RECORDED)

    def begin(self) -> None:
        """Begin with the first pass: what was prepared is known. All ranks call this."""
        if self._has_begun:
            return
        self._has_begun = True
        formation, gradients = self._formation, self._formation.gradients
        gradients.on_step = self._step_done
        self._pass = (gradients.batches, gradients.steps)
        note = loop_note(formation.config)
        if not self._is_recorded:
            if note and formation.is_main:
                say_to_user(f"warning: {note}")
            return
        report = self._open()
        formation.notes += [f"warning: {note}"] if note else []
        self._epoch = formation.loaders[0].epoch if formation.loaders else 0
        report.started(formation.step, None, nn.ModuleList(formation.models))
        self._report = report

    def _open(self) -> Reporter:
        """Open the record; values that were logged before go into it."""
        formation = self._formation
        config, loaders = formation.config, formation.loaders
        name = config.name or Path(sys.argv[0] if sys.argv else "").stem or "loop"
        sinks, folder = [], Path()
        if formation.is_main:
            run_dir = config.run_dir or os.environ.get("PHALANX_RUN_DIR")
            config_here = config if run_dir is None else config.with_trusted(run_dir=str(run_dir))
            folder = optional.own_run_dir(lambda: make_run_dir(config_here, name))
            sinks = optional.open_sinks(config, folder, console=False)
        layout = loaders[0].sharded.layout if loaders else BatchSplit(0)
        report = optional.Reporter(formation, name, layout, folder, EventStream(sinks, rank=formation.rank))
        formation.clock.data_wait = lambda: sum(loader.waited_s for loader in loaders)
        if formation.is_main:
            atexit.register(self._flush)
            formation.undo_later(self._close_sinks)
        for entry in self._early:
            report.log(*entry)
        self._early.clear()
        return report

    def add_loss(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Count the loss of a backward pass; the losses of all passes of a micro-batch add up."""
        self.begin()
        report, gradients = self._report, self._formation.gradients
        if report is None:
            return
        if self._formation.loaders and self._formation.loaders[0].epoch != self._epoch:
            self._end_epoch(report)
        loss = loss.detach()
        # Without a loader each pass is a micro-batch, unless a step has only one.
        one = gradients.micro is None and self._formation.config.gradient_accumulation_steps == 1
        current = (0 if one else gradients.batches, gradients.steps)
        if self._loss is not None and current == self._pass:
            self._loss = self._loss + loss
            return
        self._keep_loss(report, gradients.steps + 1)
        micro = gradients.micro
        self._pass, self._loss = current, loss
        self._share = weight if weight is not None else float(micro.samples) if micro is not None else 1.0

    def _keep_loss(self, report: Reporter, step: int) -> None:
        if self._loss is not None:
            report.loss_log.add(step, self._loss, self._share)
            self._loss = None

    def _step_done(self) -> None:
        """Count a step of the first optimizer; report it if that is due. All ranks call this."""
        formation, report = self._formation, self._report
        step, gradients = formation.step, formation.gradients
        self._board.beat(step)
        if report is None:
            return
        self._keep_loss(report, step)
        report.count(0 if gradients.micro is None else gradients.micro.global_samples)
        if report.is_due(step):
            report.report_logged(step, self._shown_epoch)
            self._report_step(report, step)
        elif step % _UNREAD_STEPS == 0:
            report.losses(report.loss_log.read())

    def _report_step(self, report: Reporter, step: int) -> None:
        info = StepInfo(step, self._shown_epoch - 1, 0, self._rate, torch.zeros(()))
        report.step_done(info, report.loss_log.read(), None, self._formation.gradients.skipped_steps)

    @property
    def _shown_epoch(self) -> int:
        """The number of the epoch, from 1; 0 for a loop without a prepared loader, whose epochs are not known."""
        return self._epoch + 1 if self._formation.loaders else 0

    @property
    def _rate(self) -> float:
        optimizers = self._formation.optimizers
        return float(optimizers[0].param_groups[0]["lr"]) if optimizers else 0.0

    def _end_epoch(self, report: Reporter) -> None:
        """Report the epoch that has ended, with the values of the validation data that were logged after it."""
        step = self._formation.step
        report.losses(report.loss_log.read())
        values = report.report_logged(step, self._shown_epoch, ends_epoch=True)
        measured = {name.removeprefix(VAL): value for name, value in values.items() if name.startswith(VAL)}
        report.epoch_done(step, self._epoch, self._rate, measured)
        self._epoch = self._formation.loaders[0].epoch

    def end(self) -> None:
        """Report the end of the loop; all ranks call this."""
        self._has_ended = True
        report, formation = self._report, self._formation
        if report is not None:
            self._report_step(report, formation.step)  # which step is the last one is known only now
            if formation.loaders and formation.loaders[0].epoch != self._epoch:
                self._end_epoch(report)
            report.losses(report.loss_log.read())
            report.ended("finished", "", formation.step, None)
        elif self._early and formation.is_main:  # a loop without a pass: values alone
            self._report = self._open()
            self._flush()

    def _flush(self) -> None:
        """Write what was logged last; a script may end without `close`."""
        if self._report is not None:
            self._report.report_logged(self._formation.step, self._shown_epoch)

    def _close_sinks(self) -> None:
        atexit.unregister(self._flush)
        if self._report is not None:
            self._flush()
            self._report.events.close()
            self._report = None


def _has_place(config: DistributedConfig) -> bool:
    """Whether the settings, which are equal on all ranks, or the launcher name a place for a record."""
    named = config.run_dir or config.tensorboard or config.mlflow or config.wandb
    return bool(named or os.environ.get("PHALANX_RUN_DIR"))
