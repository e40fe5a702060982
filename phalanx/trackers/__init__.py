"""Trackers that settings switch on: TensorBoard, MLflow, Weights & Biases, and a Prometheus endpoint.

The rest of the package asks for them here (`phalanx.features`); each is imported only if a run uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config import FIELDS, DistributedConfig, write_toml
from phalanx.observe.sinks import EventStream, Sink

if TYPE_CHECKING:
    from phalanx.loop.hooks import Callback
    from phalanx.trackers.prometheus import MetricsSink

_COMPARED = ("batch_size", "learning_rate", "optimizer", "weight_decay", "strategy", "mixed_precision", "seed")


def open_trackers(
    config: DistributedConfig, run_dir: Path, *, tensorboard: str | None, resumes: bool
) -> Iterator[Sink]:
    """Yield the sinks of the trackers that the config names; `tensorboard`: the folder of its files.

    `resumes`: whether those of services continue the run that they have.
    """
    if tensorboard is not None:
        from phalanx.trackers.tensorboard import TensorBoardSink

        settings = [line for line in write_toml(config).splitlines() if not line.startswith("#")]
        yield TensorBoardSink(tensorboard, hyperparameters(config), "\n".join(settings), run_dir)
    if config.mlflow:
        from phalanx.trackers.mlflow import MlflowSink

        experiment = config.mlflow if isinstance(config.mlflow, str) else "phalanx"
        yield MlflowSink(experiment, config.name or run_dir.name, config.to_dict(), run_dir, resumes=resumes)
    if config.wandb:
        from phalanx.trackers.wandb import WandbSink

        project = config.wandb if isinstance(config.wandb, str) else None
        yield WandbSink(run_dir, project, config.name or run_dir.name, config.to_dict(), resumes=resumes)


def histogram_callbacks(events: EventStream, every: int) -> Iterator[Callback]:
    """Yield the callback that writes histograms to TensorBoard, if this rank has its sink."""
    from phalanx.trackers.histograms import HistogramCallback
    from phalanx.trackers.tensorboard import TensorBoardSink

    if (board := events.find(TensorBoardSink)) is not None:
        yield HistogramCallback(board, every)


def open_metrics(run: str, log_dir: Path | None, address: tuple[str, int]) -> MetricsSink:
    """Serve the metrics of a run for Prometheus at a host and port."""
    from phalanx.trackers.prometheus import MetricsSink

    return MetricsSink(run, log_dir, *address)


def check_metrics() -> None:
    """Raise UsageError if Prometheus's client is not installed."""
    from phalanx.trackers.prometheus import import_client

    import_client()


def load_mlflow() -> Any:
    """Return the package `mlflow`; raise UsageError if it is not installed."""
    from phalanx.trackers.mlflow import import_mlflow

    return import_mlflow()


def hyperparameters(config: DistributedConfig) -> dict[str, bool | float | str]:
    """Return the settings by which runs are compared: the usual ones, and those that differ from their defaults."""
    changed = (name for name, field in FIELDS.items() if getattr(config, name) != field.default)
    names = dict.fromkeys([*_COMPARED, *(name for name in changed if "place" not in FIELDS[name].metadata["scope"])])
    values: dict[str, Any] = {name: getattr(config, name) for name in names}
    return {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in values.items()
        if value is not None
    }
