"""A rank's position, device and process group: joined once, and left so that no rank waits for another for ever."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import warnings
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx import torch_compat
from phalanx.config import DistributedConfig
from phalanx.config.backends import DEFAULT_STRATEGY
from phalanx.engine import engines_here
from phalanx.errors import UsageError, error_line
from phalanx.host.gpus import ranks_per_gpu, shared_memory, sharing_environment
from phalanx.host.signed_store import sign_store
from phalanx.world.abort import abortable_store
from phalanx.world.env import RankEnv, card_environment, export_rank_env, read_rank_env
from phalanx.world.groups import forget_groups, open_loopback_store
from phalanx.world.mesh import Mesh, check_device, nothing_to_share, plan_mesh

_ALONE = RankEnv(0, 0, 1, 1, 0, "127.0.0.1", 0, started_by="python")
_LOOPBACK_STORES: dict[int, dist.Store] = {}
_CONNECTED: dict[Hashable, dist.Store] = {}
"""Stores by where they are, their timeout, and whether values are signed."""
_JOINS: dict[int, Iterator[int]] = {}
"""Counts by generation. A rank may join several times (fit, evaluate, fit): values of an earlier group must not be read
from the store, and a rank that came later has not counted them."""


@dataclass(frozen=True)
class World:
    """A rank's position, device, mesh and store."""

    env: RankEnv
    device: torch.device
    mesh: Mesh
    comm_backend: str | None
    store: dist.Store | None
    owns_group: bool

    @property
    def rank(self) -> int:
        """This rank's number in the whole job."""
        return self.env.rank

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return self.env.world_size

    @property
    def is_launched(self) -> bool:
        """Whether a launcher started this process to be a rank; else it is the user's own."""
        return self.env is not _ALONE

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints, logs and publishes."""
        return self.env.rank == 0

    @property
    def dp_rank(self) -> int:
        """This rank's number among those that see different samples."""
        return self.mesh.dp_rank(self.rank)

    @property
    def ranks_per_gpu(self) -> int:
        """The most ranks of this machine that run on one GPU; over 1 they share it."""
        return ranks_per_gpu(self.env.ranks_here, torch.cuda.device_count()) if self.device.type == "cuda" else 1

    @property
    def leads_samples(self) -> bool:
        """Whether this rank reports for those that see the same samples."""
        return self.mesh.leads_samples(self.rank)

    def blocks(self, accumulation: int) -> int:
        """Return the micro-batches of all ranks in one optimizer step: as many as when the run was started.

        With other numbers of ranks, each takes more or fewer of them, so that the global batch stays the same.
        """
        planned = self.env.planned or self.world_size
        return accumulation * self.mesh.dp_size * planned // self.world_size

    def accumulation(self, accumulation: int) -> int:
        """Return the micro-batches of each rank in one step, from the number that was set."""
        return -(-self.blocks(accumulation) // self.mesh.dp_size)

    @property
    def label(self) -> str:
        """This rank's name in logs."""
        return self.mesh.label(self.rank)


def join_world(config: DistributedConfig) -> World:
    """Read this rank's environment, choose its device, and join the other ranks."""
    env = read_rank_env() or _ALONE
    device = _pick_device(config, env)
    check_device(config, device.type)
    mesh = plan_mesh(config, env.world_size, env.local_world_size)
    if env.world_size == 1:
        return World(env, device, mesh, None, None, owns_group=False)
    for engine in engines_here():
        engine.check_rank(env)
    backend = _comm_backend(config, device, env)
    name = f"phalanx/{env.generation}/{next(_JOINS.setdefault(env.generation, itertools.count()))}"
    if dist.is_initialized():  # by the user's script, which also leaves it
        store = torch_compat.default_store()
        return World(env, device, mesh, dist.get_backend(), dist.PrefixStore(name, store), owns_group=False)
    # nccl's threads read the store, and would call Python for every value of a signed one.
    groups = (engine.rendezvous(env, config.timeout) for engine in engines_here())
    rendezvous = next((one for one in groups if one is not None), None)
    env, store = rendezvous or (env, _connect(env, config.timeout, signed="nccl" not in backend))
    if "nccl" not in backend:
        store = abortable_store(store)
    export_rank_env(env)
    os.environ.update(card_environment(env))
    if backend == "phalanx" and config.communication_backend is None:
        backend = _agree_on_backend(dist.PrefixStore(f"{name}/backend", store), env)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"{name}/group", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=config.timeout),
        device_id=device if "nccl" in backend else None,
    )
    return World(env, device, mesh, backend, dist.PrefixStore(name, store), owns_group=True)


def start_device(config: DistributedConfig) -> None:
    """Start CUDA and load NCCL's kernels in a rank that waits for its place: both take tenths of a second.

    A spare rank does not know its GPU yet. NCCL reads which cards it may use once, and between nodes that depends on
    the leader's address.
    """
    env = read_rank_env()
    if env is None or env.local_rank >= env.local_world_size:
        return
    device = _pick_device(config, env)
    if device.type != "cuda":
        return
    torch.zeros((), device=device)
    if env.on_one_node and "nccl" in _comm_backend(config, device, env):
        torch_compat.load_nccl()


def _agree_on_backend(store: dist.Store, env: RankEnv) -> str:
    """Return our own backend, or gloo if any rank cannot form it with its torch; all ranks call this and get the same.

    The backend is an optimization, and torch calls its backends experimental: a torch that changes their interface may
    cost speed, not the run. Each rank tries alone before the ranks meet, so that none waits for one that failed.
    """
    keys = [f"problem/{rank}" for rank in range(env.world_size)]
    store.set(keys[env.rank], _problem_of_own_backend())
    store.wait(keys)
    problems = {rank: text for rank, key in enumerate(keys) if (text := store.get(key).decode())}
    if not problems:
        return "phalanx"
    if env.rank == 0:
        rank, problem = next(iter(problems.items()))
        warnings.warn(
            f"the backend 'phalanx' cannot be formed with torch {torch.__version__}: the ranks use gloo, which is "
            f"slower (rank {rank}: {problem}). communication_backend = 'phalanx' raises the whole error",
            stacklevel=3,
        )
    return "gloo"


@functools.cache
def _problem_of_own_backend() -> str:
    """Form a group of this rank alone by our own backend and leave it; return the error in a line, or an empty one."""
    try:
        dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
    except ConnectionAbortedError:  # another rank was lost meanwhile
        raise
    except Exception as error:  # noqa: BLE001 - any failure inside torch's or our code; all ranks hear of it
        if dist.is_initialized():
            dist.destroy_process_group()
        torch_compat.number_groups_from_zero()
        return error_line(type(error).__name__, str(error))
    dist.destroy_process_group()
    return ""


def _connect(env: RankEnv, seconds: float, *, signed: bool) -> dist.Store:
    """Connect to the ranks' store, once: if it were opened again, a quick rank could connect to the one that closes.

    A launcher's store is the same for a rank that gets another position.
    """
    hosted_by_a_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = (env.master_addr, env.master_port, env.attempt) if hosted_by_a_launcher else env
    key = (address, seconds, signed)
    if key not in _CONNECTED:
        if signed:
            _CONNECTED[key] = sign_store(_connect(env, seconds, signed=False))
        else:
            _CONNECTED[key] = _open_store(env, seconds, hosted_by_a_launcher=hosted_by_a_launcher)
    return _CONNECTED[key]


def _open_store(env: RankEnv, seconds: float, *, hosted_by_a_launcher: bool) -> dist.Store:
    export_rank_env(env)
    timeout = timedelta(seconds=seconds)
    store: dist.Store
    if env.on_one_node and not hosted_by_a_launcher:
        port = env.master_port  # opened once: `env` may differ between two runs, the port does not
        if port not in _LOOPBACK_STORES:
            _LOOPBACK_STORES[port] = open_loopback_store(port, timeout, is_master=env.rank == 0)
        store = _LOOPBACK_STORES[port]
    else:
        store, _, _ = next(iter(dist.rendezvous("env://", env.rank, env.world_size, timeout=timeout)))
    store.set_timeout(timeout)
    return store


def leave_world(world: World) -> None:
    """Leave the process group. Everything that holds it, such as a DDP module, must have been dropped before.

    Destroying a gloo group that a reducer still holds can deadlock at interpreter exit (seen with torch 2.13): so
    garbage first, then a barrier, then the group.
    """
    if not world.owns_group or not dist.is_initialized():
        return
    forget_groups()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _pick_device(config: DistributedConfig, env: RankEnv) -> torch.device:
    device_type = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if config.share_gpus and not torch.cuda.is_available():
        raise nothing_to_share(env.world_size)
    if device_type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("device = 'cuda', but torch sees no GPU here", hint="Run on the CPU with --device cpu.")
    count = torch.cuda.device_count()
    if env.local_world_size > count and not config.share_gpus and config.communication_backend != "gloo":
        raise UsageError(
            f"{env.local_world_size} ranks were started on this machine, but it has {count} GPU{'s' * (count != 1)}",
            hint="nccl needs one GPU per rank: start fewer ranks, or several on each GPU with --share-gpus.",
        )
    device = torch.device("cuda", env.number_here % count)
    torch.cuda.set_device(device)
    if config.share_gpus and env.ranks_here > count:
        total = torch.cuda.get_device_properties(device).total_memory
        memory = shared_memory(ranks_per_gpu(env.ranks_here, count), total)
        torch.cuda.set_per_process_memory_fraction(memory / total)
        # Where torchrun, srun or mpirun started this rank it has none, or the one that the user gave to all.
        os.environ.update(sharing_environment(f"{os.getpid()}.{env.rank}", os.environ))
    return device


def _comm_backend(config: DistributedConfig, device: torch.device, env: RankEnv) -> str:
    """By default nccl for GPUs, gloo for CPUs; with strategy = 'auto', shared memory for CPUs of one node."""
    automatic = config.strategy == "auto" and config.resolved_strategy == DEFAULT_STRATEGY
    on_cpu = "phalanx" if automatic and env.on_one_node else "gloo"
    backend = config.communication_backend or ("nccl" if device.type == "cuda" else on_cpu)
    if backend == "mpi" and not dist.is_mpi_available():
        raise UsageError(
            "communication_backend = 'mpi': this torch was built without MPI",
            hint="Use 'gloo' (CPU) or 'nccl' (GPU); mpirun can start the ranks with either.",
        )
    if backend == "phalanx" and device.type != "cpu":
        raise UsageError(
            "communication_backend = 'phalanx' is for ranks that compute on the CPU",
            hint="Leave communication_backend out for nccl, or run on the CPU with --device cpu.",
        )
    if config.offload == "cpu" and backend == "nccl":
        return "cpu:gloo,cuda:nccl"  # gradients in CPU memory need a group that can add them there
    return backend
