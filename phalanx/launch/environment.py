"""The environment of a rank: torchrun's, so that any script written for torchrun runs, and Phalanx's."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.host.addresses import loopback_environment, network_environment
from phalanx.host.gpus import sharing_environment
from phalanx.host.processes import JOINS_LATE
from phalanx.host.wire import Wire
from phalanx.launch.spec import LaunchSpec
from phalanx.observe.call_ring import KEPT, VARIABLE
from phalanx.observe.goodput import LAUNCHED_AT
from phalanx.observe.heartbeat import BOARD_VARIABLE, board_path


@dataclass(frozen=True)
class NodeInfo(Wire):
    """The position of this node in the group, and the address of the ranks' store; a message of the store agent."""

    node_rank: int
    num_nodes: int
    first_rank: int
    world_size: int
    master_addr: str
    master_port: int
    run_id: str = ""
    """The name that the nodes agreed on for this launch; empty: this node's own, `LaunchSpec.run_id`."""
    own: str = ""
    """This node's name among several whose number may change (`nodes`)."""
    leader: str = ""
    """The node whose launcher decides about the ranks."""
    nodes: Sequence[Sequence[Any]] = ()
    """Name, host, ranks and address of the standby store of each node."""
    late: bool = False
    """Whether this node came when the others had begun."""
    round: int = 0
    """How many times the nodes have gathered before."""
    term: int = 0
    """How many times another node has become the leader."""

    def without(self, names: set[str]) -> NodeInfo:
        """Return this with some nodes left out."""
        return dataclasses.replace(self, nodes=[node for node in self.nodes if node[0] not in names])


def threads_per_rank(spec: LaunchSpec, environ: Mapping[str, str]) -> int:
    """Return the compute threads of a rank: as given, else as the user exported, else the cores shared evenly."""
    if spec.threads_per_rank is not None:
        return spec.threads_per_rank
    exported = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if exported.isdecimal() and int(exported) > 0:
        return int(exported)
    return max(1, len(os.sched_getaffinity(0)) // spec.ranks_per_node)


def shared_environment(spec: LaunchSpec) -> dict[str, str]:
    """Return what all ranks see: this process's environment and what the launch adds to it."""
    return {**os.environ, **spec.env}


def rank_environment(
    spec: LaunchSpec, node: NodeInfo, local_rank: int, attempt: int, shared: Mapping[str, str]
) -> dict[str, str]:
    """Return one rank's whole environment."""
    rank = str(node.first_rank + local_rank)
    world_size = str(max(node.world_size, node.first_rank + local_rank + 1))  # a spare rank gets its place later
    log_dir = spec.log_dir.absolute()
    return {
        VARIABLE: str(KEPT),
        # torch's watchdog of nccl then waits a minute with the end of the process: time to compare all ranks.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(log_dir / "nccl-trace-rank-"),
        **shared,
        **(network_environment(node.master_addr, shared) if node.num_nodes > 1 else loopback_environment(shared)),
        **(sharing_environment(f"{os.getpid()}.{rank}", shared) if spec.ranks_per_gpu > 1 else {}),
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(spec.ranks_per_node),
        "GROUP_RANK": str(node.node_rank),
        "GROUP_WORLD_SIZE": str(node.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": node.master_addr,
        "MASTER_PORT": str(node.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(max(attempt, node.round)),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": node.run_id or spec.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(log_dir / f"rank-{rank}.torch-error.json"),
        "OMP_NUM_THREADS": str(threads_per_rank(spec, shared)),
        "PHALANX_LOG_DIR": str(log_dir),
        BOARD_VARIABLE: str(board_path(log_dir, node.node_rank)),
        "PHALANX_SLOT": rank,
        **({} if spec.elastic is None else {"PHALANX_TERM": str(node.term)}),
        "PHALANX_PLANNED_RANKS": world_size if spec.elastic is None else str(spec.elastic.sizes[0]),
        **({JOINS_LATE: "1"} if node.late else {}),
        "PHALANX_RUN_ID": node.run_id or spec.run_id,
        LAUNCHED_AT: str(spec.launched),
    }
