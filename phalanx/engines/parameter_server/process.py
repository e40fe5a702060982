"""A shard in a child process, which is restarted after a failure and ends together with its parent.

It is forked, so that torch is imported already and a start takes milliseconds. The parent keeps the listening socket
open, so connections to a shard that restarts wait instead of being refused.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from typing import NoReturn

import torch

from phalanx.engines.parameter_server.membership import ShardSpec
from phalanx.engines.parameter_server.shard import ServerShard
from phalanx.host.processes import die_with

_log = logging.getLogger("phalanx.server")
_BACKLOG = 256


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a listening socket; port 0: any free one."""
    return socket.create_server((host, port), backlog=_BACKLOG)


class ShardProcess:
    """Runs a shard in a child process, and restarts it from its saved state after a failure."""

    def __init__(self, spec: ShardSpec, host: str = "127.0.0.1", *, restarts: int = 3) -> None:
        self._spec = spec
        self._restarts = restarts
        self._listener = listen(host)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._stopping = False
        self.deaths = 0
        self._forking = threading.Lock()
        self._start()
        self._watcher = threading.Thread(target=self._watch, name="phalanx-shard-watch", daemon=True)
        self._watcher.start()

    def _start(self) -> bool:
        """Fork the shard, unless `stop` was called; return whether it runs."""
        with self._forking:
            if self._stopping:
                return False
            sys.stdout.flush()
            sys.stderr.flush()
            with warnings.catch_warnings():
                # About locks that other threads hold: the child uses none of them (see `_run_child`).
                warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
                parent = os.getpid()
                self.pid = os.fork()
            if self.pid == 0:
                _run_child(self._spec, self._listener, parent)
            self._unreaped = True
            return True

    def _watch(self) -> None:
        """Wait for the child's end, and start another child unless `stop` was called."""
        while True:
            # The pid is not reused until the child is reaped, under the lock: `stop` cannot signal another process.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            with self._forking:
                _, status = os.waitpid(self.pid, 0)
                self._unreaped = False
            if self._stopping:
                return
            self.deaths += 1
            ended = f"parameter server shard {self._spec.number} ended with status {os.waitstatus_to_exitcode(status)}"
            if self._spec.storage is None or self.deaths > self._restarts:
                _log.error("%s, and is not started again", ended)
                self._listener.close()  # so that connections are refused at once instead of waiting for ever
                return
            _log.warning("%s: starting it again from its saved state", ended)
            if not self._start():
                return

    def stop(self) -> None:
        """End the shard and wait for it; by a signal, as later children would keep a pipe open."""
        with self._forking:
            if self._stopping:
                return
            self._stopping = True
            if self._unreaped:
                os.kill(self.pid, signal.SIGKILL)
        self._watcher.join()
        self._listener.close()
        if self._spec.slots is not None:
            self._spec.slots.close()


def _run_child(spec: ShardSpec, listener: socket.socket, parent: int) -> NoReturn:
    """Release everything inherited from the parent, and serve."""
    code = 1
    try:
        die_with(parent)
        gc.freeze()  # the parent's process groups must not be destroyed here: their threads do not exist here
        faulthandler.disable()  # it would write into a descriptor that is closed now
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # the rank ends the shard: it may have a last checkpoint to write
        slots = spec.slots.descriptors if spec.slots is not None else set()
        _close_inherited({0, 1, 2, listener.fileno(), *slots})
        torch.set_num_threads(1)  # the threads of OpenMP are not forked
        ServerShard(spec, listener).serve()
        code = 0
    except BaseException:
        _log.exception("parameter server shard %d", spec.number)
        raise
    finally:
        os._exit(code)


def _close_inherited(open_descriptors: set[int]) -> None:
    """Close the parent's descriptors: an open copy of its sockets would hide its failure from the other ranks."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in open_descriptors:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed already
                os.close(int(name))
