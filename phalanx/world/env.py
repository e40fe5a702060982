"""The only reader of rank variables: horovodrun's, torchrun's, Open MPI's and MPICH's (mpirun), Slurm's (srun).

Any of them may start Phalanx ranks. The innermost starter comes first: horovodrun may run within a job of Slurm, and
then ranks see both sets. No torch is needed to read them.
"""

from __future__ import annotations

import os
import re
import signal
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.host.addresses import is_loopback, loopback_environment, network_environment
from phalanx.host.processes import began_at

_USUAL_PORT = 29500
_DERIVED_PORTS = (10000, 19000)
"""First port and number of ports for starters that set no port; the id of the job picks one, equal on every rank.

They are below those from which the kernel takes ports for connections (32768 and above).
"""

_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_MPICH = ("PMI_RANK", "PMI_SIZE")
_SUPERVISED = "PHALANX_LOG_DIR"
"""Set by Phalanx's launcher."""


@dataclass(frozen=True)
class RankEnv:
    """The position of this process among the ranks of its job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    started_by: str
    attempt: int = 0
    max_restarts: int = 0
    """How often the starter starts the rank again."""
    supervised: bool = False
    """Whether Phalanx's launcher started the rank and reads its events and error record."""
    launch_id: str = ""
    """An id that the attempts of one launch share; empty where the starter restarts nothing."""
    launchers: int = 1
    """How many launchers there were at the beginning, one per node."""
    term: int | None = None
    """How often another launcher has taken over; None: of a fixed number of nodes none does."""
    generation: int = 0
    """How often the group has changed while this process ran or waited (`membership`)."""
    failures: int = 0
    """How many failures the launch has survived, by restarts or in place."""
    planned: int = 0
    """Ranks that the run was started with; 0: as many as now."""
    knows_local_size: bool = True
    """Whether the starter has set how many ranks are on this machine; else `local_world_size` is a guess."""

    @property
    def group(self) -> tuple[int, ...]:
        """The order of the groups of a launch: attempt, term and generation; empty if no other launcher takes over."""
        if not self.supervised or self.launchers == 1 or self.term is None:
            return ()
        return self.attempt, self.term, self.generation

    @property
    def on_one_node(self) -> bool:
        """Whether all ranks of the job are known to be on this node."""
        return self.knows_local_size and self.local_world_size >= self.world_size

    @property
    def ranks_here(self) -> int:
        """Ranks on this machine; nodes whose address is loopback are all on it."""
        return self.world_size if is_loopback(self.master_addr) else self.local_world_size

    @property
    def number_here(self) -> int:
        """This rank's number among them."""
        return self.local_rank + self.local_world_size * (self.node_rank if is_loopback(self.master_addr) else 0)


def read_rank_env(environ: Mapping[str, str] | None = None) -> RankEnv | None:
    """Return this process's position in the job that started it, or None where no starter did."""
    env = os.environ if environ is None else environ
    for marks, read in _STARTERS:
        if all(mark in env for mark in marks):
            return read(env)
    return None


def export_rank_env(rank_env: RankEnv) -> None:
    """Set torchrun's variables, so that torch and the user's code see one convention under any starter."""
    os.environ.update(torchrun_variables(rank_env))


def torchrun_variables(rank_env: RankEnv) -> dict[str, str]:
    """Return the variables by which torchrun describes a rank."""
    variables: dict[str, object] = {
        "RANK": rank_env.rank,
        "LOCAL_RANK": rank_env.local_rank,
        "WORLD_SIZE": rank_env.world_size,
        "LOCAL_WORLD_SIZE": rank_env.local_world_size,
        "GROUP_RANK": rank_env.node_rank,
    }
    if rank_env.master_port:  # ranks of horovodrun agree on an address at their rendezvous
        variables |= {"MASTER_ADDR": rank_env.master_addr, "MASTER_PORT": rank_env.master_port}
    return {name: str(value) for name, value in variables.items()}


def card_environment(rank_env: RankEnv) -> dict[str, str]:
    """Return the variables by which gloo and nccl choose a card that the other ranks reach, and no wider one."""
    if rank_env.on_one_node:
        return loopback_environment(os.environ)
    return network_environment(rank_env.master_addr, os.environ)


@contextmanager
def rank_environment(rank_env: RankEnv | None, **more: str) -> Iterator[None]:
    """Set torchrun's variables (and others) while a library reads them, and restore the environment afterwards."""
    before = dict(os.environ)
    if rank_env is not None:
        export_rank_env(rank_env)
    os.environ.update(more)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def show_local_rank(rank_env: RankEnv) -> Callable[[], None]:
    """Set LOCAL_RANK for a library that reads it at any time, where no launcher has; return a function that unsets it.

    `read_rank_env` still returns None: LOCAL_RANK alone does not make a rank.
    """
    if "LOCAL_RANK" in os.environ:
        return lambda: None
    os.environ["LOCAL_RANK"] = str(rank_env.local_rank)

    def unset() -> None:
        os.environ.pop("LOCAL_RANK", None)

    return unset


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(f"the environment variable {name} is {text!r}: expected a whole number") from None


def _from_torchrun(env: Mapping[str, str]) -> RankEnv:
    rank, world_size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise UsageError(f"the environment says RANK={rank} of WORLD_SIZE={world_size}: RANK must be below WORLD_SIZE")
    # DeepSpeed's launcher sets torchrun's variables, but this one under another name.
    local_world_size = _integer(env, "LOCAL_WORLD_SIZE", _integer(env, "LOCAL_SIZE", world_size))
    started_by = "phalanx" if _SUPERVISED in env else "torchrun"
    if any((env.get(name), env.get(size)) == (env["RANK"], env["WORLD_SIZE"]) for name, size in (_OPEN_MPI, _MPICH)):
        started_by = "mpirun"  # `export_rank_env` has set torchrun's variables, equal to MPI's
    return RankEnv(
        rank=rank,
        local_rank=_integer(env, "LOCAL_RANK", rank % local_world_size),
        world_size=world_size,
        local_world_size=local_world_size,
        knows_local_size="LOCAL_WORLD_SIZE" in env or "LOCAL_SIZE" in env,
        node_rank=_integer(env, "GROUP_RANK", rank // local_world_size),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_integer(env, "MASTER_PORT", _USUAL_PORT),
        started_by=started_by,
        **_attempt(env),
    )


def stop_signals(env: RankEnv | None) -> tuple[signal.Signals, ...]:
    """Return the signals at which a training loop stops at a step boundary and saves.

    Phalanx's launcher passes on what it receives: Ctrl-C and the end of its terminal mean the same there. Elsewhere
    these two keep Python's meaning.
    """
    of_schedulers = (signal.SIGTERM, signal.SIGUSR1)
    return (*of_schedulers, signal.SIGINT, signal.SIGHUP) if env is not None and env.supervised else of_schedulers


def _attempt(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `RankEnv` that describe the attempt, where the starter restarts ranks."""
    return {
        "attempt": _integer(env, "TORCHELASTIC_RESTART_COUNT", 0),
        "max_restarts": _integer(env, "TORCHELASTIC_MAX_RESTARTS", 0),
        "supervised": _SUPERVISED in env,
        "launch_id": _launch_id(env),
        "launchers": _integer(env, "GROUP_WORLD_SIZE", 1),
        "term": _integer(env, "PHALANX_TERM", 0) if "PHALANX_TERM" in env else None,
        "generation": _integer(env, "PHALANX_GENERATION", 0),
        "failures": _integer(env, "PHALANX_FAILURES", _integer(env, "TORCHELASTIC_RESTART_COUNT", 0)),
        "planned": _integer(env, "PHALANX_PLANNED_RANKS", 0),
    }


def _launch_id(env: Mapping[str, str]) -> str:
    """Return the id of Phalanx's launcher, else torchrun's, made unique by its process: by default it is "none".

    The id of rank 0 counts for all ranks.
    """
    launch_id = env.get("PHALANX_RUN_ID") or env.get("TORCHELASTIC_RUN_ID", "")
    named = launch_id != "none" and env.get("GROUP_WORLD_SIZE") != "1"
    if "PHALANX_RUN_ID" in env or not launch_id or named:
        return launch_id
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return launch_id
    began = began_at(os.getppid())
    return launch_id if began is None else f"{launch_id}/{boot}/{os.getppid()}/{began}"


def _from_horovodrun(env: Mapping[str, str]) -> RankEnv:
    world_size = _integer(env, "HOROVOD_SIZE")
    return RankEnv(
        rank=_integer(env, "HOROVOD_RANK"),
        local_rank=_integer(env, "HOROVOD_LOCAL_RANK", _integer(env, "HOROVOD_RANK")),
        world_size=world_size,
        local_world_size=_integer(env, "HOROVOD_LOCAL_SIZE", world_size),
        node_rank=_integer(env, "HOROVOD_CROSS_RANK", 0),
        master_addr="",
        master_port=0,
        started_by="horovodrun",
        **_attempt(env),
    )


def write_horovod_env(rank: int, size: int, local: tuple[int, int], cross: tuple[int, int], attempt: int) -> None:
    """Set this process's new position after ranks were lost or added; Horovod updates only its C++ part."""
    os.environ.update(
        HOROVOD_RANK=str(rank),
        HOROVOD_SIZE=str(size),
        HOROVOD_LOCAL_RANK=str(local[0]),
        HOROVOD_LOCAL_SIZE=str(local[1]),
        HOROVOD_CROSS_RANK=str(cross[0]),
        HOROVOD_CROSS_SIZE=str(cross[1]),
        TORCHELASTIC_RESTART_COUNT=str(attempt),
    )


def _from_slurm(env: Mapping[str, str]) -> RankEnv:
    hosts = expand_hostlist(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "127.0.0.1"))
    world_size, node_rank = _integer(env, "SLURM_NTASKS"), _integer(env, "SLURM_NODEID", 0)
    # "4(x2),3": four tasks on each of two nodes, three on the next.
    tasks_per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node)
    tasks = [int(count) for count, times in counts for _ in range(int(times or 1))]
    return RankEnv(
        rank=_integer(env, "SLURM_PROCID"),
        local_rank=_integer(env, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=tasks[node_rank] if node_rank < len(tasks) else world_size,
        node_rank=node_rank,
        # On one node without its name: that of a node is not always one that resolves.
        master_addr=env.get("MASTER_ADDR", hosts[0] if len(hosts) > 1 else "127.0.0.1"),
        master_port=_integer(
            env, "MASTER_PORT", _derived_port(env.get("SLURM_JOB_ID", "0") + env.get("SLURM_STEP_ID", ""))
        ),
        started_by="srun",
    )


def _from_openmpi(env: Mapping[str, str]) -> RankEnv:
    world_size = _integer(env, "OMPI_COMM_WORLD_SIZE")
    local_world_size = _integer(env, "OMPI_COMM_WORLD_LOCAL_SIZE", world_size)
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "0")
    return RankEnv(
        rank=_integer(env, "OMPI_COMM_WORLD_RANK"),
        local_rank=_integer(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=_integer(env, "OMPI_COMM_WORLD_RANK") // local_world_size,
        master_addr=_mpi_master(env, one_host=local_world_size == world_size),
        master_port=_integer(env, "MASTER_PORT", _derived_port(job)),
        started_by="mpirun",
        **_attempt(env),
    )


def _from_mpich(env: Mapping[str, str]) -> RankEnv:
    world_size = _integer(env, "PMI_SIZE")
    local_world_size = _integer(env, "MPI_LOCALNRANKS", world_size)
    return RankEnv(
        rank=_integer(env, "PMI_RANK"),
        local_rank=_integer(env, "MPI_LOCALRANKID", _integer(env, "PMI_RANK")),
        world_size=world_size,
        local_world_size=local_world_size,
        knows_local_size="MPI_LOCALNRANKS" in env,
        node_rank=0,
        master_addr=_mpi_master(env, one_host=local_world_size == world_size),
        master_port=_integer(env, "MASTER_PORT", _derived_port(str(os.getppid()))),
        started_by="mpirun",
    )


_STARTERS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, str]], RankEnv]], ...] = (
    (("HOROVOD_RANK", "HOROVOD_SIZE"), _from_horovodrun),
    (("RANK", "WORLD_SIZE"), _from_torchrun),
    (_OPEN_MPI, _from_openmpi),
    (_MPICH, _from_mpich),
    # A batch script has SLURM_PROCID too, but only a step that srun started has these ranks.
    (("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_SRUN_COMM_PORT"), _from_slurm),
)


def _mpi_master(env: Mapping[str, str], *, one_host: bool) -> str:
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"]
    if one_host:
        return "127.0.0.1"
    raise UsageError(
        "mpirun started ranks on several hosts, and MPI does not say where rank 0 is",
        hint="Pass its address to every rank: mpirun -x MASTER_ADDR=<host of rank 0> ...",
    )


def _derived_port(job: str) -> int:
    first, count = _DERIVED_PORTS
    return first + zlib.crc32(job.encode()) % count


def expand_hostlist(text: str) -> list[str]:
    """Expand Slurm's host notation: "gpu[01-03,7],login" names gpu01, gpu02, gpu03, gpu7 and login."""
    parts = re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*", text)
    return [host for part in parts for host in _expand_brackets(part)]


def _expand_brackets(part: str) -> list[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    before, ranges, after = match.groups()
    names: list[str] = []
    for piece in ranges.split(","):
        low, _, high = piece.partition("-")
        for number in range(int(low), int(high or low) + 1):
            names += _expand_brackets(f"{before}{number:0{len(low)}d}{after}")
    return names
