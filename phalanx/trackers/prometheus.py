"""A Prometheus endpoint of one run: a sink that keeps the latest values, and reads the ranks' gauges when scraped.

The launcher of each node serves its own ranks; the one of the main rank also what its events say, and quantiles
of all ranks that it can see. The number of series is bounded: of a node's ranks 64 are shown one by one.
"""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.observe import events, rank_statistics
from phalanx.observe.heartbeat import Beat, current, read_beats
from phalanx.observe.sinks import Sink

_RANK_GAUGES = {
    "step_seconds": ("phalanx_rank_step_seconds", "Seconds per step."),
    "own_seconds": ("phalanx_rank_own_seconds", "Seconds per step of data and forward passes, without waiting."),
    "samples_per_second": ("phalanx_rank_samples_per_second", "Samples per second of this rank."),
    "data_wait": ("phalanx_rank_data_wait_ratio", "Share of the time in which the rank waited for data."),
    "communication": ("phalanx_rank_communication_ratio", "Share of the time in which it waited for other ranks."),
    "cpu_cores": ("phalanx_rank_cpu_cores", "Cores that the rank's process keeps busy."),
    "memory": ("phalanx_rank_memory_bytes", "Peak memory, of the device on CUDA, of the process on the CPU."),
    "memory_limit": ("phalanx_rank_memory_limit_bytes", "What the rank may use at most."),
    # DCGM's exporter has these names; scrape one of the two.
    "gpu_utilization": ("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %)."),
    "gpu_memory": ("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB)."),
    "gpu_power": ("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W)."),
    "gpu_temperature": ("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C)."),
}
_SCALES = {"gpu_utilization": 100.0, "gpu_memory": 1 / 2**20}
_QUANTILES = ("step_seconds", "own_seconds", "data_wait", "communication", "memory")
_VALUES = {
    "phalanx_step": "Optimizer steps of the run.",
    "phalanx_epoch": "The current epoch, from 1.",
    "phalanx_loss": "Training loss of the last logged step.",
    "phalanx_loss_is_finite": "0 when the last logged loss was NaN or infinite.",
    "phalanx_learning_rate": "Learning rate.",
    "phalanx_grad_norm": "Norm of the gradient of the last logged step.",
    "phalanx_samples_per_second": "Samples per second over all ranks.",
    "phalanx_tokens_per_second": "Tokens per second over all ranks.",
    "phalanx_mfu": "Model FLOPs utilization, from 0 to 1.",
    "phalanx_ranks": "Ranks of the run.",
    "phalanx_running": "1 while the run trains, 0 after its end.",
    "phalanx_started_timestamp_seconds": "When the run began.",
    "phalanx_checkpoint_timestamp_seconds": "When the last checkpoint was published; absent before the first one.",
    "phalanx_checkpoint_stall_seconds": "Seconds in which training waited for the last checkpoint.",
    "phalanx_checkpoint_bytes": "Size of the last checkpoint.",
    "phalanx_goodput_ratio": "Share of the wall time of this attempt that was productive.",
    "phalanx_slowest_rank_ratio": "Own time of the slowest rank over the median of the others.",
}
_COUNTERS = {
    "phalanx_samples": "Samples that the run has seen.",
    "phalanx_failures": "Ranks that failed or were lost.",
    "phalanx_recoveries": "Changes of the group of ranks while the run went on.",
    "phalanx_suspected_ranks": "Findings of stragglers and corrupted replicas.",
}
_PHASES = ("training", "evaluate", "checkpoint", "compile")
_OTHERS = (
    "phalanx_rank_step",
    "phalanx_rank_heartbeat_timestamp_seconds",
    "phalanx_phase",
    "phalanx_goodput_seconds",
    "phalanx_run_info",
)
QUANTILE = "phalanx_ranks_quantile"
NAMES = frozenset(
    [
        *(name for name, _ in _RANK_GAUGES.values()),
        *_VALUES,
        *(f"{name}_total" for name in _COUNTERS),
        *_OTHERS,
        QUANTILE,
    ]
)
"""Every series that the endpoint may have."""


class MetricsSink(Sink):
    """Takes the events of a run and answers Prometheus. `handle` and a scrape come from different threads."""

    def __init__(self, run: str, log_dir: Path | None, host: str = "127.0.0.1", port: int = 0) -> None:
        """`log_dir`: where the heartbeats of this machine's ranks are; None: of this process alone."""
        self._run, self._log_dir = run, log_dir
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._counters = dict.fromkeys(_COUNTERS, 0.0)
        self._info: dict[str, str] = {}
        self._goodput: dict[str, float] = {}
        self._phase = "training"
        self._server: Any = None
        self._serve(host, port)

    def _serve(self, host: str, port: int) -> None:
        client = import_client()
        registry = client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = client.start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            hint = "Hosts are 127.0.0.1, 0.0.0.0 (all), or an address of this machine: ip addr shows them."
            if error.errno == errno.EADDRINUSE:
                hint = "Another process has that port: ss -ltnp shows which one. Give another, or 0 for a free one."
            elif error.errno == errno.EACCES:
                hint = "Ports below 1024 need root. Give a higher one, or 0 for a free one."
            raise UsageError(
                f"metrics_port = {port}: {host}:{port} cannot be served ({error.strerror})", hint=hint
            ) from error
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """End the endpoint."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def handle(self, event: events.Event) -> None:
        """Keep what the event says."""
        with self._lock:
            self._update(event)

    def _update(self, event: events.Event) -> None:
        values, counters = self._values, self._counters
        match event:
            case events.RunStarted():
                values |= {"phalanx_ranks": event.world_size, "phalanx_running": 1}
                values.setdefault("phalanx_started_timestamp_seconds", event.time)
                fields = ("name", "strategy", "precision", "device", "layout")
                self._info = {name: str(getattr(event, name)) for name in fields}
            case events.StepDone():
                self._update_step(event)
            case events.CheckpointSaved():
                values["phalanx_checkpoint_timestamp_seconds"] = event.time
                values |= {"phalanx_checkpoint_stall_seconds": event.stall, "phalanx_checkpoint_bytes": event.bytes}
            case events.Goodput():
                self._goodput = event.seconds
                total = sum(event.seconds.values())
                values["phalanx_goodput_ratio"] = event.seconds.get("productive", 0.0) / total if total else 0.0
            case events.Phase():
                self._phase = event.name if event.state == "begin" and event.name in _PHASES else "training"
            case events.RankLost() | events.Failure():
                counters["phalanx_failures"] += 1
            case events.Recovered():
                counters["phalanx_recoveries"] += 1
                values["phalanx_ranks"] = event.world_size
            case events.RankSuspected():
                counters["phalanx_suspected_ranks"] += 1
            case events.RunEnded():
                values["phalanx_running"] = 0

    def _update_step(self, event: events.StepDone) -> None:
        values = {
            "phalanx_step": event.step,
            "phalanx_epoch": event.epoch,
            "phalanx_loss": event.loss,
            "phalanx_loss_is_finite": None if event.loss is None else float(math.isfinite(event.loss)),
            "phalanx_learning_rate": event.learning_rate,
            "phalanx_grad_norm": event.grad_norm,
            "phalanx_samples_per_second": event.samples_per_second,
            "phalanx_tokens_per_second": event.tokens_per_second,
            "phalanx_mfu": event.mfu,
        }
        self._values |= {name: value for name, value in values.items() if value is not None}
        self._counters["phalanx_samples"] = float(event.samples)

    def collect(self) -> Iterator[Any]:
        """Yield all metrics; the client calls this at each scrape."""
        core = import_client().core
        with self._lock:
            values, counters = dict(self._values), dict(self._counters)
            goodput, phase, info = dict(self._goodput), self._phase, dict(self._info)
        local = self._beats(local=True)
        beats = self._beats(local=False) if info else local  # once per run, on the node of the main rank
        values["phalanx_step"] = max([values.get("phalanx_step", 0), *(beat.step for beat in beats.values())])
        if (ratio := rank_statistics.slowness(beats)) is not None:
            values["phalanx_slowest_rank_ratio"] = ratio
        for name, value in values.items():
            yield self._family(core.GaugeMetricFamily, name, _VALUES[name], {(): value})
        for name, value in counters.items():
            yield self._family(core.CounterMetricFamily, name, _COUNTERS[name], {(): value})
        spent = {(category,): seconds for category, seconds in goodput.items()}
        text = "Seconds of this attempt by what they were spent on."
        yield self._family(core.GaugeMetricFamily, "phalanx_goodput_seconds", text, spent, "category")
        if info:
            phases = {(label,): float(label == phase) for label in _PHASES}
            yield self._family(core.GaugeMetricFamily, "phalanx_phase", "1 for the current phase.", phases, "phase")
            labels, text = tuple(info), "The run, as labels."
            yield self._family(core.GaugeMetricFamily, "phalanx_run_info", text, {tuple(info.values()): 1.0}, *labels)
        yield from self._ranks(core, local, beats)

    def _ranks(self, core: Any, local: Mapping[int, Beat], beats: Mapping[int, Beat]) -> Iterator[Any]:
        listed = {(str(rank),): beat for rank, beat in list(local.items())[: rank_statistics.SHOWN_RANKS]}
        gauge = core.GaugeMetricFamily
        steps = {key: float(beat.step) for key, beat in listed.items()}
        yield self._family(gauge, "phalanx_rank_step", "The last complete step.", steps, "rank")
        times, text = {key: beat.time for key, beat in listed.items()}, "When the rank last completed a step or batch."
        yield self._family(gauge, "phalanx_rank_heartbeat_timestamp_seconds", text, times, "rank")
        for field, (name, text) in _RANK_GAUGES.items():
            readings = {key: getattr(beat.gauges, field) * _SCALES.get(field, 1.0) for key, beat in listed.items()}
            finite = {key: value for key, value in readings.items() if not math.isnan(value)}
            if finite:
                yield self._family(gauge, name, text, finite, "rank")
        spread = {
            (field, f"{share / 100:g}"): value
            for field in _QUANTILES
            for share, value in zip(
                rank_statistics.PERCENTILES,
                rank_statistics.percentiles(getattr(beat.gauges, field) for beat in beats.values()),
                strict=False,
            )
        }
        yield self._family(gauge, QUANTILE, "Gauges of all ranks in quantiles.", spread, "gauge", "quantile")

    def _family(self, kind: Any, name: str, text: str, samples: Mapping[Any, float], *labels: str) -> Any:
        family = kind(name, text, labels=("run", *labels))
        for key, value in samples.items():
            family.add_metric((self._run, *key), value)
        return family

    def _beats(self, *, local: bool) -> Mapping[int, Beat]:
        if self._log_dir is not None:
            return read_beats(self._log_dir, is_local=local)
        beat = current().read(0)
        return {} if beat is None else {0: beat}


def import_client() -> Any:
    """Import Prometheus's client; UsageError where it is not installed."""
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise UsageError(
            "metrics_port needs prometheus-client, which is not installed", hint="Run: pip install 'phalanx[monitor]'"
        ) from error
    return prometheus_client
