"""Abort collectives from another thread: a rank that waits for a lost one gets an error at once, not at a timeout.

What waits in shared memory registers itself (`abortable`). gloo has no call for it, so its connections are shut down:
they are found as the sockets that appear while a process group is made. nccl has a call of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import weakref
from typing import Any, Protocol

import torch.distributed as dist

from phalanx import torch_compat
from phalanx.world.groups import forget_groups

_DESCRIPTORS = "/proc/self/fd"
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_QUIET_SECONDS = 20.0
"""A group is freed so long after it was left: freeing one whose thread still handles an error can deadlock."""

_watching = False
_connections: set[int] = set()
"""Inodes of the sockets of gloo's groups."""
_left: list[tuple[float, list[Any]]] = []
"""Groups that were left after an abort, and when."""


class Abortable(Protocol):
    """Something in which a rank may wait for others."""

    def abort(self, why: str) -> None:
        """Let the waiting call, and every later one, raise; called by another thread."""


_abortable: weakref.WeakSet[Any] = weakref.WeakSet()


def abortable(waits: Abortable) -> None:
    """Register what `abort_collectives` has to wake."""
    _abortable.add(waits)


def watch_groups() -> None:
    """Note the connections of each process group that is made from now on."""
    global _watching
    if not _watching:
        _watching = True
        torch_compat.around_new_groups(_noting_sockets)


@contextlib.contextmanager
def _noting_sockets() -> Any:
    before = _open_sockets()
    yield
    _connections.update(_open_sockets().keys() - before.keys())


def _open_sockets() -> dict[int, int]:
    """Return the descriptors of this process's sockets by inode."""
    found = {}
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # closed meanwhile
            if match := _SOCKET.match(os.readlink(f"{_DESCRIPTORS}/{name}")):
                found[int(match[1])] = int(name)
    return found


def abort_collectives(why: str) -> None:
    """Let every collective that waits in this process raise, and those that begin before `leave_groups`."""
    for waits in list(_abortable):
        waits.abort(why)
    for inode, descriptor in _open_sockets().items():
        if inode in _connections:
            _shut_down(descriptor, inode)
    torch_compat.abort_nccl()


def _shut_down(descriptor: int, inode: int) -> None:
    with contextlib.suppress(OSError):  # closed meanwhile, or a listening socket, which has no peer
        copy = os.dup(descriptor)
        with socket.socket(fileno=copy) as connection:
            if os.fstat(copy).st_ino == inode and connection.getpeername():
                connection.shutdown(socket.SHUT_RDWR)


def leave_groups() -> None:
    """Leave all process groups without communication: other ranks may be lost. No model may use them any more."""
    now = time.monotonic()
    while _left and now - _left[0][0] > _QUIET_SECONDS:
        _left.pop(0)
    forget_groups()
    if dist.is_initialized():
        _left.append((now, torch_compat.all_groups()))
        abort_collectives("this rank left")  # the others get an error too, instead of waiting for this one
        dist.destroy_process_group()
    _abortable.clear()
    _connections.clear()
