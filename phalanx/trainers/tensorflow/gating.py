"""Keras' loops at the gate of a search: the leading worker asks after an epoch, and all of them go on or stop."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from phalanx.loop.gating import EpochGate

if TYPE_CHECKING:
    import torch.distributed as dist

    from phalanx.trainers.tensorflow.reporting import KerasReport

_fits = itertools.count()


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


def rate_keeper(keras: Any, model: Any) -> Any:
    """Return a callback that stands behind the backup: a trial keeps its own rate, whoever's weights it has.

    Backups hold the rate among the optimizer's variables. A schedule is no variable, and stays the model's own anyway.
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    compiled = optimizer.learning_rate
    own = float(compiled.numpy()) if hasattr(compiled, "assign") else None

    class KeepTheRate(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            if own is not None:
                optimizer.learning_rate = own

    return KeepTheRate()
