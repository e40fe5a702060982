"""Abort collectives from another thread: a rank that waits for a lost one gets an error at once, not at a timeout.

What waits in shared memory registers itself (`abortable`). gloo has no call for it, so its connections are shut down:
they are the sockets between the addresses that ranks exchange in the store while a process group is made, and no
others: user code has sockets, too. nccl has its own call. A gloo group that is being made cannot be woken: it is
made in a thread, which an abort leaves behind until it fails by itself. Waiting for a value in the store polls
(`AbortableStore`). nccl's collectives end in silence: what they were to compute must not be used (`complete`,
`phalanx.recovery.ranks.gate`). An abort holds until the next group begins (`begin_group`), also for what a rank enters
after it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from phalanx import torch_compat
from phalanx.errors import CommunicationError
from phalanx.host.signed_store import inner_method

_DESCRIPTORS = "/proc/self/fd"
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_QUIET_SECONDS = 20.0
"""A group is freed so long after it was left: freeing one whose thread still handles an error can deadlock."""

_POLL_SECONDS = (0.0005, 0.01)
"""How long to wait before a value is looked for again: at first, and at most."""

_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # torch would end collectives, or the process, by itself
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "10",  # torch waits four times as long before a failed group can be left
}
_spent = {"abort": 0.0, "group": 0.0}
"""The seconds since `pop_recovery_seconds` in which this rank has aborted collectives, and made process groups."""
_watching = False
_aborted: str | None = None
"""Why this rank has to leave its group."""
_stores: list[Any] = []
"""Those of the present groups: torch calls their methods without owning them."""
_connections: set[int] = set()
"""Inodes of the sockets of gloo's groups."""
_left: list[tuple[float, list[Any]]] = []
"""Groups that were left after an abort, with their stores, and when."""


class Abortable(Protocol):
    """Something in which a rank may wait for others."""

    def abort(self, why: str) -> None:
        """Let the waiting call, and every later one, raise; called by another thread."""


_abortable: weakref.WeakSet[Any] = weakref.WeakSet()


def abortable(waits: Abortable) -> None:
    """Register what `abort_collectives` has to wake."""
    _abortable.add(waits)
    if _aborted is not None:
        waits.abort(_aborted)


def raise_if_aborted() -> None:
    """Raise where this rank has to leave its group: for what computes long without a collective."""
    if _aborted is not None:
        raise CommunicationError(_aborted)


def complete() -> None:
    """Raise where this rank has to leave its group, after the GPU has done its work: nccl does not wait for it.

    For what keeps the result of a collective, where lost ranks are replaced.
    """
    if _watching and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()
    raise_if_aborted()


def begin_group() -> None:
    """Forget the last abort: what follows belongs to the next group."""
    global _aborted
    _aborted = None


def pop_recovery_seconds() -> dict[str, float]:
    """Return the seconds that this rank has aborted collectives, and made process groups, and count anew."""
    spent = dict(_spent)
    _spent.update(dict.fromkeys(_spent, 0.0))
    return spent


def watch_groups() -> None:
    """Note the connections of each process group that is made from now on, and let its making be aborted."""
    global _watching
    if not _watching:
        _watching = True
        os.environ.update(_NCCL)
        torch_compat.around_new_groups(_make_group)


def _make_group(make: Callable[[Any], Any], store: Any, backend: str) -> Any:
    """Make a process group; raise at an abort."""
    before, began = _open_sockets(), time.monotonic()
    group: Future[Any] = Future()
    values: list[bytes] = []
    if store is not None and "nccl" in backend:  # whose threads would call Python for every value
        store = store.clone()  # its own connection: one that waits for a value admits no other call
    elif store is not None:
        store = noting = AbortableStore(store, values)
        group.add_done_callback(lambda _: noting.stop_noting())
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    call = (group, functools.partial(_make_whole, make, store), device)
    threading.Thread(target=_fulfil, args=call, name="phalanx-new-group", daemon=True).start()
    while not group.done() and _aborted is None:
        wait([group], timeout=_POLL_SECONDS[1])
    _spent["group"] += time.monotonic() - began
    if not group.done():
        raise ConnectionAbortedError(f"making a process group was ended: {_aborted}")
    if values:
        new = {inode: descriptor for inode, descriptor in _open_sockets().items() if inode not in before}
        _connections.update(inode for inode, descriptor in new.items() if _is_among(descriptor, values))
    if _aborted is not None:
        abort_collectives(_aborted)
        end_nccl()
    return group.result()


def _make_whole(make: Callable[[Any], Any], store: Any) -> Any:
    with torch_compat.new_communicators():
        return make(store)


def unsplit_groups() -> AbstractContextManager[None]:
    """Return a context in which meshes, too, get groups whose making can be aborted, if ranks may be lost."""
    return torch_compat.new_communicators() if _watching else contextlib.nullcontext()


def _fulfil(group: Future[Any], make: Callable[[], Any], device: int | None) -> None:
    try:
        if device is not None:
            torch.cuda.set_device(device)  # each thread has its own
        group.set_result(make())
    except Exception as error:  # noqa: BLE001 - raised in the thread that waits for it
        group.set_exception(error)


def _open_sockets() -> dict[int, int]:
    """Return the descriptors of this process's sockets by inode."""
    descriptors = {}
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # closed meanwhile
            if match := _SOCKET.match(os.readlink(f"{_DESCRIPTORS}/{name}")):
                descriptors[int(match[1])] = int(name)
    return descriptors


def _is_among(descriptor: int, values: list[bytes]) -> bool:
    """Whether a connection begins or ends at an address in these values, which hold it as the system does."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        ends = [_as_the_system(end) for end in (connection.getsockname(), connection.getpeername())]
        return any(end in value for end in ends if end for value in values)
    return False  # closed meanwhile, or not connected


def _as_the_system(address: Any) -> bytes:
    """Return an IP address and port as in a sockaddr; empty for what is neither IPv4 nor IPv6."""
    if not isinstance(address, tuple):
        return b""
    host, port = address[:2]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    flow = struct.pack("!I", address[2]) if family == socket.AF_INET6 else b""
    return struct.pack("=H", family) + struct.pack("!H", port) + flow + socket.inet_pton(family, host.partition("%")[0])


def abort_collectives(why: str) -> None:
    """Let every collective that waits in this process raise, and those that begin before the next `begin_group`.

    Those of nccl go on until `end_nccl`; from now on their results are not used.
    """
    global _aborted
    began = time.monotonic()
    _aborted = why
    for waits in list(_abortable):
        waits.abort(why)
    for inode, descriptor in _open_sockets().items():
        if inode in _connections:
            _shut_down(descriptor, inode)
    _spent["abort"] += time.monotonic() - began


def end_nccl() -> None:
    """End nccl's collectives: only when all ranks have aborted.

    A kernel that is ended sends what it has as if it were complete (`readLL` and `postPeer` in nccl's src/device): a
    rank that receives it, and has not aborted yet, would take a part of a sum for the sum.
    """
    began = time.monotonic()
    for waits in list(_abortable):
        if (before_end := getattr(waits, "before_end", None)) is not None:
            before_end()
    torch_compat.abort_nccl()
    _spent["abort"] += time.monotonic() - began


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
    if dist.is_initialized():
        _left.append((now, [*_stores, *torch_compat.all_groups()]))  # a list frees its last first
        abort_collectives("this rank left")  # the others get an error too, instead of waiting for this one
        end_nccl()
        dist.destroy_process_group()
    torch_compat.number_groups_from_zero()
    _abortable.clear()
    _connections.clear()
    _stores.clear()


class AbortableStore(dist.Store):
    """A store in which an abort ends the waiting for a value: its writer may be lost."""

    def __init__(self, inner: dist.Store, noted: list[bytes] | None = None) -> None:
        """`noted`: gets the values that are written and read, until `stop_noting`."""
        super().__init__()
        self._inner: Any = inner  # torch's stubs lack some of its methods
        self._why: str | None = None
        self._noted = noted
        _stores.append(self)
        abortable(self)

    def abort(self, why: str) -> None:
        """Let `get` and `wait` raise."""
        self._why = why

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        self.wait([key])
        value: bytes = self._inner.get(key)
        if self._noted is not None:
            self._noted.append(bytes(value))
        return value

    def stop_noting(self) -> None:
        """Note no more values."""
        self._noted = None

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value; raise at an abort, and after the timeout."""
        deadline = time.monotonic() + (timeout or self._inner.timeout).total_seconds()
        pause, longest = _POLL_SECONDS
        while not self._inner.check(keys):
            if self._why is not None:
                raise ConnectionAbortedError(f"waiting for other ranks was ended: {self._why}")
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"no rank has written {', '.join(keys)} in time")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        if self._noted is not None and not isinstance(value, str):
            self._noted.append(bytes(value))
        self._inner.set(key, value)

    add, check, compare_set = inner_method("add"), inner_method("check"), inner_method("compare_set")
    num_keys, set_timeout = inner_method("num_keys"), inner_method("set_timeout")
    delete_key = deleteKey = inner_method("delete_key")
    timeout: Any = property(lambda self: self._inner.timeout)

    def clone(self) -> dist.Store:
        """Return another connection to the same store."""
        return AbortableStore(self._inner.clone())


def abortable_store(store: dist.Store) -> dist.Store:
    """Return a store in which waiting can be aborted, where this rank may lose others and go on."""
    return AbortableStore(store) if _watching else store
