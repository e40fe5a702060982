"""Keras' loops at the gate of a search: the leading worker asks after an epoch, and all of them go on or stop."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

from phalanx.loop.gating import EpochGate
from phalanx.trainers.tensorflow.backup import start_of

if TYPE_CHECKING:
    from pathlib import Path

    import torch.distributed as dist

    from phalanx.trainers.tensorflow.reporting import KerasReport

_fits = itertools.count()
_OWNER = "trial"
"""A file in a backup's folder that names the trial whose backup it is."""


def open_gate(store: dist.Store | None, *, leads: bool, done: int) -> EpochGate | None:
    """Return the gate of this run, which has `done` epochs behind it; None where nobody wants to be asked."""
    fit = next(_fits)
    if store is not None:
        import torch.distributed as dist

        store = dist.PrefixStore(f"fit-{fit}", store)  # a script may fit again in the same processes
    gate = EpochGate(store, asks=leads)
    gate.start_after(done)
    return gate if gate.is_there else None


def as_callback(keras: Any, gate: EpochGate, report: KerasReport) -> Any:
    """Return the gate as a callback. It stands before the backup, which saves the epoch after which a run stops."""

    class AtTheGate(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            last = epoch + 1 == self.params["epochs"] or self.model.stop_training
            if not last and not gate.lets_pass(epoch + 1):
                self.model.stop_training = True
                report.status = "stopped"

    return AtTheGate()


def rate_keeper(keras: Any, model: Any, directory: Path, *, leads: bool) -> Any:
    """Return a callback that stands behind the backup: a trial that took over another's keeps its own rate.

    Backups hold the rate among the optimizer's variables. In a trial's own backup it is what callbacks made of it. A
    schedule is no variable, and stays the model's own anyway.
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    compiled = optimizer.learning_rate
    own = float(compiled.numpy()) if hasattr(compiled, "assign") else None
    note, trial = directory / _OWNER, os.environ.get("PHALANX_TRIAL", "")
    is_ours = note.exists() and note.read_text(encoding="ascii") == trial

    class KeepTheRate(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            if own is not None and not is_ours:
                optimizer.learning_rate = own

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if leads and start_of(directory).epoch == epoch + 1:  # not before: a kill may leave the other's backup
                note.write_text(trial, encoding="ascii")

    return KeepTheRate()
