"""TF_CONFIG, the role of a process in a TensorFlow cluster: read, checked against the settings, and written.

TensorFlow waits for tasks of a TF_CONFIG that another program wrote without a message, holding the interpreter's lock
and ignoring SIGTERM. So a separate process (`main`) reports those that do not answer, and ends the waiting one after
the limit.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.config import DistributedConfig
from phalanx.errors import CommunicationError, UsageError
from phalanx.host.processes import die_with, own_python
from phalanx.launch.launcher_loop import Reminder, duration_text

VARIABLE = "TF_CONFIG"
ROLES_VARIABLE = "PHALANX_TF_ROLES"
"""The roles of all ranks, in order, separated by commas; the launcher sets it."""

_SERVERS_UNASKED = 1
_ROLES = ("chief", "worker", "ps", "evaluator")


@dataclass(frozen=True)
class Task:
    """One process of a TensorFlow cluster."""

    role: str
    index: int
    cluster: Mapping[str, list[str]]

    @property
    def leads(self) -> bool:
        """Whether this task saves, reports and prints: the chief, or the first worker where there is none."""
        return self.role == "chief" or (self.role == "worker" and self.index == 0 and not self.cluster.get("chief"))

    @property
    def serves(self) -> bool:
        """Whether this task only serves the chief of a cluster with parameter servers."""
        return bool(self.cluster.get("ps")) and self.role in ("worker", "ps")

    def to_json(self) -> str:
        """Return the value of the variable."""
        task = {"type": self.role, "index": self.index}
        return json.dumps({"cluster": {role: list(hosts) for role, hosts in self.cluster.items()}, "task": task})


def roles_of(config: DistributedConfig) -> tuple[str, ...]:
    """Return the role of each process; a mirrored run is one process, with any number of replicas."""
    strategy = config.resolved_strategy
    workers = config.total_ranks or 1
    if strategy == "mirrored":
        return ("worker",)
    if strategy == "multiworker":
        return ("worker",) * workers
    return ("chief",) + ("worker",) * workers + ("ps",) * config.num_servers


def role_names(roles: tuple[str, ...]) -> tuple[str, ...]:
    """Return a name for each process: "chief", "worker 1"."""
    return tuple(role if role == "chief" else f"{role} {roles[:n].count(role)}" for n, role in enumerate(roles))


def task_of(rank: int, roles: tuple[str, ...], addresses: list[str]) -> Task:
    """Return the task of a rank, given the addresses of all ranks."""
    cluster: dict[str, list[str]] = {}
    for role, address in zip(roles, addresses, strict=True):
        cluster.setdefault(role, []).append(address)
    return Task(roles[rank], roles[:rank].count(roles[rank]), cluster)


def read_task(environ: Mapping[str, str] | None = None) -> Task | None:
    """Return this process's task from TF_CONFIG, or None where it has none; raise where it is wrong."""
    text = (os.environ if environ is None else environ).get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise _error(f"is not JSON: {error}") from None
    if not isinstance(document, Mapping) or not document.get("cluster"):
        return None  # a single process, also for TensorFlow
    cluster, task = document["cluster"], document.get("task")
    if not isinstance(cluster, Mapping) or not isinstance(task, Mapping):
        raise _error('needs "cluster" and "task", each a table')
    return _checked(cluster, task)


def _checked(cluster: Mapping[str, Any], task: Mapping[str, Any]) -> Task:
    for name, hosts in cluster.items():
        if name not in _ROLES or not isinstance(hosts, list) or not hosts:
            raise _error(f'has "{name}": {hosts!r} in its cluster; it takes lists of hosts for {", ".join(_ROLES)}')
    if len(cluster.get("chief", ())) > 1:
        raise _error(f"has {len(cluster['chief'])} chiefs in its cluster; there can be one")
    if cluster.get("ps") and not cluster.get("chief"):
        raise _error("has ps in its cluster and no chief, without which workers and servers do nothing")
    role, index = str(task.get("type")), task.get("index")
    if role not in cluster:
        raise _error(f"names this process a {role!r}, and its cluster has only {', '.join(cluster)}")
    if not isinstance(index, int) or not 0 <= index < len(cluster[role]):
        raise _error(f"names this process {role} {index!r}, and its cluster has {len(cluster[role])} of them, from 0")
    return Task(role, index, dict(cluster))


def check_against(task: Task, config: DistributedConfig, settings: Collection[str] = ()) -> None:
    """Raise for a cluster that contradicts the settings of the run; `settings`: the settings that were set."""
    workers = len(task.cluster.get("worker", ()))
    servers = len(task.cluster.get("ps", ()))
    if config.strategy == "parameter-server" and not servers:
        raise _error("has no ps in its cluster, but strategy = 'parameter-server' was given")
    if config.strategy in ("mirrored", "multiworker") and servers:
        raise _error(f"has {servers} ps in its cluster, but strategy = {config.strategy!r} was given")
    if config.strategy == "mirrored" and sum(map(len, task.cluster.values())) > 1:
        raise _error("names a cluster of several processes, but strategy = 'mirrored' is one process")
    # Without parameter servers the chief trains like the workers; with them it only coordinates.
    trains = workers if servers else workers + len(task.cluster.get("chief", ()))
    if config.total_ranks is not None and config.total_ranks != trains:
        raise _error(f"has {trains} worker{'s' * (trains != 1)}, but num_workers = {config.total_ranks} was given")
    is_set = "num_servers" in settings or config.num_servers != _SERVERS_UNASKED
    if servers and is_set and config.num_servers != servers:
        raise _error(f"has {servers} ps, but num_servers = {config.num_servers} was given")


def _error(problem: str) -> UsageError:
    return UsageError(
        f"the environment variable {VARIABLE} {problem}",
        hint="The program that started this process set it (Kubeflow, a scheduler, a shell). Make it agree with the "
        f"settings, leave the settings out, or unset {VARIABLE}: phalanx then starts the processes and writes it.",
    )


_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 1.0
_EXIT_SECONDS = 2.0
_libc = ctypes.CDLL(None)
_libc.signal.argtypes, _libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
_exit = ctypes.cast(_libc._exit, ctypes.c_void_p)


def needed_peers(task: Task) -> dict[str, str]:
    """Return the tasks that this one cannot train without, and their addresses.

    A task that serves a chief waits for it without a limit; an evaluator needs no other task.
    """
    if task.serves or task.role == "evaluator":
        return {}
    return {
        f"{role} {index}" if role != "chief" else role: address
        for role, addresses in task.cluster.items()
        for index, address in enumerate(addresses)
        if role != "evaluator" and (role, index) != (task.role, task.index)
    }


def wait_for_peers(peers: Mapping[str, str], limit: float | None, say: Callable[[str], None]) -> None:
    """Connect to every peer until it has answered once; raise with the names of those that never did."""
    began = time.monotonic()
    reminder = Reminder(began)
    missing = dict(peers)
    while True:
        missing = {name: address for name, address in missing.items() if not answers(address)}
        waited = time.monotonic() - began
        if not missing:
            return
        names = ", ".join(f"{name} ({address})" for name, address in missing.items())
        if limit is not None and waited >= limit:
            tasks = "1 task" if len(missing) == 1 else f"{len(missing)} tasks"
            raise CommunicationError(
                f"{tasks} of TF_CONFIG did not answer within {limit:g} s: {names}",
                hint="Start them, correct their addresses in TF_CONFIG, or wait longer with --start-timeout SECONDS.",
            )
        if reminder.is_due(began + waited):
            hint = "" if limit else "; --start-timeout SECONDS limits the wait"
            say(f"no answer yet after {duration_text(waited)} from {names}{hint}")
        time.sleep(_POLL_SECONDS)


def answers(address: str) -> bool:
    """Whether a process listens at host:port."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return False
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS):
            return True
    except OSError:
        return False


_watcher: subprocess.Popen[bytes] | None = None


def watch_peers(task: Task, limit: float | None) -> None:
    """Watch for the peers of this process, once: both the command line and the trainer call this."""
    global _watcher
    if _watcher is not None or not needed_peers(task):
        return
    default_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    if default_hangup:  # not with nohup, which ignores it, or where a script handles it
        # SIGHUP must end this process with exit code 1, the code of a run that could not start, even while
        # TensorFlow holds the interpreter's lock: so libc's `_exit` is the handler, called with the number 1.
        _libc.signal(int(signal.SIGHUP), _exit)
    _watcher = subprocess.Popen(
        own_python("from phalanx.engines.tensorflow.tf_config import main; main()", os.getpid(), limit or ""),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    if default_hangup:
        threading.Thread(target=_restore_hangup, args=(_watcher,), name="phalanx-peers", daemon=True).start()


def _restore_hangup(watcher: subprocess.Popen[bytes]) -> None:
    """Restore SIGHUP's default when the watcher has ended, unless it has another handler meanwhile."""
    watcher.wait()
    handler = _libc.signal(int(signal.SIGHUP), int(signal.SIG_DFL))
    if handler != _exit.value:
        _libc.signal(int(signal.SIGHUP), handler)


def main() -> None:
    """Look for the peers of the process that started this one."""
    process, limit = int(sys.argv[1]), sys.argv[2]
    die_with(process)
    task = read_task()
    assert task is not None, "the process that started this one has a task"
    try:
        wait_for_peers(needed_peers(task), float(limit) if limit else None, _say)
    except CommunicationError as error:
        _say(str(error))
        os.kill(process, signal.SIGHUP)  # which may be ignored, or handled by the script
        time.sleep(_EXIT_SECONDS)
        os.kill(process, signal.SIGKILL)  # never another process of this number: this one dies with its parent


def _say(text: str) -> None:
    print(f"phalanx: {text}", file=sys.stderr, flush=True)
