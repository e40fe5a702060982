"""Rendezvous of ranks that horovodrun started, for torch's own groups, by Horovod's broadcast."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx.engines.horovod.rules import STARTED_BY
from phalanx.errors import UsageError
from phalanx.host.addresses import VARIABLE, address_of_card, default_interface
from phalanx.world.env import RankEnv, write_horovod_env
from phalanx.world.groups import forget_groups, open_loopback_store

_CARD = "HOROVOD_GLOO_IFACE"
"""The card that horovodrun found on all nodes, by which they reach each other."""


def horovod() -> Any:
    """Return Horovod's module for torch, initialised; the user's script may have done that already."""
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise UsageError(
            f"horovodrun started this rank, but this Python cannot import Horovod: {error}",
            hint="Build it: make horovod, or python tools/build_horovod.py",
        ) from error
    if not hvd.is_initialized():
        hvd.init()
    return hvd


def connect_ranks(env: RankEnv, seconds: float) -> tuple[RankEnv, dist.Store]:
    """Open a store on rank 0, at a port that the system chooses, and broadcast its address."""
    horovod()
    return _connect_ranks(env, seconds)


@functools.cache
def _connect_ranks(env: RankEnv, seconds: float) -> tuple[RankEnv, dist.Store]:
    hvd, timeout = horovod(), timedelta(seconds=seconds)
    one_node = env.local_world_size == env.world_size
    host, server = _own_address(one_node=one_node), None
    if env.rank == 0 and one_node:
        server = open_loopback_store(0, timeout, is_master=True)
    elif env.rank == 0:
        server = dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    endpoint = (host, server.port) if server is not None else None
    host, port = hvd.broadcast_object(endpoint, root_rank=0, name=f"phalanx.rendezvous.{env.attempt}")
    store = server if server is not None else dist.TCPStore(host, port, is_master=False, timeout=timeout)
    store.set_timeout(timeout)
    if VARIABLE not in os.environ and env.local_world_size < env.world_size and _CARD in os.environ:
        os.environ[VARIABLE] = os.environ[_CARD]
    return dataclasses.replace(env, master_addr=host, master_port=port), store


def _own_address(*, one_node: bool) -> str:
    """Return an address of this machine that the others can reach."""
    if one_node:
        return "127.0.0.1"
    card = os.environ.get(_CARD) or default_interface()
    address = None if card is None else address_of_card(card)
    if address is None:
        raise UsageError(
            f"the network card {card!r}, which horovodrun chose, has no address here",
            hint="Name the card that leads to the other nodes: horovodrun --network-interfaces eth0 ...",
        )
    return address


def note_new_rank(attempt: int) -> None:
    """Forget the old groups after a new rendezvous of Horovod, and set this rank's new environment."""
    hvd = horovod()
    forget_groups()
    write_horovod_env(
        hvd.rank(),
        hvd.size(),
        (hvd.local_rank(), hvd.local_size()),
        (hvd.cross_rank(), hvd.cross_size()),
        attempt,
    )


def check_not_alone(env: RankEnv) -> None:
    """Refuse ranks of another starter where each of them is alone for Horovod."""
    hvd = sys.modules.get("horovod.torch")
    if hvd is None or env.started_by == STARTED_BY or not hvd.is_initialized() or hvd.size() == env.world_size:
        return
    raise UsageError(
        f"{env.started_by} started {env.world_size} ranks, but hvd.init() found a world of {hvd.size()}: Horovod finds "
        "its ranks only where horovodrun started them",
        hint="Start the script with horovodrun -np N python train.py, or with phalanx train --backend horovod; or "
        "leave hvd out of it.",
    )
