"""Predicted against measured: what the planner would have said of a run, and factors for the next plans.

A run records its model and settings in its event `run_started`; `job_of` reads them. `compare` predicts it when a
report is made, so that training does not wait for it. `keep_factors` keeps how far the prediction was
off, by type of GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from datetime import date
from typing import Any, NamedTuple

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.observe.goodput import Account
from phalanx.tools.plan import presets
from phalanx.tools.plan.cluster import Cluster
from phalanx.tools.plan.estimator import Estimator
from phalanx.tools.plan.hf_config import recorded_shape
from phalanx.tools.plan.model import ModelShape
from phalanx.tools.plan.planner import reliability_of
from phalanx.tools.plan.plans import PRECISIONS, Goal, Layout
from phalanx.tools.plan.rules import layout_of
from phalanx.tools.plan.search import kernels_of
from phalanx.world.mesh import Mesh

GIB = 2.0**30
_OTHER_PARAMETERS = 0.1
"""The share of parameters that adapters or another output layer may add to the dimensions of a transformer."""


class Component(NamedTuple):
    """One figure of a run: seconds, a rate, a share, or GiB."""

    name: str
    unit: str
    predicted: float
    measured: float

    @property
    def factor(self) -> float:
        """Measured / predicted."""
        return self.measured / self.predicted if self.predicted else float("nan")


class RunComparison(NamedTuple):
    """What was predicted and measured of a run."""

    gpu: str
    components: tuple[Component, ...]

    @property
    def is_measured(self) -> bool:
        """Whether the device is known: a GPU, or a CPU of which something was measured."""
        return self.gpu != "cpu" or "cpu" in presets.measured("factors")

    def factor(self, name: str) -> float | None:
        """Return measured / predicted of a component that was compared."""
        return next(
            (component.factor for component in self.components if component.name == name and component.predicted), None
        )


class RecordedJob(NamedTuple):
    """What a run was, in the planner's terms."""

    shape: ModelShape
    layout: Layout
    gpus_per_node: int
    optimizer: str
    compile: bool


def job_of(started: Mapping[str, Any]) -> RecordedJob | None:
    """Return the job that a run's first event describes; None where the planner would learn a wrong speed from it.

    That is where the recorded dimensions do not give the parameters.
    """
    job = started.get("job") or {}
    if "shape" in job:  # written before runs recorded their settings
        parts = job["gpus_per_node"], job["optimizer"], job["compile"]
        return RecordedJob(ModelShape(**job["shape"]), Layout(**job["layout"]), *parts)
    shape = recorded_shape(job.get("model", {}))
    if shape is None or abs(shape.parameters - started["parameters"]) > _OTHER_PARAMETERS * started["parameters"]:
        return None
    config, mesh = DistributedConfig().with_trusted(**job["settings"]), Mesh(**started["mesh"])
    layout = dataclasses.replace(layout_of(config, mesh, started["batch_size"]), attention="flash")
    gpus_per_node = max(1, mesh.world_size // config.num_nodes)
    return RecordedJob(shape, layout, gpus_per_node, config.optimizer, config.compile)


def compare(started: Mapping[str, Any], steps: Iterable[Mapping[str, Any]], ledger: Account) -> RunComparison | None:
    """Return predicted and measured figures of a run; None where its events do not describe it."""
    job, logged = job_of(started), list(steps)
    if job is None or not ledger.steady_throughput or not logged:
        return None
    shape, layout, device = job.shape, job.layout, started["job"]["gpu"]
    last = logged[-1]
    tokens = last.get("tokens_per_second")
    length = (
        round(tokens / last["samples_per_second"]) if tokens and last.get("samples_per_second") else shape.patches + 1
    )
    gpu = _gpu(device, started["job"]["gpu_memory_gib"])
    cluster = Cluster(gpu=gpu, gpus=layout.gpus, gpus_per_node=job.gpus_per_node)
    precision = started["precision"] if started["precision"] in PRECISIONS else "fp32"
    goal = Goal(
        global_batch=started["global_batch"],
        seq_len=length,
        precision=precision,
        optimizer=job.optimizer,
        compile=job.compile,
    )
    layout = dataclasses.replace(layout, kernels=kernels_of(goal))
    components = _components(Estimator(shape, cluster, goal), layout, logged, ledger, on_gpu=bool(device))
    return RunComparison(str(cluster.gpu), tuple(components))


def _gpu(device: str, memory_gib: float) -> str:
    """Return the planner's name of a device: what was measured, else by what the driver calls it."""
    if any(name.startswith("cpu-") != bool(device) for name in presets.measured("gpus")):
        return presets.gpu("measured").name
    if not device:
        return "cpu"
    entry = presets.gpu_of_device(device, memory_gib)
    if entry is None:
        raise UsageError(f"the planner does not know the GPU '{device}'", hint="Run there: phalanx bench machine")
    return entry.name


def _components(
    estimator: Estimator, layout: Layout, logged: list[Mapping[str, Any]], ledger: Account, *, on_gpu: bool
) -> Iterable[Component]:
    estimate, goal = estimator(layout), estimator.goal
    step = goal.global_batch / ledger.steady_throughput
    yield Component("step", "s", estimate.step_seconds, step)
    exposed = sum(seconds for part, seconds in estimate.breakdown.items() if part.endswith("_comm"))
    if ledger.communication_is_counted and layout.gpus > 1:
        waited = ledger.seconds["communication"] / max(1, ledger.steps)
        yield Component("exposed communication", "s", exposed, waited)
        yield Component("computation", "s", estimate.step_seconds - exposed, step - waited)
    rate = estimate.tokens_per_second_per_gpu
    yield Component("tokens/s per GPU", "", rate, rate * estimate.step_seconds / step)
    if ledger.steady_mfu is not None:
        yield Component("MFU", "%", 100 * estimate.mfu, 100 * ledger.steady_mfu)
    peak = max(float(event.get("memory_bytes") or 0) for event in logged) / GIB
    if on_gpu and peak:  # on the CPU it would be that of the whole process
        yield Component("memory", "GiB", estimate.peak_gib, peak)
    yield Component(
        "data wait",
        "s",
        estimate.breakdown.get("data", 0.0),
        ledger.seconds.get("data_wait", 0.0) / max(1, ledger.steps),
    )
    effective = reliability_of(estimator, layout)["effective"]
    began = sum(ledger.seconds.get(name, 0.0) for name in ("import", "startup", "first_steps", "compile"))
    useful = ledger.seconds.get("productive", 0.0) / max(1e-9, ledger.total - began)
    yield Component("goodput after start-up", "%", 100 * effective, 100 * useful)


def keep_factors(comparison: RunComparison, run: str) -> dict[str, Any]:
    """Keep how far the prediction was off; factors of before are part of the prediction, so they multiply."""
    before = presets.measured("factors").get(comparison.gpu, {})
    compute = comparison.factor("computation") or comparison.factor("step") or 1.0
    links = comparison.factor("exposed communication") or 1.0
    memory = next(
        (component.measured - component.predicted for component in comparison.components if component.name == "memory"),
        0.0,
    )
    factors = {
        "kernels": round(before.get("kernels", 1.0) * compute, 4),
        "links": round(before.get("links", 1.0) * links, 4),
        "memory_gib": round(before.get("memory_gib", 0.0) + memory, 3),
        "run": run,
        "date": date.today().isoformat(),
    }
    presets.keep_measured({"factors": {comparison.gpu: factors}})
    return factors
