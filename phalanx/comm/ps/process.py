"""A shard as a process of its own: forked, watched, started again where it died, gone when its parent is.

Forked like a DataLoader's worker: torch is imported already, so a shard is up in milliseconds. The parent keeps the
listening socket open, so callers of a shard that is being started again wait in line instead of being refused.
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

from phalanx.comm.ps.membership import ShardSpec
from phalanx.comm.ps.shard import ServerShard
from phalanx.host.processes import die_with

_log = logging.getLogger("phalanx.server")
_BACKLOG = 256


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at an address of this machine; port 0: any that is free."""
    return socket.create_server((host, port), backlog=_BACKLOG)


class ShardProcess:
    """Runs a shard in a child process, and starts it again from its saved state where it dies."""

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
            if not self._stopping:
                self.pid = self._fork()
                self._unreaped = True
            return not self._stopping

    def _fork(self) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Of locks that other threads hold: the child uses none of theirs (see `_be_shard`).
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            parent = os.getpid()
            pid = os.fork()
        if pid == 0:
            _be_shard(self._spec, self._listener, parent)
        return pid

    def _watch(self) -> None:
        """Wait for the child's end; one that nobody asked for is followed by another child."""
        while True:
            # Its number stays its own until it is reaped, under the lock: `stop` cannot signal another process.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            with self._forking:
                _, status = os.waitpid(self.pid, 0)
                self._unreaped = False
            if self._stopping:
                return
            self.deaths += 1
            ended = f"parameter server shard {self._spec.number} ended with status {os.waitstatus_to_exitcode(status)}"
            if self._spec.vault is None or self.deaths > self._restarts:
                _log.error("%s, and is not started again", ended)
                self._listener.close()  # callers are refused at once, where they would wait in line for ever
                return
            _log.warning("%s: starting it again from its saved state", ended)
            if not self._start():
                return

    def stop(self) -> None:
        """End the shard and wait for it.

        By a signal: the end of a pipe would be seen only when all processes that this one forked since, such as the
        workers of a DataLoader, have closed their copies of it.
        """
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


def serve(spec: ShardSpec, listener: socket.socket) -> None:
    """Serve a shard in this process until the listening socket is closed, in another thread or by a signal."""
    ServerShard(spec, listener).serve()


def _be_shard(spec: ShardSpec, listener: socket.socket, parent: int) -> NoReturn:
    """In the child: let go of everything that was the parent's, and serve."""
    code = 1
    try:
        die_with(parent)
        gc.freeze()  # the parent's process groups must not be torn down here: their threads are not here
        faulthandler.disable()  # it would write into a descriptor that is closed now
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # the rank decides: it may have a last checkpoint to write
        slots = spec.slots.descriptors if spec.slots is not None else set()
        _close_inherited({0, 1, 2, listener.fileno(), *slots})
        torch.set_num_threads(1)  # OpenMP's threads did not come along
        serve(spec, listener)
        code = 0
    except BaseException:
        _log.exception("parameter server shard %d", spec.number)
        raise
    finally:
        os._exit(code)


def _close_inherited(kept: set[int]) -> None:
    """Close the parent's descriptors: an open copy of its sockets would hide its death from the other ranks."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.close(int(name))
