"""The actor in the cluster that runs Ray Train's controller and passes letters between the ranks and the launcher.

Letters are dicts with one key that says what they are: `output`, `event`, `record`, `begun`, `lost`, `ended`, `files`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.train import DataConfig, TrainingFailedError
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.callback import UserCallback
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig  # ray.train shows type checkers V1's
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx.launch.ray_worker import RankOrder

Letter = dict[str, Any]


@dataclass(frozen=True)
class Arrangement:
    """What Ray Train is told of a run."""

    workers: int | tuple[int, int]
    resources: dict[str, float]
    use_gpu: bool
    placement: str
    max_failures: int
    storage: str
    name: str
    resize_seconds: float = 20.0


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


class Conductor:
    """Lives on the head node: when that goes, Ray goes."""

    def __init__(self) -> None:
        self._letters: list[Letter] = []
        self._arrived = asyncio.Event()
        self._stop = asyncio.Event()
        self._reason = ""
        self._attempts = 0
        self._controller: Any = None

    async def run(self, arrangement: Arrangement, order: RankOrder, data: Mapping[str, Any]) -> str:
        """Let Ray Train run the order to its end; return what went wrong, or nothing."""
        myself = ray.get_runtime_context().current_actor
        try:
            await asyncio.get_running_loop().run_in_executor(None, _fit, arrangement, order, dict(data), myself)
        except TrainingFailedError as error:
            return str(error)
        return ""

    async def post(self, letters: list[Letter]) -> None:
        """Take letters for the launcher."""
        for letter in letters:
            self._controller = letter.pop("controller", self._controller)
        self._letters += letters
        self._arrived.set()

    async def take(self, seconds: float) -> list[Letter]:
        """Hand over the letters there are, or wait for some."""
        if not self._letters:
            try:
                await asyncio.wait_for(self._arrived.wait(), seconds)
            except TimeoutError:
                return []
        self._arrived.clear()
        letters, self._letters = self._letters, []
        return letters

    async def begin(self, world_size: int) -> int:
        """Count an attempt (rank 0 asks) and return its number, from 0."""
        attempt, self._attempts = self._attempts, self._attempts + 1
        await self.post([{"begun": attempt, "world_size": world_size}])
        return attempt

    async def ask_to_stop(self, reason: str) -> None:
        """Let every rank know that it should stop at the next step boundary."""
        self._reason = reason
        self._stop.set()

    async def stop_reason(self) -> str:
        """Return why to stop, once somebody wishes it."""
        await self._stop.wait()
        return self._reason

    async def abort(self) -> None:
        """End the run now: the controller first, so that its workers and their places are given back."""
        if self._controller is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._controller.abort.remote()), 10.0)
            except (TimeoutError, ray.exceptions.RayActorError):
                # It leaves without an answer; that is what was asked for.
                return


def _fit(arrangement: Arrangement, order: RankOrder, data: dict[str, Any], conductor: Any) -> None:
    from phalanx.launch.ray_worker import run_rank

    DataParallelTrainer(
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
    ).fit()
