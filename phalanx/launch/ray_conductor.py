"""The actor in the cluster that runs Ray Train's controller and passes letters between the ranks and the launcher.

Letters are dicts with one key that says what they are: `output`, `event`, `record`, `begun`, `lost`, `ended`, `files`.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

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
    own_ray: bool = False
    """Whether the Ray was started for this run and ends with it."""


class Conductor:
    """Lives on the head node: when that goes, Ray goes."""

    def __init__(self, variables: dict[str, str]) -> None:
        os.environ.update(variables)  # not by Ray's runtime_env, for which it would start a fresh process
        self._letters: list[Letter] = []
        self._arrived = asyncio.Event()
        self._stop = asyncio.Event()
        self._reason = ""
        self._attempts = 0
        self._controller: Any = None

    async def run(self, arrangement: Arrangement, order: RankOrder, data: Mapping[str, Any]) -> str:
        """Let Ray Train run the order to its end; return what went wrong, or nothing."""
        myself = ray.get_runtime_context().current_actor
        return await asyncio.get_running_loop().run_in_executor(None, _fit, arrangement, order, dict(data), myself)

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


def _fit(arrangement: Arrangement, order: RankOrder, data: dict[str, Any], conductor: Any) -> str:
    from phalanx.launch.ray_fit import fit  # seconds of imports, and by then the conductor takes letters already

    return fit(arrangement, order, data, conductor)
