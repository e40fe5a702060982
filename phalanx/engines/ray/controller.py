"""The actor in the cluster that runs Ray Train's controller, and what the launcher, this actor and the ranks send.

A message is a dict whose first key is its kind: `output`, `log`, `event`, `record`, `placed`, `begun`, `lost`, `ended`,
`location`, `at` or `files`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from phalanx.engines.ray.fit_order import RankOrder, RayMessage, RayRunSpec


class Controller:
    """Runs on the head node, without which Ray ends anyway."""

    def __init__(self, variables: dict[str, str]) -> None:
        os.environ.update(variables)  # not by Ray's runtime_env, for which it would start a fresh process
        self._messages: list[RayMessage] = []
        self._arrived = asyncio.Event()
        self._stop = asyncio.Event()
        self._reason = ""
        self._attempts = 0
        self._controller: Any = None

    async def run(self, run_spec: RayRunSpec, order: RankOrder, data: Mapping[str, Any]) -> str:
        """Let Ray Train run the order; return the error, or an empty text."""
        import ray

        this_actor = ray.get_runtime_context().current_actor

        def run() -> str:
            from phalanx.engines.ray.fit import fit  # takes seconds, while the actor already accepts messages

            return fit(run_spec, order, dict(data), this_actor)

        return await asyncio.get_running_loop().run_in_executor(None, run)

    async def post(self, messages: list[RayMessage]) -> None:
        """Queue messages for the launcher."""
        for message in messages:
            self._controller = message.pop("controller", self._controller)
        self._messages += messages
        self._arrived.set()

    async def take(self, seconds: float) -> list[RayMessage]:
        """Return the queued messages; wait up to `seconds` for the first."""
        if not self._messages:
            try:
                await asyncio.wait_for(self._arrived.wait(), seconds)
            except TimeoutError:
                return []
        self._arrived.clear()
        messages, self._messages = self._messages, []
        return messages

    async def begin(self, world_size: int) -> int:
        """Count an attempt and return its number, from 0; called by rank 0."""
        attempt, self._attempts = self._attempts, self._attempts + 1
        await self.post([{"begun": attempt, "world_size": world_size}])
        return attempt

    async def ask_to_stop(self, reason: str) -> None:
        """Request that every rank stops at the next step boundary."""
        self._reason = reason
        self._stop.set()

    async def stop_reason(self) -> str:
        """Wait until a stop is requested, and return the reason."""
        await self._stop.wait()
        return self._reason

    async def abort(self) -> None:
        """End the run now: Ray Train's controller first, so that its workers and placement group are released."""
        from ray.exceptions import RayActorError

        if self._controller is not None:
            with suppress(TimeoutError, RayActorError):  # it may end without an answer
                await asyncio.wait_for(asyncio.shield(self._controller.abort.remote()), 10.0)
