"""What `fit` returns: the run, epoch by epoch and logged step by logged step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import UsageError
from phalanx.observe.events import LOGGED


@dataclass(frozen=True)
class EpochRecord:
    """One epoch: the mean training loss, what was measured on the validation data, and how fast it went."""

    epoch: int
    step: int
    train_loss: float
    val: dict[str, float] = field(default_factory=dict)
    learning_rate: float = 0.0
    seconds: float = 0.0
    samples_per_second: float = 0.0


@dataclass
class History:
    """The record of a run."""

    epochs: list[EpochRecord] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Evaluations within epochs: `{"step": 500, "epoch": 1, "val": {"loss": 0.3}}`; those after epochs are in these."""
    logged: list[dict[str, Any]] = field(default_factory=list)
    """Values that you logged: `{"step": 500, "values": {"critic": 0.7}}`."""
    status: str = "running"
    total_time: float = 0.0
    """Seconds of the whole run, evaluation and checkpoints included."""
    throughput: float = 0.0
    """Samples per second of training time, over all ranks: without the first step, compilation, evaluation, saving."""
    first_steps_seconds: float = 0.0
    """What the first step took apart from compilation: memory and kernels on first use. Not in the throughput."""
    compile_seconds: float = 0.0
    """What torch.compile took, in the first step and later. Not in the throughput."""
    compile_graphs: int = 0
    """How many graphs it has made."""
    slow_seconds: float = 0.0
    """Seconds of laps (from one logged step to the next) of over twice the usual time per step: in the throughput."""
    slow_laps: int = 0
    """How many such laps there were."""
    laps: int = 0
    """How many laps there were in all."""
    tokens_per_second: float | None = None
    """The same in tokens, for language models that know their operations per token."""
    mfu: float | None = None
    """The share of the devices' peak that the model's operations were; None where the peak is not known."""
    speedup: float | None = None
    """Throughput against the setting `reference_throughput`; None where that is not set."""
    checkpoint: str | None = None
    """The path of the last checkpoint."""
    reason: str = ""
    """Why the run ended, in words; empty where it took all its steps."""
    checkpoint_stall: float = 0.0
    """Seconds in which training waited for checkpoints."""
    best_checkpoint: str | None = None
    """The path of the checkpoint with the best value of `best_metric`."""
    best_metric: str = ""
    """The metric of the setting `keep_best`, such as val/loss; empty where it was not measured."""
    best_value: float | None = None
    loaded_best: bool = False
    """Whether the model has the weights of the best checkpoint, as the setting load_best_at_end asks."""
    best_step: int | None = None
    sent_bytes: int | None = None
    """What rank 0 sent of its gradients since this run or its resumption began; None where that is not counted."""
    plain_bytes: int | None = None
    """What ddp would have sent, without compression."""
    exchange_hidden: float | None = None
    """Seconds in which gradients travelled while rank 0 computed."""
    exchange_waited: float | None = None
    """Seconds in which rank 0 waited for gradients to travel."""
    goodput: dict[str, float] = field(default_factory=dict)
    """Seconds of wall time by category, such as productive, data_wait or lost, over all attempts of the run."""
    whole_throughput: float | None = None
    """Samples per second of that wall time, start-up and interruptions included."""
    whole_mfu: float | None = None
    """MFU over that wall time."""

    @property
    def best_accuracy(self) -> float | None:
        """The highest validation accuracy; None when none was measured."""
        return max(_finite(self._measured("accuracy")), default=None)

    @property
    def best_loss(self) -> float | None:
        """The lowest validation loss, or training loss without validation; None if no finite one was measured."""
        measured = [value for value in self._measured("loss") if value is not None]
        return min(_finite(measured or (record.train_loss for record in self.epochs)), default=None)

    def _measured(self, name: str) -> list[float | None]:
        """Return a metric's values on the validation data."""
        measurements = [
            *(record.val for record in self.epochs),
            *(evaluation["val"] for evaluation in self.evaluations),
        ]
        return [values.get(name) for values in measurements]

    @property
    def final_loss(self) -> float | None:
        """The training loss of the last epoch, or of the last logged step before the first epoch has ended."""
        if self.epochs:
            return self.epochs[-1].train_loss
        return self.steps[-1].get("loss") if self.steps else None

    def to_dataframe(self) -> Any:
        """Return a pandas DataFrame with one row per epoch; validation metrics are columns such as `val_accuracy`."""
        try:
            import pandas as pd
        except ImportError as error:
            raise UsageError(
                "to_dataframe() needs pandas, which is not installed", hint="Run: pip install 'phalanx[pandas]'"
            ) from error
        plain = [item.name for item in dataclasses.fields(EpochRecord) if item.name != "val"]
        metrics = dict.fromkeys(f"val_{name}" for record in self.epochs for name in record.val)
        rows = [dataclasses.asdict(record) for record in self.epochs]
        rows = [{**row, **{f"val_{name}": value for name, value in row["val"].items()}} for row in rows]
        return pd.DataFrame(rows, columns=[*plain, *metrics])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> History:
        """Rebuild a history from `to_dict`."""
        names = {item.name for item in dataclasses.fields(cls)}
        fields = {name: value for name, value in data.items() if name in names}
        epochs = [EpochRecord(**record) for record in fields.pop("epochs", [])]
        return cls(epochs=epochs, **fields)

    @classmethod
    def from_events(cls, events: Iterable[Mapping[str, Any]]) -> History:
        """Rebuild a history from the events of a run; what a resumed run did again replaces what was lost."""
        history = cls()
        for event in events:
            match event["event"]:
                case "run_started":
                    begun = event.get("first_step", 0)
                    history.steps = [step for step in history.steps if step["step"] <= begun]
                    history.epochs = [epoch for epoch in history.epochs if epoch.step <= begun]
                    history.evaluations = [record for record in history.evaluations if record["step"] <= begun]
                    history.logged = [record for record in history.logged if record["step"] <= begun]
                    history.status, history.reason = "running", ""
                case "step":
                    history.steps.append({k: v for k, v in event.items() if k not in ("event", "time", "rank")})
                case "metrics" if event["split"] == "val" and not event.get("ends_epoch"):
                    evaluation = {"step": event["step"], "epoch": event["epoch"], "val": event["values"]}
                    history.evaluations.append(evaluation)
                case "metrics" if event["split"] == LOGGED:
                    history.logged.append({"step": event["step"], "values": event["values"]})
                case "epoch":
                    rate = history.steps[-1]["learning_rate"] if history.steps else 0.0
                    if history.epochs and history.epochs[-1].epoch == event["epoch"]:
                        history.epochs.pop()  # the run ended within it, and was resumed
                    keys = ("epoch", "step", "train_loss", "val", "seconds", "samples_per_second")
                    history.epochs.append(EpochRecord(**{k: event[k] for k in keys}, learning_rate=rate))
                case "run_ended":
                    names = {item.name for item in dataclasses.fields(cls)} - {
                        "epochs",
                        "steps",
                        "evaluations",
                        "logged",
                    }
                    for name in names & event.keys():
                        setattr(history, name, event[name])
        return history

    def __repr__(self) -> str:
        parts = [f"{self.status}, {len(self.epochs)} epoch{'' if len(self.epochs) == 1 else 's'}"]
        if self.total_time:
            parts.append(f"{self.total_time:.1f} s")
        for name, value in (("best accuracy", self.best_accuracy), ("best loss", self.best_loss)):
            if value is not None:
                parts.append(f"{name} {value:.4f}")
        if self.throughput:
            parts.append(f"{self.throughput:,.0f} samples/s")
        return f"History({', '.join(parts)})"


def _finite(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None and math.isfinite(value))
