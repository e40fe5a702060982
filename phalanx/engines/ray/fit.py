"""The Ray Train trainer of a run, and callbacks that report to the conductor."""

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

from phalanx.engines.ray.controller import RayRunSpec
from phalanx.engines.ray.worker import RankOrder, run_rank


class _SharedGpus(Backend):
    """Ranks of one machine see all its GPUs, as under torchrun, and create the process group themselves."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Report that Ray has placed the workers, and the controller actor."""
        if isinstance(backend_config, _Telling):
            message = {"placed": len(worker_group), "controller": ray.get_runtime_context().current_actor}
            backend_config.conductor.post.remote([message])


@dataclass
class _Telling(BackendConfig):
    conductor: Any

    @property
    def backend_cls(self) -> type[Backend]:
        return _SharedGpus


class _TellLosses(UserCallback):
    """Report the workers that Ray has lost: a killed one cannot report itself."""

    def __init__(self, conductor: Any) -> None:
        self._conductor = conductor

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        lost = {rank: str(error) for rank, error in worker_exceptions.items()}
        ray.get(self._conductor.post.remote([{"lost": lost}]))


_CLEANER, _DATASETS = "PlacementGroupCleanerCallback", "DatasetsCallback"


class _Trainer(RaysTrainer):
    """Ray's trainer without the actors that a run does not need: each is a process that imports Ray Train."""

    unneeded: tuple[str, ...] = ()

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()
        return [one for one in callbacks if type(one).__name__ not in self.unneeded]


def _unneeded(arrangement: RayRunSpec, data: dict[str, Any]) -> tuple[str, ...]:
    """Return Ray Train's callbacks to drop: the datasets' without datasets, the cleaner's where Ray ends with the run.

    The cleaner polls the dashboard every second, and delays the end of the run where there is none.
    """
    return (*((_CLEANER,) if arrangement.own_ray else ()), *(() if data else (_DATASETS,)))


def fit(arrangement: RayRunSpec, order: RankOrder, data: dict[str, Any], conductor: Any) -> str:
    """Run the order on workers of Ray Train; return the error, or an empty text."""
    trainer = _Trainer(
        run_rank,
        train_loop_config={"order": order, "conductor": conductor},
        backend_config=_Telling(conductor),
        scaling_config=ScalingConfig(
            num_workers=arrangement.workers,
            use_gpu=arrangement.use_gpu,
            resources_per_worker=arrangement.resources,
            placement_strategy=arrangement.placement,
            elastic_resize_monitor_interval_s=arrangement.resize_seconds,
        ),
        run_config=RunConfig(  # type: ignore[arg-type]
            name=arrangement.name,
            storage_path=arrangement.storage,
            failure_config=FailureConfig(max_failures=arrangement.max_failures),
            callbacks=[_TellLosses(conductor)],
        ),
        datasets=data,
        dataset_config=DataConfig(datasets_to_split=["train"] if "train" in data else []),
    )
    trainer.unneeded = _unneeded(arrangement, data)
    try:
        trainer.fit()
    except (TrainingFailedError, RayActorError) as error:  # the latter: the launcher has ended it
        return str(error)
    return ""
