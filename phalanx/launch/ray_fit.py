"""Ray Train's own part of a run: its trainer, told what we want and whom to tell what happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError
from ray.train import DataConfig, TrainingFailedError
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.callback import UserCallback
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig  # ray.train shows type checkers V1's
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer as RaysTrainer

from phalanx.launch.ray_worker import run_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx.launch.ray_conductor import Arrangement
    from phalanx.launch.ray_worker import RankOrder


class _SharedGpus(Backend):
    """Ranks of one machine see all its GPUs, as under torchrun; the process group is theirs to form."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Tell the launcher that Ray has placed the workers, and who controls them."""
        if isinstance(backend_config, _Telling):
            letter = {"placed": len(worker_group), "controller": ray.get_runtime_context().current_actor}
            backend_config.conductor.post.remote([letter])


@dataclass
class _Telling(BackendConfig):
    conductor: Any

    @property
    def backend_cls(self) -> type[Backend]:
        return _SharedGpus


class _TellLosses(UserCallback):
    """Tell the launcher which workers Ray has lost: a killed one leaves no word of its own."""

    def __init__(self, conductor: Any) -> None:
        self._conductor = conductor

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        lost = {rank: str(error) for rank, error in worker_exceptions.items()}
        ray.get(self._conductor.post.remote([{"lost": lost}]))


_TIDIER, _DEALER = "PlacementGroupCleanerCallback", "DatasetsCallback"


class _Trainer(RaysTrainer):
    """Ray's own, without the actors that a run does not need: each is a process that imports Ray Train first."""

    unneeded: tuple[str, ...] = ()

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()
        return [one for one in callbacks if type(one).__name__ not in self.unneeded]


def _unneeded(arrangement: Arrangement, data: dict[str, Any]) -> tuple[str, ...]:
    """Name what nobody would miss: who deals data where there are none, and who tidies up what goes with the run.

    The latter asks the dashboard every second, and where there is none keeps the run's end waiting for it.
    """
    return (*((_TIDIER,) if arrangement.own_ray else ()), *(() if data else (_DEALER,)))


def fit(arrangement: Arrangement, order: RankOrder, data: dict[str, Any], conductor: Any) -> str:
    """Run the order on workers of Ray Train until it ends; return what went wrong, or nothing."""
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
