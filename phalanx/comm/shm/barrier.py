"""A barrier in shared memory on Linux futexes, which also detects ranks that failed or call another collective.

A futex is a 32-bit word in shared memory, reached through libc: waiting for another process without polling.
`futex_wait` blocks until the word is woken, and returns at once when the word has changed already: no wake-up is lost
between reading the word and waiting.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import time
import zlib

from phalanx.comm.shm.pages import SharedPages
from phalanx.errors import CommunicationError
from phalanx.world.abort import abortable

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_ALL_WAITERS = 2**31 - 1
_ADD_ONE = 1 << 28 | 1 << 12
"""FUTEX_OP_ADD with the operand 1."""

SLOT = 256
"""Bytes of each rank's slot: a counter, and two signatures in turn. Whole cache lines, which ranks do not share."""
SIGNATURE = 112
_SPIN_S = 50e-6
_CHECK_S = 0.5
_WRAP = 2**32


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NUMBER = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
_syscall = ctypes.CDLL(None, use_errno=True).syscall if _NUMBER is not None else None


def has_futexes() -> bool:
    """Whether this system has futexes with a known system call number."""
    return _syscall is not None


def futex_wait(address: int, value: int, seconds: float) -> None:
    """Wait until the word at `address` is woken, unless it differs from `value`; at most `seconds`."""
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    if _syscall(_NUMBER, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(value), ctypes.byref(limit), None, 0) != 0:  # type: ignore[misc]
        reason = ctypes.get_errno()
        if reason not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(reason, f"futex wait: {os.strerror(reason)}")


def futex_wake(address: int) -> None:
    """Wake all processes that wait for the word at `address`, which stays as it is."""
    _syscall(_NUMBER, ctypes.c_void_p(address), _WAKE, _ALL_WAITERS, None, None, 0)  # type: ignore[misc]


def futex_count_and_wake(address: int) -> None:
    """Add one to the word at `address`, and wake all processes that wait for it.

    The kernel adds atomically, after all earlier writes of this rank: a process that sees the new count sees the data.
    """
    word = ctypes.c_void_p(address)
    if _syscall(_NUMBER, word, _WAKE_OP, _ALL_WAITERS, 0, word, _ADD_ONE) < 0:  # type: ignore[misc]
        reason = ctypes.get_errno()
        raise OSError(reason, f"futex wake: {os.strerror(reason)}")


class ShmBarrier:
    """A barrier for the ranks that share `pages`, in the first `size` slots."""

    def __init__(self, pages: SharedPages, timeout: float) -> None:
        self.pages = pages
        self.timeout = timeout
        self.count = 0
        self._rank, self._size = pages.rank, pages.size
        self._bytes = memoryview(pages.memory)[: self._size * SLOT]
        self._words = self._bytes.cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(pages.memory))
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        self._aborted = ""
        abortable(self)
        # Spinning occupies a core: only for a moment, and only where every rank has a core.
        self._spin_s = _SPIN_S if self._size <= len(os.sched_getaffinity(0)) else 0.0

    def wait(self, signature: bytes = b"") -> None:
        """Wait until all ranks have called this, and check that their signatures are equal."""
        signature = _fitted(signature)
        self.arrive(signature)
        self.await_others()
        for rank in self._others:
            at = self._signature_at(rank)
            if self._bytes[at : at + SIGNATURE] != signature:
                raise self._mismatch()

    def arrive(self, signature: bytes) -> None:
        """Let the others see this rank and its signature, without waiting for them: `await_others` does."""
        if self._aborted:
            raise self._abort_error()
        self.count = (self.count + 1) % _WRAP
        offset = self._signature_at(self._rank)
        self._bytes[offset : offset + len(signature)] = signature
        futex_count_and_wake(self._address + self._rank * SLOT)

    def await_others(self) -> None:
        """Wait until all ranks have arrived."""
        for rank in self._others:
            self._await(rank)

    def signatures(self) -> list[memoryview]:
        """Return the signatures of all ranks, which have arrived, by rank."""
        places = [self._signature_at(rank) for rank in range(self._size)]
        return [self._bytes[place : place + SIGNATURE] for place in places]

    def abort(self, why: str) -> None:
        """Let this rank's waiting call raise, and every later one; called by another thread."""
        self._aborted = why
        for rank in self._others:
            futex_wake(self._address + rank * SLOT)

    def _abort_error(self) -> CommunicationError:
        return CommunicationError(f"rank {self._rank} waited for others in shared memory: {self._aborted}")

    def _signature_at(self, rank: int) -> int:
        """Return the offset of a signature; two take turns, so that a rank in the next barrier overwrites none."""
        return rank * SLOT + 16 + SIGNATURE * (self.count & 1)

    def _await(self, rank: int) -> None:
        word = rank * SLOT // 4
        words, count = self._words, self.count
        if (words[word] - count) % _WRAP < _WRAP // 2:
            return
        begin = time.perf_counter()
        while time.perf_counter() - begin < self._spin_s:
            if (words[word] - count) % _WRAP < _WRAP // 2:
                return
        while True:
            value = words[word]
            if (value - count) % _WRAP < _WRAP // 2:
                return
            futex_wait(self._address + rank * SLOT, value, _CHECK_S)
            if self._aborted:
                raise self._abort_error()
            if words[word] == value:
                self._check_peer(rank, time.perf_counter() - begin)

    def _check_peer(self, rank: int, waited: float) -> None:
        if not self.pages.is_alive(rank) and self._is_missing(rank):  # it may have arrived and then ended normally
            raise CommunicationError(f"rank {rank} has died: rank {self._rank} waited for it in shared memory")
        if waited > self.timeout:
            late = [str(peer) for peer in self._others if self._is_missing(peer)]
            raise CommunicationError(
                f"rank {self._rank} waited {waited:.0f} s in shared memory for rank{'s' * (len(late) > 1)} "
                f"{', '.join(late)}",
                hint="That rank hangs, or does not take part in this collective; `timeout` sets how long ranks wait.",
            )

    def _is_missing(self, rank: int) -> bool:
        """Whether a rank has not reached this barrier."""
        return (self._words[rank * SLOT // 4] - self.count) % _WRAP >= _WRAP // 2

    def _mismatch(self) -> CommunicationError:
        ranks_by_text: dict[str, list[str]] = {}
        for rank in range(self._size):
            at = self._signature_at(rank)
            text = bytes(self._bytes[at : at + SIGNATURE]).rstrip(b"\0").decode(errors="replace")
            ranks_by_text.setdefault(text, []).append(str(rank))
        parts = [f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
        return CommunicationError(
            f"ranks called different collectives: {'; '.join(parts)}",
            hint="Every rank must call the same collectives in one order, with equal shapes, dtypes and operations.",
        )


def _fitted(signature: bytes) -> bytes:
    """Pad a signature to its length; one that is too long is cut and gets a checksum."""
    if len(signature) > SIGNATURE:
        return signature[: SIGNATURE - 12] + f" ..{zlib.crc32(signature):08x} ".encode()[:12]
    return signature.ljust(SIGNATURE, b"\0")
