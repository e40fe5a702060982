"""The shards of a run: which rank starts which, and how ranks find their addresses."""

from __future__ import annotations

import json
import secrets

import torch
import torch.distributed as dist

from phalanx.config import DistributedConfig
from phalanx.engines.parameter_server.client import ParameterClient, better_placement
from phalanx.engines.parameter_server.membership import Rules, ShardSpec
from phalanx.engines.parameter_server.placement import Placement
from phalanx.engines.parameter_server.process import ShardProcess
from phalanx.engines.parameter_server.state import StateSlots
from phalanx.host.addresses import own_address
from phalanx.observe.events import ServersReported
from phalanx.world.abort import abortable
from phalanx.world.world import World

_PREFIX = "parameter-server"
_PATIENCE_SECONDS = 10.0
"""How long a rank retries a shard that does not answer; a restarted one is back in a fraction of it."""
LAST_SECONDS = 0.5
"""The same after ranks were lost."""


class ServerGroup:
    """The shards that this rank started, and a client of all of them."""

    def __init__(
        self, config: DistributedConfig, world: World, placement: Placement, optimizer: torch.optim.Optimizer
    ) -> None:
        self._world = world
        self.shards: dict[int, ShardProcess] = {}
        self._client: ParameterClient | None = None
        self.relocations = 0
        """How often the shards have exchanged pieces."""
        try:
            token = _draw_token(world)
            rules = Rules(world.world_size, config.resolved_server_mode, config.staleness or 0)
            host = own_address(world.env.master_addr, one_node=world.env.on_one_node)
            for number in range(config.num_servers):
                if owner(number, world.world_size, world.env.local_world_size) == world.rank:
                    spec = ShardSpec(number, placement, optimizer, rules, token, StateSlots())
                    self.shards[number] = ShardProcess(spec, host)
            addresses = [self._address(number) for number in range(config.num_servers)]
            abortable(self)
            self._client = ParameterClient(
                addresses, token, placement, world.rank, patience=_PATIENCE_SECONDS, timeout=config.timeout
            )
        except BaseException:
            self.close()
            raise

    @property
    def client(self) -> ParameterClient:
        """This rank's client of all shards."""
        assert self._client is not None, "made with the group"
        return self._client

    def _address(self, number: int) -> tuple[str, int]:
        shard = self.shards.get(number)
        host, port = json.loads(self._share(f"address/{number}", json.dumps(shard.address) if shard else None))
        return host, port

    def _share(self, name: str, value: str | None) -> str:
        """Publish a value in the ranks' store, or wait for the rank that does."""
        store = self._world.store
        if store is None:
            assert value is not None, "one rank starts all shards"
            return value
        if value is not None:
            store.set(f"{_PREFIX}/{name}", value)
        return str(store.get(f"{_PREFIX}/{name}").decode())

    def even_out(self) -> None:
        """Relocate pieces where one shard has moved far more bytes than another; all ranks call this."""
        client = self.client
        if len(client.placement.shards) == 1:
            return
        barrier(self._world)
        chosen: list[Placement | None] = [better_placement(client) if self._world.is_main else None]
        if self._world.world_size > 1:
            dist.broadcast_object_list(chosen, src=0)
        if chosen[0] is None:
            return
        if self._world.is_main:
            client.relocate(chosen[0])
        barrier(self._world)
        client.adopt(chosen[0])
        client.pull()
        self.relocations += 1

    def report(self, mode: str) -> ServersReported:
        """Return what the shards counted: staleness, load and throughput."""
        self.client.wait()
        shards = self.client.stats()
        return ServersReported(
            mode,
            # Each shard takes part in every step, so the highest count holds for all.
            updates=max(shard["updates"] for shard in shards),
            updates_per_second=max(shard["updates_per_second"] for shard in shards),
            staleness_mean=sum(shard["staleness_mean"] for shard in shards) / len(shards),
            staleness_max=max(shard["staleness_max"] for shard in shards),
            ahead_max=max(shard["ahead_max"] for shard in shards),
            lost=max(shard["lost"] for shard in shards),
            exchange_seconds=self.client.comm_thread.busy_s,
            waited_seconds=self.client.comm_thread.waited_s,
            shards=shards,
        )

    def abort(self, why: str) -> None:
        """Wait only a moment for shards: those of a lost rank do not come back."""
        if self._client is not None:
            self._client.limit_retries(LAST_SECONDS)

    def close(self) -> None:
        """Disconnect, and end the shards that this rank started."""
        if self._client is not None:
            self._client.close()
        for shard in self.shards.values():
            shard.stop()


def barrier(world: World) -> None:
    """Wait for all ranks, where there are several."""
    if world.world_size > 1:
        dist.barrier()


def _draw_token(world: World) -> str:
    """Return a secret that rank 0 draws for this job.

    It is broadcast in the process group and never written to the store, which any process that reaches its port can
    read.
    """
    token = torch.tensor(list(secrets.token_bytes(32)), dtype=torch.uint8)
    if world.world_size > 1:
        token = token.to(world.device)
        dist.broadcast(token, 0)
    return bytes(token.tolist()).hex()


def owner(number: int, world_size: int, per_node: int) -> int:
    """Return the rank that starts a shard: round robin over nodes, and over the ranks of each node."""
    nodes = max(1, world_size // per_node)
    return number % nodes * per_node + number // nodes % per_node
