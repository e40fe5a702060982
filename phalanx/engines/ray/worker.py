"""What a worker of Ray Train runs: become a rank, run the target, send output and events to the launcher."""

from __future__ import annotations

import io
import json
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train.collective import broadcast_from_rank_zero

from phalanx.engines.ray.fit_order import RankOrder
from phalanx.engines.ray.rules import UNDER_RAY
from phalanx.engines.ray.sources import PAYLOAD_NAME, UnpackedSources, unpack
from phalanx.errors import EXIT_PREEMPTED
from phalanx.host import messages
from phalanx.host.addresses import free_port
from phalanx.host.files import close_scratch, open_scratch
from phalanx.host.processes import request_stop
from phalanx.launch.environment import NodeInfo, rank_environment
from phalanx.launch.error_file import read_record, record_exception
from phalanx.launch.forkserver.preload import set_compute_threads
from phalanx.launch.rank import announce_joining, run_target, run_to_end
from phalanx.launch.spec import LaunchSpec
from phalanx.observe.heartbeat import HeartbeatBoard, board_path

_MOST_RETURNED = 1 << 30
"""Bytes of a rank's files that are sent back to another node at most."""
_FLUSH_SECONDS = 0.1
_STEP_SECONDS = 1.0
_CHUNK = 1 << 16
_EVENT_BYTES = 1 << 18


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
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    chosen: Any = None
    if rank == 0:
        attempt = ray.get(controller.begin.remote(world_size))
        chosen = (ray.util.get_node_ip_address(), free_port(), attempt)  # type: ignore[no-untyped-call]
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
    files = [path for path in folder.iterdir() if path.is_file() and path.name != PAYLOAD_NAME]
    for path in sorted(files, key=lambda path: path.stat().st_size):
        size = path.stat().st_size
        if size <= most:
            message["files"][path.name] = path.read_bytes()
            most -= size
        else:
            message["left_out"][path.name] = size
    return message


# --- output and events ----------------------------------------------------------------------------------------------


class LogForwarder:
    """Sends a rank's output and events to the controller actor, from a thread, a few times per second."""

    def __init__(self, controller: Any, rank: int, board: HeartbeatBoard) -> None:
        self._controller = controller
        self._rank = rank
        self._board = board
        self._sent_step: int | None = None
        self._next_step_at = 0.0
        self.final_output = ""
        self.keeps_events = False
        """Whether the launcher writes the run's events file: the rank's own is on another node."""
        self._messages: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._output, self.output_end = os.pipe2(os.O_CLOEXEC)
        self._events, self.events_end = messages.socket_pair()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phalanx-log", daemon=True)
        self._stop: Any = controller.stop_reason.remote()
        os.set_blocking(self._output, False)
        self._events.setblocking(False)
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message with the next batch."""
        with self._lock:
            self._messages.append(message)

    def close(self) -> None:
        """Send the rest and wait until it has arrived."""
        self._ended.set()
        self._thread.join()
        for end in (self._output, self.output_end):
            os.close(end)
        self._events.close()
        self.events_end.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._events, selectors.EVENT_READ)
            while not self._ended.is_set():
                selector.select(_FLUSH_SECONDS * 2)
                self._ended.wait(_FLUSH_SECONDS)  # sends one burst in one message
                self._deliver()
        self._deliver(wait=True)

    def _deliver(self, *, wait: bool = False) -> None:
        self._read()
        self._report_step()
        with self._lock:
            waiting, self._messages = self._messages, []
        if wait and self.final_output:
            waiting.append({"log": self.final_output.encode(), "rank": self._rank})
        if waiting:
            sent = self._controller.post.remote(waiting)
            if wait:
                ray.get(sent)
        if self._stop is not None and ray.wait([self._stop], timeout=0)[0]:
            request_stop(ray.get(self._stop))
            self._stop = None

    def _report_step(self) -> None:
        """Report the current step about once per second: if the node is lost, nothing else is known."""
        beat = self._board.read(self._rank)
        if beat is not None and beat.step != self._sent_step and time.monotonic() >= self._next_step_at:
            self._sent_step, self._next_step_at = beat.step, time.monotonic() + _STEP_SECONDS
            self.send({"at": beat.step, "rank": self._rank})

    def _read(self) -> None:
        output = b"".join(messages.read_available(lambda: os.read(self._output, _CHUNK)))
        if output:
            self.send({"output": output, "rank": self._rank})
        for data in messages.read_available(lambda: self._events.recv(_EVENT_BYTES)):
            self.send({"event": json.loads(data), "keep": self.keeps_events})


@contextmanager
def forwarding(controller: Any, rank: int, board: HeartbeatBoard) -> Iterator[LogForwarder]:
    """Send to the launcher what any library prints to stdout and stderr here, and the events of the loop."""
    forwarder = LogForwarder(controller, rank, board)
    before = [os.dup(1), os.dup(2)]
    streams = sys.stdout, sys.stderr
    for number in (1, 2):
        os.dup2(forwarder.output_end, number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    os.environ["PHALANX_EVENTS_FD"] = str(forwarder.events_end.fileno())
    try:
        yield forwarder
    finally:
        replaced = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = streams
        for stream in replaced:
            stream.close()
        for number, saved in enumerate(before, start=1):
            os.dup2(saved, number)
            os.close(saved)
        forwarder.close()
