"""Linux's futex, through libc: waiting for another process without polling.

A futex is a 32-bit word in shared memory. `wait` blocks until the word is woken, and returns at once when the word has
changed already: no wake-up is lost between reading the word and waiting.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_ALL_WAITERS = 2**31 - 1
_ADD_ONE = 1 << 28 | 1 << 12
"""FUTEX_OP_ADD with the operand 1."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NUMBER = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
_syscall = ctypes.CDLL(None, use_errno=True).syscall if _NUMBER is not None else None


def is_available() -> bool:
    """Whether this system has futexes with a known system call number."""
    return _syscall is not None


def wait(address: int, seen: int, seconds: float) -> None:
    """Wait until the word at `address` is woken, unless it differs from `seen`; at most so many seconds."""
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    if _syscall(_NUMBER, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0) != 0:  # type: ignore[misc]
        reason = ctypes.get_errno()
        if reason not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(reason, f"futex wait: {os.strerror(reason)}")


def wake(address: int) -> None:
    """Wake all processes that wait for the word at `address`, which stays as it is."""
    _syscall(_NUMBER, ctypes.c_void_p(address), _WAKE, _ALL_WAITERS, None, None, 0)  # type: ignore[misc]


def count_and_wake(address: int) -> None:
    """Add one to the word at `address`, and wake all processes that wait for it.

    The kernel adds atomically, after all earlier writes of this rank: a process that sees the new count sees the data.
    """
    word = ctypes.c_void_p(address)
    if _syscall(_NUMBER, word, _WAKE_OP, _ALL_WAITERS, 0, word, _ADD_ONE) < 0:  # type: ignore[misc]
        reason = ctypes.get_errno()
        raise OSError(reason, f"futex wake: {os.strerror(reason)}")
