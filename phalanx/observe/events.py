"""The typed stream of what happens in a run: progress bar, JSONL, TensorBoard and MLflow are sinks on it.

One event is one JSON object: `{"event": kind, "time": seconds since the epoch, "rank": r, ...fields}`. JSON has no NaN
and no infinity, so these floats are written as the strings "nan", "inf" and "-inf", and read back as floats.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

KINDS: dict[str, type[Event]] = {}
"""Every kind of event by its name in JSON."""

LOGGED = ""
"""In place of a split: values that the user logged, whose names are the curves."""

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Event:
    """What every event has: its kind, when it happened, and on which rank (the stream fills that in)."""

    kind: ClassVar[str] = ""
    time: float = field(default_factory=time.time, kw_only=True)
    rank: int | None = field(default=None, kw_only=True)

    def __init_subclass__(cls) -> None:
        KINDS[cls.kind] = cls

    def to_dict(self) -> dict[str, Any]:
        """Return the event as plain data that JSON can hold."""
        fields = {name: _encode(value) for name, value in vars(self).items()}
        return {"event": self.kind, "time": fields.pop("time"), "rank": fields.pop("rank"), **fields}

    def to_json(self) -> str:
        """Return the event as one line of JSON, without the line's end."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class RunStarted(Event):
    """Training begins: what runs where, and how large a step is."""

    kind: ClassVar[str] = "run_started"
    name: str
    run_dir: str
    world_size: int
    device: str
    strategy: str
    precision: str
    parameters: int
    batch_size: int
    accumulation: int
    global_batch: int
    total_steps: int | None = None
    epochs: int | None = None
    resumed_from: str | None = None
    mesh: dict[str, int] = field(default_factory=dict)
    first_step: int = 0
    tensorboard_dir: str | None = None
    log_dir: str | None = None
    trained_parameters: int | None = None
    """How many of `parameters` are trained; fewer with adapters or frozen layers."""
    layout: str = ""
    """How the ranks share the model, in words: `fsdp 2 x tensor 2`."""
    ranks_per_gpu: int = 1
    """Over 1: this many ranks share a GPU, and no figure of this run says how fast the layout is."""
    job: dict[str, Any] = field(default_factory=dict)
    """What the planner must know to predict the run (`plan.learning.job_of`); empty for a model without dimensions."""
    run_id: str = ""
    """The name of the run in its checkpoints and locks; empty for an engine that writes neither."""


@dataclass(frozen=True)
class StepDone(Event):
    """A step that was logged. `epoch` counts from 1; `samples` is how many the run has seen over all ranks."""

    kind: ClassVar[str] = "step"
    step: int
    epoch: int
    loss: float | None
    """The mean loss of the steps since the last report; None in a script, whose loss only the script knows."""
    learning_rate: float
    grad_norm: float | None = None
    samples_per_second: float = 0.0
    step_seconds: float = 0.0
    memory_bytes: int = 0
    samples: int = 0
    tokens_per_second: float | None = None
    mfu: float | None = None
    speedup: float | None = None
    """samples_per_second against the setting `reference_throughput`."""
    gpu_utilization: float | None = None
    """The share of time in which rank 0's GPU ran a kernel, from 0 to 1; None on the CPU."""

    CURVES: ClassVar[dict[str, str]] = {
        "train/loss": "loss",
        "train/learning_rate": "learning_rate",
        "train/grad_norm": "grad_norm",
        "perf/samples_per_second": "samples_per_second",
        "perf/step_seconds": "step_seconds",
        "perf/tokens_per_second": "tokens_per_second",
        "perf/mfu": "mfu",
        "perf/speedup": "speedup",
        "system/memory_bytes": "memory_bytes",
        "system/gpu_utilization": "gpu_utilization",
    }
    """The curves that a step is a point of, by the names that dashboards show, and their fields."""

    def scalars(self) -> dict[str, float]:
        """Return the values of `CURVES` that are known."""
        values = {name: getattr(self, field) for name, field in self.CURVES.items()}
        return {name: float(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Phase(Event):
    """A period that is not a training step (evaluation, checkpoint, compilation) begins or ends."""

    kind: ClassVar[str] = "phase"
    name: str
    state: Literal["begin", "end"]
    seconds: float = 0.0
    total: int | None = None
    """How many batches an evaluation has, where that is known."""


@dataclass(frozen=True)
class MetricsReported(Event):
    """Values measured on a split of the data, such as `{"loss": 0.31, "accuracy": 0.94}` on `val`."""

    kind: ClassVar[str] = "metrics"
    step: int
    epoch: int
    split: str
    """`LOGGED`: the values are those that the user logged."""
    values: dict[str, float]
    ends_epoch: bool = False
    """Whether an `EpochDone` with the same values follows."""

    def scalars(self) -> dict[str, float]:
        """Return the curves that these values are points of; an epoch's mean has another curve than the steps."""
        prefix = {"train": "train/epoch_", LOGGED: ""}.get(self.split, f"{self.split}/")
        return {f"{prefix}{name}": value for name, value in self.values.items()}


@dataclass(frozen=True)
class EpochDone(Event):
    """An epoch ended, evaluation included. `epoch` counts from 1."""

    kind: ClassVar[str] = "epoch"
    step: int
    epoch: int
    train_loss: float
    val: dict[str, float]
    seconds: float = 0.0
    samples_per_second: float = 0.0


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint was published."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    path: str
    seconds: float
    bytes: int
    best: bool = False
    """Whether it is the best one so far, by the metric of `keep_best`."""
    stall: float = 0.0
    """The part of `seconds` in which training waited; the rest was written in the background."""
    written: int | None = None
    """The bytes that were written: fewer than `bytes` for an incremental checkpoint."""


@dataclass(frozen=True)
class Message(Event):
    """A message for the user; `level` is "info", "warning" or "error"."""

    kind: ClassVar[str] = "message"
    level: str
    text: str


@dataclass(frozen=True)
class SampleDrawn(Event):
    """A text that the model has written, as a sample of what it has learned."""

    kind: ClassVar[str] = "sample"
    step: int
    text: str


@dataclass(frozen=True)
class Failure(Event):
    """A rank failed. `rank` is the guilty one."""

    kind: ClassVar[str] = "failure"
    rank: int = field(kw_only=False)  # Without this it would inherit the default of Event.
    host: str
    step: int | None
    error: str
    message: str


@dataclass(frozen=True)
class RankLost(Event):
    """A rank ended with an error, and the others keep their processes; `action` is "replace" or "shrink"."""

    kind: ClassVar[str] = "rank_lost"
    lost: int
    how: str
    action: str
    size: int
    """With how many ranks the run goes on."""
    why: str


@dataclass(frozen=True)
class Recovered(Event):
    """The group of ranks changed in place, and the first step with it is complete.

    Losses without a step between them are one change.
    """

    kind: ClassVar[str] = "recovered"
    step: int
    """The last complete step before the change."""
    lost_steps: int
    """Steps that are done again."""
    seconds: float
    """From when the change began until the next step was complete."""
    reason: str
    world_size: int
    lost: list[int] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    """The seconds of it that the main rank aborted collectives, and made process groups."""


@dataclass(frozen=True)
class RunEnded(Event):
    """Training ended; `status` is "finished", "stopped", "preempted", "interrupted" or "failed".

    Fields that `History` has are explained there.
    """

    kind: ClassVar[str] = "run_ended"
    status: str
    step: int
    total_time: float
    throughput: float
    best: dict[str, float] = field(default_factory=dict)
    checkpoint: str | None = None
    next_commands: list[str] = field(default_factory=list)
    tokens_per_second: float | None = None
    mfu: float | None = None
    speedup: float | None = None
    sent_bytes: int | None = None
    plain_bytes: int | None = None
    exchange_hidden: float | None = None
    exchange_waited: float | None = None
    first_steps_seconds: float | None = None
    compile_seconds: float = 0.0
    compile_graphs: int = 0
    slow_seconds: float = 0.0
    slow_laps: int = 0
    laps: int = 0
    reason: str = ""
    best_checkpoint: str | None = None
    best_metric: str = ""
    best_value: float | None = None
    best_step: int | None = None
    loaded_best: bool = False
    goodput: dict[str, float] = field(default_factory=dict)
    whole_throughput: float | None = None
    whole_mfu: float | None = None
    checkpoint_stall: float = 0.0


@dataclass(frozen=True)
class ServersReported(Event):
    """What parameter servers counted over a run, and the figures of each shard in `shards`."""

    kind: ClassVar[str] = "servers"
    mode: str
    updates: int
    updates_per_second: float
    staleness_mean: float
    staleness_max: int
    ahead_max: int
    lost: int
    exchange_seconds: float
    """How long the main rank's messages took, waiting for other workers included."""
    waited_seconds: float
    """How much of that the main rank waited for: the rest was hidden behind its own work."""
    shards: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Goodput(Event):
    """Where the time of an attempt went so far; the last one of an attempt counts."""

    kind: ClassVar[str] = "goodput"
    step: int
    first_step: int
    """The step that the attempt began after."""
    seconds: dict[str, float]
    """By category; the sum is the wall time since `began`."""
    began: float
    """When the attempt began, in seconds since the epoch: the command, or after a failure the new process."""
    attempt: int = 0
    first_samples: int = 0
    samples: int = 0
    """Samples that the run had seen over all ranks when the attempt began, and now."""
    throughput: float = 0.0
    """Samples per second in the steady state."""
    mfu: float | None = None
    before: list[float] | None = None
    """Step and time of the last heartbeat of the attempt before this one, where that failed."""


@dataclass(frozen=True)
class RanksReported(Event):
    """What ranks measured about themselves (`heartbeat.Gauges`): the slowest 64 one by one, and all in percentiles.

    Ranks of nodes that do not share the run's folder with the main rank are not in it.
    """

    kind: ClassVar[str] = "ranks"
    step: int
    ranks: list[int]
    values: dict[str, list[float]]
    """By the name of the gauge: one value for each of `ranks`."""
    percentiles: dict[str, list[float]]
    """By the name of the gauge: the 0th, 50th, 90th, 99th and 100th percentile over all ranks that know it."""
    counted: int = 0
    """How many ranks the percentiles are of."""
    slowest: int | None = None
    """The rank that the others wait for, where one is clearly slower (`phalanx.observe.rank_statistics.slowest_of`)."""

    def scalars(self) -> dict[str, float]:
        """Return the curves that these values are points of: the usual rank, or for heat and memory the highest."""
        gauges = {
            "system/gpu_power_watts": ("gpu_power", 1),
            "system/gpu_temperature": ("gpu_temperature", -1),
            "system/gpu_memory_bytes": ("gpu_memory", -1),
            "system/cpu_cores": ("cpu_cores", 1),
            "system/data_wait": ("data_wait", 1),
            "system/communication": ("communication", 1),
        }
        measured = {name: (self.percentiles.get(gauge), at) for name, (gauge, at) in gauges.items()}
        return {name: values[at] for name, (values, at) in measured.items() if values}


@dataclass(frozen=True)
class RankSuspected(Event):
    """A check found ranks whose weights differ ("corruption") or that are much slower than the others ("straggler")."""

    kind: ClassVar[str] = "rank_suspected"
    step: int
    what: str
    ranks: list[int]
    why: str
    action: str
    """What follows: "stop" or "warn"."""


def from_dict(data: Mapping[str, Any]) -> Event:
    """Rebuild an event; ValueError for an unknown kind. Fields of a newer writer are left out."""
    kind = KINDS.get(data.get("event", ""))
    if kind is None:
        raise ValueError(f"unknown event {data.get('event')!r}; known: {', '.join(sorted(KINDS))}")
    type_of = {item.name: str(item.type) for item in dataclasses.fields(kind)}
    return kind(**{name: _decode(value, type_of[name]) for name, value in data.items() if name in type_of})


def from_json(line: str | bytes) -> Event:
    """Rebuild an event from a line of JSON."""
    return from_dict(json.loads(line))


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any, annotation: str) -> Any:
    """Undo `_encode` where the field is a float or a dict of floats: "nan" may be a text elsewhere."""
    if "float" not in annotation:
        return value
    if isinstance(value, dict):
        return {key: _decode(item, "float") for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item, "float") for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
