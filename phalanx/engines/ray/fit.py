"""The Ray Train trainer of a run, and callbacks that report to the controller actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.train import DataConfig, TrainingFailedError
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.callback import UserCallback
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig  # ray.train shows type checkers V1's
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer as RaysTrainer

from phalanx.engines.ray.fit_order import RankOrder, RayRunSpec
from phalanx.engines.ray.worker import run_rank

_RESIZE_SECONDS = 20.0
"""How often an elastic run looks for nodes that came."""


class _SharedGpus(Backend):
    """Ranks of one node see all its GPUs, as under torchrun, and create the process group themselves."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Report that Ray has placed the workers, and name Ray Train's controller."""
        if isinstance(backend_config, _BackendConfig):
            message = {"placed": len(worker_group), "controller": ray.get_runtime_context().current_actor}
            backend_config.controller.post.remote([message])


@dataclass
class _BackendConfig(BackendConfig):
    controller: Any

    @property
    def backend_cls(self) -> type[Backend]:
        return _SharedGpus


class _ReportLosses(UserCallback):
    """Report the workers that Ray has lost: a killed one cannot report itself."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        lost = {rank: str(error) for rank, error in worker_exceptions.items()}
        ray.get(self._controller.post.remote([{"lost": lost}]))


class _Trainer(RaysTrainer):
    """Ray's trainer without callbacks that a run does not need: each is an actor, a process that imports Ray Train."""

    unneeded: tuple[str, ...] = ()

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()
        return [one for one in callbacks if type(one).__name__ not in self.unneeded]


def fit(run_spec: RayRunSpec, order: RankOrder, data: dict[str, Any], controller: Any) -> str:
    """Run the order on workers of Ray Train; return the error, or an empty text."""
    trainer = _Trainer(
        run_rank,
        train_loop_config={"order": order, "controller": controller},
        backend_config=_BackendConfig(controller),
        scaling_config=ScalingConfig(
            num_workers=run_spec.workers,
            use_gpu=run_spec.use_gpu,
            resources_per_worker=run_spec.resources,
            placement_strategy=run_spec.placement,
            elastic_resize_monitor_interval_s=_RESIZE_SECONDS,
        ),
        run_config=RunConfig(  # type: ignore[arg-type]
            name=run_spec.name,
            storage_path=run_spec.storage,
            failure_config=FailureConfig(max_failures=run_spec.max_failures),
            callbacks=[_ReportLosses(controller)],
        ),
        datasets=data,
        dataset_config=DataConfig(datasets_to_split=["train"] if "train" in data else []),
    )
    if run_spec.own_ray:  # it polls the dashboard every second, and delays the end of the run where there is none
        trainer.unneeded += ("PlacementGroupCleanerCallback",)
    if not data:
        trainer.unneeded += ("DatasetsCallback",)
    try:
        trainer.fit()
    except (TrainingFailedError, RayActorError) as error:  # the latter: the launcher has ended it
        return str(error)
    return ""
