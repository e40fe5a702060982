"""Two nodes of Ray on this machine, started once for all exercises of a lab, and how a learner's code reaches them.

The nodes are processes of a helper (`python -m grader.ray_nodes`), which ends them when its input is closed: they never
outlive the process that grades, however it ends.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

COURSE = Path(__file__).resolve().parents[1]
CPUS = 2
"""Of each node: both workers of a small run fit on one, so that the placement decides where they are."""
STORE_BYTES = 80 * 2**20
"""Of the object store; Ray takes 30% of the memory otherwise."""
_START_SECONDS = 120.0
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
    "RAY_enable_metrics_collection": "0",
    "TORCH_CPP_LOG_LEVEL": "FATAL",
    "OMP_NUM_THREADS": "1",
}
_SOON = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",  # the controller handles reports at its next look
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "15",  # how long a report waits for the other workers; without it: for ever
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
_UNNEEDED = ("PlacementGroupCleanerCallback", "DatasetsCallback")
_nodes: Nodes | None = None


class NoRay(RuntimeError):
    """Ray does not start."""


@dataclass(frozen=True)
class Nodes:
    """The running nodes."""

    address: str
    ids: tuple[str, ...]
    variables: dict[str, str]
    """What a process needs in its environment to reach them."""
    helper: subprocess.Popen[bytes]


def start_nodes() -> Nodes:
    """Return the two nodes; the first call starts them, which takes some 10 seconds, more on a busy machine."""
    global _nodes
    if _nodes is not None and _nodes.helper.poll() is None:
        return _nodes
    path = os.pathsep.join([str(COURSE), *filter(None, [os.environ.get("PYTHONPATH")])])
    # With a token, other users of this machine cannot use these nodes.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: paths of sockets end at 107 characters
    variables = {**_QUIET, **token, "RAY_TMPDIR": folder}
    # Without bytecode on disk each of Ray's processes would compile Ray, pandas and torch anew, seconds in each.
    dropped = ("RAY_", "PYTHONDONTWRITEBYTECODE")
    own = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    with tempfile.TemporaryFile() as errors:  # a pipe that is not read blocks when it is full
        helper = subprocess.Popen(
            [sys.executable, "-P", "-m", "grader.ray_nodes"],
            env={**own, **variables, **_SOON, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        assert helper.stdout is not None
        in_time = bool(select.select([helper.stdout], [], [], _START_SECONDS)[0])
        line = helper.stdout.readline() if in_time else b""
        if not line:
            _end(helper, folder)
            errors.seek(0)
            said = [text for text in errors.read().decode(errors="replace").splitlines() if text.strip()]
            how = said[-1] if in_time and said else f"no answer after {_START_SECONDS:.0f} s"
            raise NoRay(f"two nodes of Ray did not start, so this exercise was not graded: {how}")
    found = json.loads(line)
    _nodes = Nodes(found["address"], tuple(found["ids"]), variables, helper)
    atexit.register(end_nodes)
    return _nodes


def end_nodes() -> None:
    """End the nodes; the next call of `start_nodes` starts new ones."""
    global _nodes
    if _nodes is None:
        return
    nodes, _nodes = _nodes, None
    _end(nodes.helper, nodes.variables["RAY_TMPDIR"])


def _end(helper: subprocess.Popen[bytes], folder: str) -> None:
    """Ask the helper to end its nodes; where it does not, end its session, which they belong to."""
    try:
        helper.communicate(timeout=20)  # closes its input
    except subprocess.TimeoutExpired:
        os.killpg(helper.pid, signal.SIGKILL)
        helper.communicate()
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def joining(nodes: Nodes, words: Sequence[str], log: Path) -> Iterator[None]:
    """Run `ray start` as the words say, as one more node; end it with the block."""
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        *words[1:],
        "--block",
        f"--object-store-memory={STORE_BYTES}",
    ]
    with log.open("w") as file:
        started = subprocess.Popen(command, env={**os.environ, **nodes.variables}, stdout=file, stderr=file)
    try:
        yield
    finally:
        started.terminate()  # it ends its processes then
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def connect(address: str, module: ModuleType) -> None:
    """Join the nodes from a process with the learner's file; its functions travel to the workers by value.

    The process has the variables of the nodes since before the file imported Ray, which reads them at its import.
    """
    ray: Any = import_module("ray")  # some of its functions carry no types
    ray.cloudpickle.register_pickle_by_value(module)
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    _without_cleaner()


def _without_cleaner() -> None:
    """Leave out Ray Train's actor that looks after lost drivers: a process more, and these nodes end soon anyway.

    This only saves seconds, by a private method: with a release of Ray that has no such method nothing is left out.
    """
    trainers: Any = import_module("ray.train.torch").TorchTrainer
    usual = getattr(trainers, "_create_default_callbacks", None)
    if usual is None:
        return

    def fewer(trainer: Any) -> list[Any]:
        return [one for one in usual(trainer) if type(one).__name__ not in _UNNEEDED]

    trainers._create_default_callbacks = fewer


def _serve() -> None:
    """Start the nodes, print their address, wait for the end of the input, and end them."""
    common = {"num_cpus": CPUS, "object_store_memory": STORE_BYTES}
    try:
        make_cluster: Any = import_module("ray.cluster_utils").Cluster
        cluster = make_cluster(True, head_node_args={**common, "include_dashboard": False})
        cluster.add_node(**common)
        ids = [node.node_id for node in cluster.list_all_nodes()]
        print(json.dumps({"address": cluster.address, "ids": ids}), flush=True)
        sys.stdin.read()
        cluster.shutdown()
    finally:
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)


if __name__ == "__main__":
    _serve()
