"""What a worker of Ray Train runs: become a rank, run the target, send output and events to the launcher."""

from __future__ import annotations

import io
import logging
import os
import socket
import sys
from contextlib import closing, redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.engines.ray import UNDER_RAY
from phalanx.engines.ray.log_forwarder import LogForwarder, forwarding
from phalanx.engines.ray.messages import RankOrder
from phalanx.engines.ray.sources import PAYLOAD_NAME, UnpackedSources, unpack
from phalanx.errors import EXIT_PREEMPTED
from phalanx.host.addresses import free_port
from phalanx.launch.environment import NodeInfo, rank_environment
from phalanx.launch.error_file import read_record, record_exception
from phalanx.launch.forkserver.preload import set_compute_threads
from phalanx.launch.rank import announce_joining, run_target, run_to_end
from phalanx.launch.scratch import close_scratch, open_scratch
from phalanx.launch.spec import LaunchSpec
from phalanx.observe.heartbeat import HeartbeatBoard, board_path

_MOST_RETURNED = 1 << 30
"""Bytes of a rank's files that are sent back to another machine at most."""


class RankLostError(RuntimeError):
    """Raised so that Ray marks the worker failed; the error itself was already sent to the launcher."""


def run_rank(config: dict[str, Any]) -> None:
    """Run the order on this worker; Ray Train calls this in a thread."""
    order, controller = config["order"], config["controller"]
    scratch = open_scratch("ray")
    try:
        node, local_rank, attempt = _find_node(controller)
        code = _Rank(order, controller, scratch, node, local_rank, attempt).run()
    finally:
        os.chdir("/")
        close_scratch(scratch)
    if code not in (0, EXIT_PREEMPTED):
        raise RankLostError(f"rank {node.first_rank + local_rank} ended with exit code {code}")


def _find_node(controller: Any) -> tuple[NodeInfo, int, int]:
    """Let rank 0 choose the address of the ranks' store, and broadcast it."""
    from ray.train.collective import broadcast_from_rank_zero

    ray: Any = import_module("ray")  # not all of it carries types
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    chosen: Any = None
    if rank == 0:
        attempt = ray.get(controller.begin.remote(world_size))
        chosen = (ray.util.get_node_ip_address(), free_port(), attempt)
    host, port, attempt = broadcast_from_rank_zero(chosen)
    local_rank = context.get_local_rank()
    nodes = -(-world_size // context.get_local_world_size())
    node = NodeInfo(context.get_node_rank(), nodes, rank - local_rank, world_size, host, port)
    return node, local_rank, attempt


@dataclass
class _Rank:
    """One rank in one attempt."""

    order: RankOrder
    controller: Any
    scratch: Path
    node: NodeInfo
    local_rank: int
    attempt: int

    def __post_init__(self) -> None:
        self.rank = self.node.first_rank + self.local_rank
        self.log_dir = self.scratch / "logs"

    def run(self) -> int:
        """Run the target and return its exit code; the exception that ended it is recorded."""
        self.log_dir.mkdir()
        path = board_path(self.log_dir, self.node.node_rank)
        board = HeartbeatBoard.create(path, self.node.world_size)
        with closing(board), forwarding(self.controller, self.rank, board) as forwarder:
            forwarder.send({"location": self.rank, "host": socket.gethostname(), "board": str(path)})
            code = run_to_end(lambda: self._run_target(forwarder), lambda error: self._record(error, forwarder))
            record = read_record(self.log_dir, self.rank)
            if record is not None:
                forwarder.send({"record": record})
            forwarder.send({"ended": code, "rank": self.rank, "host": socket.gethostname()})
        return code

    def _run_target(self, forwarder: LogForwarder) -> None:
        unpacked = unpack(self.order.archive, self.scratch)
        forwarder.keeps_events = self.rank == 0 and not unpacked.in_place  # else the rank writes them itself
        self._become_rank(unpacked)
        run_target(unpacked.target, sys.path)
        if self.rank == 0 and unpacked.payload_folder is not None:
            forwarder.send(made_next_to(unpacked.payload_folder))

    def _record(self, error: BaseException, forwarder: LogForwarder) -> None:
        """Write the record; the traceback goes to the log, because the launcher reports the cause once."""
        text = io.StringIO()
        with redirect_stderr(text):
            record_exception(error, {"rank": self.rank, "log_dir": str(self.log_dir)})
        forwarder.final_output = text.getvalue()

    def _become_rank(self, unpacked: UnpackedSources) -> None:
        """Set torchrun's variables, the user's folder and import path, and the compute threads."""
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's, by the CPUs reserved
        import ray

        local_world_size = ray.train.get_context().get_local_world_size()
        spec = LaunchSpec(
            target=unpacked.target,
            ranks_per_node=local_world_size,
            log_dir=self.log_dir,
            max_restarts=self.order.max_restarts,
            threads_per_rank=self.order.threads,
        )
        variables = rank_environment(spec, self.node, self.local_rank, self.attempt, os.environ)
        # No agent hosts the ranks' store here: rank 0 does.
        os.environ.update({**variables, **self.order.env, "TORCHELASTIC_USE_AGENT_STORE": "False"})
        os.environ[UNDER_RAY] = "1"
        os.chdir(unpacked.folder)
        sys.path[:] = [*unpacked.path, *(entry for entry in sys.path if entry not in unpacked.path)]
        logging.getLogger("ray.train").setLevel(logging.WARNING)  # the loop itself reports what was saved
        set_compute_threads(int(os.environ["OMP_NUM_THREADS"]))
        announce_joining(self.rank)


def made_next_to(folder: Path, most: int = _MOST_RETURNED) -> dict[str, Any]:
    """Return a message with the files that the target wrote next to its payload, and the sizes of those too large.

    The smallest go first: a history must not be left out because of large weights.
    """
    message: dict[str, Any] = {"files": {}, "left_out": {}, "host": socket.gethostname()}
    made = [path for path in folder.iterdir() if path.is_file() and path.name != PAYLOAD_NAME]
    for path in sorted(made, key=lambda path: path.stat().st_size):
        size = path.stat().st_size
        if size <= most:
            message["files"][path.name] = path.read_bytes()
            most -= size
        else:
            message["left_out"][path.name] = size
    return message
